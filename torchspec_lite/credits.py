"""The receiver's accounts: who asked for credit, who has it, and what its owner holds. Bytes and samples."""

import heapq
from dataclasses import dataclass

MAX_WANTS = 4096  # samples one sender may ask for at once


@dataclass(frozen=True)
class PeerCredit:
    """One sender's account."""

    wanted_samples: int
    wanted_bytes: int
    granted_samples: int
    granted_bytes: int


class Credits:
    """Invariant: bytes granted + bytes held <= budget, and the same for samples, whatever senders do.

    Credit is given for a named sample of a stated size, lowest ordinal first, so that a trainer that needs samples in
    order is not blocked by later ones. A sample too large for the room left waits, and nothing overtakes it.
    """

    def __init__(self, budget_bytes: int, max_samples: int):
        self.budget_bytes = budget_bytes
        self.max_samples = max_samples
        self.held_bytes = 0
        self.held_samples = 0
        self.granted_bytes = 0
        self._queue: list[tuple[int, int, str, int]] = []  # (ordinal, arrival, peer, seq)
        self._arrivals = 0
        self._wants: dict[str, dict[int, int]] = {}  # peer: {seq: bytes}
        self._grants: dict[str, dict[int, int]] = {}

    def want(self, peer: str, seq: int, ordinal: int, nbytes: int) -> str | None:
        """Queue a request. Returns why it can never be granted, or None."""
        if nbytes > self.budget_bytes:
            return f"too_large: {nbytes} bytes, the receiver's whole budget is {self.budget_bytes}"
        wants = self._wants.setdefault(peer, {})
        if len(wants) >= MAX_WANTS:
            return f"flood: more than {MAX_WANTS} requests at once"
        if seq not in wants and seq not in self._grants.get(peer, {}):
            wants[seq] = nbytes
            heapq.heappush(self._queue, (ordinal, self._arrivals, peer, seq))
            self._arrivals += 1
        return None

    def grant(self) -> dict[str, list[int]]:
        """Give credit while there is room: {peer: sequence numbers}."""
        given: dict[str, list[int]] = {}
        while self._queue:
            _, _, peer, seq = self._queue[0]
            nbytes = self._wants[peer][seq]
            samples = self.held_samples + sum(len(grants) for grants in self._grants.values())
            room = self.budget_bytes - self.held_bytes - self.granted_bytes
            if nbytes > room or samples >= self.max_samples:
                break
            heapq.heappop(self._queue)
            del self._wants[peer][seq]
            self._grants.setdefault(peer, {})[seq] = nbytes
            self.granted_bytes += nbytes
            given.setdefault(peer, []).append(seq)
        return given

    def take(self, peer: str, seq: int) -> int | None:
        """A sample came: its credit becomes held bytes, which are returned; None if it had no credit."""
        nbytes = self._grants.get(peer, {}).pop(seq, None)
        if nbytes is not None:
            self.granted_bytes -= nbytes
            self.held_bytes += nbytes
            self.held_samples += 1
        return nbytes

    def release(self, nbytes: int) -> None:
        """The owner no longer holds a sample."""
        self.held_bytes -= nbytes
        self.held_samples -= 1

    def forget(self, peer: str) -> None:
        """A sender is gone: what it asked for and was granted comes back; what is held stays held."""
        if self._wants.pop(peer, None):  # now: behind a request that waits for room they would stay, and add up
            self._queue = [entry for entry in self._queue if entry[2] != peer]
            heapq.heapify(self._queue)
        self.granted_bytes -= sum(self._grants.pop(peer, {}).values())

    def account(self, peer: str) -> PeerCredit:
        wants, grants = self._wants.get(peer, {}), self._grants.get(peer, {})
        return PeerCredit(len(wants), sum(wants.values()), len(grants), sum(grants.values()))
