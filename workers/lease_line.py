"""A target worker's line to the coordinator."""

import asyncio
import uuid

from torchspec_lite.lease import Lease, LeaseCall
from workers.link import ask


class LeaseLine:
    """The coordinator, an actor, as workers.target sees it (`LeaseSource`). One for a process of the worker.

    It keeps what the worker's engine has in hand: the coordinator is told with each call, and leases that are `alone` are
    done before it asks for more. Each call raises CoordinatorLost after a while (`workers.link.ask`).
    """

    def __init__(self, coordinator, who: str):
        self.coordinator, self.who = coordinator, who
        self.process, self.number = uuid.uuid4().hex, 0
        self.held: set[tuple[str, int]] = set()
        self.alone = False
        self.idle = asyncio.Event()

    async def lease(self, worker: str, count: int) -> list[Lease] | None:
        if self.alone:
            await self.idle.wait()  # at most as long as the worker gives each sample
        self.number += 1
        leases = await ask(self.coordinator, self.who, "lease", worker, count, LeaseCall(self.process, self.number, tuple(self.held)))
        self.held.update((lease.id, lease.attempt) for lease in leases or ())
        self.alone = any(lease.alone for lease in leases or ())
        self._note()
        return leases

    async def captured(self, id: str, attempt: int, tokens: int) -> None:
        """Nothing to tell: the trainer says when it holds the sample."""
        self._done(id, attempt)

    async def rejected(self, id: str, attempt: int, reason: str, detail: str) -> None:
        await ask(self.coordinator, self.who, "rejected", id, attempt, reason, detail)
        self._done(id, attempt)

    async def failed(self, id: str, attempt: int, detail: str) -> None:
        await ask(self.coordinator, self.who, "failed", id, attempt, detail)
        self._done(id, attempt)

    def _done(self, id: str, attempt: int) -> None:
        self.held.discard((id, attempt))
        self._note()

    def _note(self) -> None:
        self.idle.clear() if self.held else self.idle.set()
