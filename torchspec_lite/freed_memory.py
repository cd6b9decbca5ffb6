"""Freed memory goes back to the system, at a bounded rate.

Samples differ in size, live long and are freed by another thread than made them, so glibc's heaps keep holes between
them: a sender's grew by half its budget in a minute.
"""

import ctypes
import time

BETWEEN_S = 0.5  # giving back walks all heaps and holds each one's lock: milliseconds


class FreedMemory:
    """Counts what its owner freed. For one thread."""

    def __init__(self, enough: int):
        """`enough` bytes freed are worth giving back."""
        self._enough = enough
        self._bytes = 0
        self._next = 0.0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, other C libraries do not

    def add(self, nbytes: int) -> None:
        self._bytes += nbytes

    def give_back(self) -> bool:
        """Give it back if there is enough and the last time is long ago; whether it was done."""
        if self._bytes < self._enough or self._trim is None or time.monotonic() < self._next:
            return False
        self._bytes = 0
        self._trim(ctypes.c_size_t(0))
        self._next = time.monotonic() + BETWEEN_S
        return True
