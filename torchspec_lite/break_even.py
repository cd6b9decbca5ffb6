"""From which acceptance length on drafting gains time, and up to how many requests at once it does."""

from collections.abc import Mapping

WINDOW = 256
"""Draft rounds that are remembered, about: enough to know an acceptance length within 0.1."""
LOOK_EVERY = 32
"""Where drafting does not pay, one engine step in so many drafts all the same, to see whether it does by now."""


def break_even(acceptance_length: float, speedup: float) -> float:
    """Acceptance length at which drafting neither costs nor gains, from a measurement at one concurrency.

    A draft round takes some multiple of a plain step, whatever the drafter guesses, and yields `acceptance_length`
    tokens: the speedup is the one divided by the other.
    """
    return acceptance_length / speedup


def needed(table: Mapping[int, float], running: int) -> float:
    """Acceptance length that pays with so many requests at once: between two measured concurrencies on a straight line,
    beyond the ends as at the ends. `table` holds at least one."""
    known = sorted(table)
    above = next((concurrency for concurrency in known if concurrency >= running), known[-1])
    below = max((concurrency for concurrency in known if concurrency <= running), default=above)
    if above == below:
        return table[above]
    share = (running - below) / (above - below)
    return table[below] + share * (table[above] - table[below])


def pays_up_to(table: Mapping[int, float], acceptance_length: float) -> int:
    """Most requests at once, among 1 to the largest in `table`, for which drafting pays at this acceptance length and
    at each smaller number; 0 when it does not pay for one."""
    concurrency = 0
    while concurrency < max(table) and needed(table, concurrency + 1) <= acceptance_length:
        concurrency += 1
    return concurrency


class Paying:
    """Where drafting pays at present, by the acceptance of the latest rounds. `table` as above."""

    def __init__(self, table: Mapping[int, float]):
        self.table = table
        self.rounds = self.accepted = self.steps = 0

    def verified(self, accepted: int) -> None:
        """A draft round was verified and so many of its tokens were accepted."""
        self.rounds += 1
        self.accepted += accepted
        if self.rounds == 2 * WINDOW:
            self.rounds //= 2
            self.accepted /= 2

    def step(self) -> int | None:
        """An engine step begins: up to how many requests at once it should draft; None: whatever their number."""
        self.steps += 1
        if self.rounds < WINDOW or self.steps % LOOK_EVERY == 0:
            return None
        return pays_up_to(self.table, 1 + self.accepted / self.rounds)
