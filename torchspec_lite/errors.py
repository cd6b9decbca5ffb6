"""The errors a person can act on."""


class UserError(Exception):
    """Something outside the program is wrong: the message names the thing, the place and the remedy.

    The command line prints the message without a traceback and exits with code 2.
    """
