"""A process that is stopped for good is noticed and ended, and whoever waits for its call hears of it."""

import asyncio
import os
import signal
import threading

import pytest
import ray
from ray.exceptions import RayActorError

from cluster.attendance import attend

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


async def _lost(reference) -> None:
    with pytest.raises(RayActorError):
        await reference
