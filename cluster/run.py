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
from torchspec_lite.starting_point import settled
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
    info = describe(resolve_target(config.target.model, config.target.trust_remote_code))
    config = settled(config, info)
    plan, order, secrets = make_plan(config, info), read_order(config, cache_dir()), configs.secrets(config)
    may_open_run_dir(config, resume)
    if config.serve.replicas and not config.serve.external and not resume:  # a killed driver's pool may still be going
        pools.check(config)
    with Screen(quiet) as screen, session(config.ray, plan) as doubts:
        run = Run(config, info, open_run_dir(config, order), screen)
        setup_logging(config.run_dir, config.name, "driver", secrets=secrets)
        for doubt in doubts:
            log.warning(doubt)
        screen.say(f"run directory {config.run_dir}")
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
        await close(run, coordinator, judge.pool, state, reason)
        if dashboard is not None:
            dashboard.close()


async def close(run: Run, coordinator, pool, state: str, reason: str | None) -> None:
    """Say how the run ended and stop its pool, or leave the engines of others. What goes wrong here is logged: it must not
    hide what ended the run."""
    try:
        await coordinator.finish.remote(state, reason or await coordinator.stop_reason.remote())
    except Exception as error:
        log.error("the end was not recorded: %s", one_line(error))
    if not run.config.serve.external:
        await asyncio.to_thread(pools.stop, run.config)
    elif pool is not None:
        await pool.leave()


def may_open_run_dir(config: Config, resume: bool) -> None:
    """Raises UserError for a run that is to begin where there is one, or to go on where there is none."""
    begun = (config.run_dir / "config.yaml").exists()
    if begun and not resume:
        raise UserError(f"run directory {config.run_dir} is of an earlier run; add --resume to go on with it, or name=… for "
                        "a new one")
    if resume and not begun:
        raise UserError(f"run directory {config.run_dir}: nothing to resume there; leave --resume out to start")


def open_run_dir(config: Config, order: SampleOrder) -> float:
    """Make the run directory with its ledger, or enter it again; when the run first began. Raises UserError when the ledger
    does not fit; the directory's config is written when it does."""
    folder = config.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    order.queue(folder / "ledger.sqlite", config.trainer.reuse)
    begun = (folder / "ledger.sqlite.lock").stat().st_mtime  # made with the ledger and never written
    configs.save(config, folder / "config.yaml")
    return begun


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
