"""A worker's line to the coordinator: calls with a limit, and tellings that are not waited for until it matters."""

import asyncio

import ray
from ray.exceptions import GetTimeoutError

from workers.death import DEATHS, death_in_words

CALL_S = 120.0
MOST_UNREAD = 256
RETRIES = 3


class CoordinatorLost(Exception):
    """The coordinator did not answer in time or is gone."""


class Link:
    """Blocking calls of the coordinator's methods from a worker's thread. `tell` sends in order without waiting;
    `settle` waits until everything told has been taken in, and raises what went wrong."""

    def __init__(self, coordinator: ray.actor.ActorHandle, who: str):
        self.coordinator, self.who = coordinator, who
        self.told: list[ray.ObjectRef] = []

    def call(self, method: str, *args):
        """Raises CoordinatorLost after CALL_S; a coordinator that restarts is asked again. Every method may be called
        twice with the same effect as once."""
        for attempt in range(RETRIES):
            try:
                return ray.get(getattr(self.coordinator, method).remote(*args), timeout=CALL_S)
            except GetTimeoutError as error:
                raise CoordinatorLost(f"{self.who} waited {CALL_S:.0f} s for the coordinator to answer {method}") from error
            except DEATHS as error:
                if attempt == RETRIES - 1:
                    raise CoordinatorLost(f"{self.who} called {method}, but the coordinator is gone: "
                                          f"{death_in_words(error)}") from error

    def tell(self, method: str, *args) -> None:
        self.told.append(getattr(self.coordinator, method).remote(*args))
        if len(self.told) > MOST_UNREAD:
            self.settle()

    def settle(self) -> None:
        told, self.told = self.told, []
        try:
            ray.get(told, timeout=CALL_S)
        except GetTimeoutError as error:
            raise CoordinatorLost(f"{self.who} waited {CALL_S:.0f} s for the coordinator to take {len(told)} messages") from error


async def ask(coordinator, who: str, method: str, *args):
    """`Link.call` for those who wait on an event loop. Raises CoordinatorLost after CALL_S."""
    try:
        async with asyncio.timeout(CALL_S):
            return await getattr(coordinator, method).remote(*args)
    except TimeoutError:
        # Not `from` it: behind it is the cancelled wait, which says nothing.
        raise CoordinatorLost(f"{who} waited {CALL_S:.0f} s for the coordinator to answer {method}") from None


class Awaited:
    """An actor's methods as awaitables, `await line.method(…)`, so that callers need not know it is an actor."""

    def __init__(self, actor: ray.actor.ActorHandle):
        self._actor = actor

    def __getattr__(self, method: str):
        return getattr(self._actor, method).remote
