"""Why a serving replica did not take a drafter version."""


class SwapRefused(Exception):
    """A version was not taken; the engine drafts with the weights it had.

    `stage` is "check" (nothing was changed: manifest, names, shapes, numbers, config) or "load" (the old weights were
    put back); `reason` names the rank and the fault.
    """

    def __init__(self, stage: str, reason: str):
        super().__init__(stage, reason)
        self.stage = stage
        self.reason = reason

    def __str__(self):
        return f"{self.stage}: {self.reason}"
