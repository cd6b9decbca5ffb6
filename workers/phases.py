"""Where a trainer rank's time goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch.profiler import record_function

from workers.reports import PHASES


class Phases:
    """Seconds since the start by what the rank was doing; time in an inner phase is not counted for the outer one.

    `seconds` has every name of PHASES from the start. A GPU's work counts where the CPU waits for it. With `traced`
    each phase is a span in a profiler's trace.
    """

    def __init__(self, traced: bool):
        self.traced = traced
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.inner = [0.0]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block as `name`, one of PHASES."""
        begin = time.perf_counter()
        self.inner.append(0.0)
        try:
            with record_function(name) if self.traced else nullcontext():
                yield
        finally:
            took = time.perf_counter() - begin
            self.seconds[name] += took - self.inner.pop()
            self.inner[-1] += took
