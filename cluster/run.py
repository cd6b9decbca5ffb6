"""The driver: the story of a run, from an empty directory to a drafter that serves."""

import asyncio
import logging
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import ray

from cluster import pool as pools
from cluster.crew import Crew
from cluster.dashboard import start_dashboard
from cluster.judge import Judge
from cluster.placement import make_plan
from cluster.reservation import reserve
from cluster.roles import start_coordinator
from cluster.screen import Screen
from cluster.session import session
from cluster.summary import summarize
from torchspec_lite import config as configs
from torchspec_lite.config import Config, resolve_secret
from torchspec_lite.errors import UserError
from torchspec_lite.logs import cause_of, one_line, setup_logging
from torchspec_lite.sample_order import SampleOrder, read_order
from torchspec_lite.target import TargetInfo, describe
from torchspec_lite.target_folder import cache_dir, resolve_target

log = logging.getLogger(__name__)
OBSERVE_EVERY_S = 1.0


@dataclass(frozen=True)
class Run:
    """What does not change while a run goes on."""

    config: Config
    info: TargetInfo
    started: float
    screen: Screen


def train(config: Config, resume: bool, quiet: bool) -> tuple[dict, str]:
    """Run to the end; the closing object and page. Ctrl-C or SIGTERM ends it early with a checkpoint."""
    info = describe(resolve_target(config.target.model))
    plan, order = make_plan(config, info), read_order(config, cache_dir())
    started = open_run_dir(config, resume, order)
    setup_logging(config.run_dir, config.name, "driver", secrets=configs.secrets(config))
    with Screen(quiet) as screen:
        run = Run(config, info, started, screen)
        screen.say(f"run directory {config.run_dir}")
        with session(config.ray, plan):
            return asyncio.run(story(run))


async def story(run: Run) -> tuple[dict, str]:
    """Capture, train, serve, judge; all at once."""
    reservation = await asyncio.to_thread(reserve, run.config)
    coordinator = start_coordinator(run.config, run.started)
    await coordinator.versions.remote()
    await coordinator.link.remote("ray", ray.get_runtime_context().gcs_address)
    dashboard = await open_dashboard(run, coordinator)
    crew, judge = Crew(run.config, run.info, coordinator, reservation), Judge(
        run.config, run.info, coordinator, run.screen, lambda: crew.traffic)
    watch = asyncio.create_task(observe(run, coordinator, judge))
    interrupted = stop_on_signals(crew, coordinator, run.screen)
    state, reason, trained = "failed", None, None
    try:
        async with asyncio.TaskGroup() as work:
            training = work.create_task(crew.train())
            for name in crew.names:
                work.create_task(crew.capture(name))
            judging = work.create_task(judge.judge_versions())
            training.add_done_callback(lambda _: judge.no_more())
        trained = training.result()
        state = "stopped" if interrupted.is_set() else "finished"
        await coordinator.settle.remote()
        account = await coordinator.account.remote()
        return summarize(run.config.run_dir, state, account, trained, *judging.result(),
                         time.time() - run.started, run.config.profile, next_command(run.config))
    except BaseExceptionGroup as errors:
        found = cause_of(errors)
        reason = one_line(found)
        raise found from None
    finally:
        watch.cancel()
        await coordinator.finish.remote(state, reason or await coordinator.stop_reason.remote())
        if run.config.serve.replicas and not run.config.serve.external:
            await asyncio.to_thread(pools.stop, run.config)
        if dashboard is not None:
            dashboard.close()


def open_run_dir(config: Config, resume: bool, order: SampleOrder) -> float:
    """Make the run directory with its ledger, or enter it again; when the run first began. Raises UserError for the
    wrong one of the two, or when the ledger does not fit; the directory's config is written when all of it does."""
    folder, mark = config.run_dir, config.run_dir / "config.yaml"
    if mark.exists() and not resume:
        raise UserError(f"run directory {folder} is of an earlier run; add --resume to go on with it, or name=… for a new one")
    if resume and not mark.exists():
        raise UserError(f"run directory {folder}: nothing to resume there; leave --resume out to start")
    folder.mkdir(parents=True, exist_ok=True)
    started = mark.stat().st_ctime if mark.exists() else time.time()
    order.queue(folder / "ledger.sqlite", config.trainer.reuse)
    configs.save(config, mark)
    return started


async def open_dashboard(run: Run, coordinator):
    """The live page, if the config wants one."""
    options = run.config.dashboard
    if not options.enabled:
        return None
    page = start_dashboard(run.config.run_dir, options.host, options.port, resolve_secret(options.token, "dashboard.token"))
    run.screen.say(f"live page {page.url}")
    await coordinator.link.remote("dashboard", page.url)
    return page


async def observe(run: Run, coordinator, judge: Judge) -> None:
    """Once a second: the live state to the run directory and the terminal. What goes wrong with that is logged, once."""
    said = None
    while True:
        try:
            await judge.report()
            run.screen.show(await coordinator.observe.remote())
            said = None
        except Exception as error:  # nobody waits for this task, and the run does not depend on it
            if (says := one_line(error)) != said:
                log.warning("the live state was not written: %s", says)
            said = says
        await asyncio.sleep(OBSERVE_EVERY_S)


def stop_on_signals(crew: Crew, coordinator, screen: Screen) -> asyncio.Event:
    """On the first Ctrl-C or SIGTERM stop leasing, finish the step in hand, write a checkpoint and end."""
    interrupted, loop = asyncio.Event(), asyncio.get_running_loop()

    async def stop():
        screen.say("stopping: a checkpoint and a last version are written; what is queued stays queued for --resume")
        await coordinator.stop.remote("stopped by hand")
        await crew.stop()

    def hear():
        if not interrupted.is_set():
            interrupted.set()
            interrupted.task = loop.create_task(stop())

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, hear)
    return interrupted


def next_command(config: Config) -> str:
    return f"torchspec-lite serve {Path(config.run_dir) / 'config.yaml'}"
