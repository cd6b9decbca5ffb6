"""Attendance: who works through one long call is asked now and then whether it is there, and is ended if it never answers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import ray

from workers.death import DEATHS

ASK_EVERY_S = 10.0
ANSWER_LIMIT_S = 300.0
"""A process silent for so long is stopped for good, or hangs."""


async def attend(who: str, actor: ray.actor.ActorHandle, tell: Callable[[str], Awaitable[None]],
                 limit_s: float = ANSWER_LIMIT_S) -> None:
    """Ask `actor.present()` until cancelled, or until the actor is gone. One that does not answer within `limit_s` is
    killed, after `tell` was told; Ray ends a stopped process too, and the actor's calls then fail with one of
    workers.death.DEATHS."""
    while True:
        try:
            async with asyncio.timeout(limit_s):
                await actor.present.remote()
        except TimeoutError:
            await tell(f"{who} has not answered for {limit_s:g} s: its process is stopped or hangs, and is ended")
            ray.kill(actor)
            return
        except DEATHS:
            return  # whoever waits for its call is told
        await asyncio.sleep(ASK_EVERY_S)


@asynccontextmanager
async def attended(actors: dict[str, ray.actor.ActorHandle], tell: Callable[[str], Awaitable[None]]) -> AsyncIterator[None]:
    """`attend` each of these, by name, for as long as the body takes."""
    tasks = [asyncio.create_task(attend(who, actor, tell)) for who, actor in actors.items()]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
