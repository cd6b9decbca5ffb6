"""A process that is stopped for good is noticed and ended, and whoever waits for its call hears of it."""

import asyncio
import os
import signal
import threading

import pytest
import ray
from ray.exceptions import OutOfMemoryError, RayActorError

from cluster.attendance import attend
from workers.death import DEATHS, death_in_words

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def worker():
    class Worker:  # inside: Ray's processes cannot import this file
        def __init__(self):
            self.done = threading.Event()

        def pid(self) -> int:
            return os.getpid()

        def work(self) -> str:
            self.done.wait()
            return "done"

        def finish(self) -> None:
            self.done.set()

        def present(self) -> None:
            pass

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
    try:
        yield ray.remote(Worker).options(max_concurrency=3).remote()
    finally:
        ray.shutdown()


def test_a_stopped_process_is_ended_and_named(worker):
    told = []

    async def tell(text):
        told.append(text)

    async def story():
        work = worker.work.remote()
        os.kill(await worker.pid.remote(), signal.SIGSTOP)
        await asyncio.gather(attend("trainer 0", worker, tell, limit_s=0.5), _lost(work))

    asyncio.run(story())
    assert told == ["trainer 0 has not answered for 0.5 s: its process is stopped or hangs, and is ended"]


def test_one_that_answers_is_left_alone(worker):
    async def tell(text):
        raise AssertionError(text)

    async def story():
        work = worker.work.remote()
        attending = asyncio.create_task(attend("trainer 0", worker, tell, limit_s=60))
        await worker.pid.remote()
        await worker.finish.remote()
        assert await work == "done"
        assert not attending.done()
        attending.cancel()

    asyncio.run(story())


@pytest.fixture
def no_memory():
    """A worker on a node whose memory is full by its own measure, so that Ray's memory monitor ends it."""
    class Worker:
        async def work(self) -> None:
            await asyncio.Event().wait()

        async def present(self) -> None:
            pass

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20,
             _system_config={"memory_usage_threshold": 0.001, "memory_monitor_refresh_ms": 100})
    try:
        yield ray.remote(Worker).remote()
    finally:
        ray.shutdown()


def test_a_process_that_rays_memory_monitor_ends_is_gone(no_memory):
    async def tell(text):
        raise AssertionError(text)

    async def story():
        with pytest.raises(DEATHS) as lost:
            await no_memory.work.remote()
        assert isinstance(lost.value, OutOfMemoryError) and "memory ran out" in death_in_words(lost.value)
        await attend("target-0", no_memory, tell)

    asyncio.run(story())


async def _lost(reference) -> None:
    with pytest.raises(RayActorError):
        await reference
