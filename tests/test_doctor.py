"""The doctor finds what is wrong and says what to do; the logs end with the one cause."""

import json
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster import doctor as doctors
from cluster.doctor import (
    Check,
    check_clock,
    check_disk,
    check_gpus,
    check_memory,
    check_port,
    check_version,
    doctor,
    render,
)
from torchspec_lite.config import build
from torchspec_lite.errors import UserError
from torchspec_lite.logs import cause_of, log_crash, one_line, setup_logging


def test_this_machine_is_examined_and_every_fault_has_a_remedy():
    checks = doctor()
    names = {check.name for check in checks}
    assert {"python", "vllm", "torch", "ray", "port 8000", "port 8090", "shared memory", "disk", "clock"} <= names
    assert any(name.startswith("gpu") for name in names)
    for check in checks:
        assert check.found and bool(check.advice) == (check.status != "ok"), check
    assert {check.name: check.status for check in checks}["torch"] == "ok"
    json.dumps([vars(check) for check in checks])


def test_the_ports_and_the_directory_are_those_of_the_config(tmp_path):
    values = {"target": {"model": "x"}, "run_root": str(tmp_path / "not" / "yet"), "serve": {"port": 0}}
    values |= {"dashboard": {"port": 18_123}, "metrics": {"prometheus_port": 18_124}}
    checks = {check.name: check for check in doctor(build(values, "test"))}
    assert "port 18123" in checks and "port 18124" in checks and "port 8000" not in checks and "port 0" not in checks
    assert str(tmp_path) in checks["disk"].found


def test_versions():
    assert check_version(("torch",), (2, 0), (99, 0), "pip").status == "ok"
    missing = check_version(("no-such-package-tsl", "nor-this-tsl"), (1, 0), (2, 0), "pip install it")
    assert (missing.name, missing.status, missing.advice) == ("no-such-package-tsl", "fail", "pip install it")
    old = check_version(("torch",), (99, 1), (100, 0), "pip install it")
    assert old.status == "fail" and "needs 99.1 or newer: pip install it" == old.advice
    assert check_version(("torch",), (1, 0), (2, 0), "pip").status == "warn"
    assert check_version(("nor-this-tsl", "torch"), (2, 0), (99, 0), "pip").found.startswith("torch ")


def test_gpus():
    listing = "NVIDIA H200, 4, 143771\nNVIDIA H200, 120000, 143771\n"
    free, busy = check_gpus(listing)
    assert (free.name, free.status, free.found) == ("gpu 0", "ok", "NVIDIA H200, 0 of 140 GiB in use")
    assert busy.status == "warn" and "117 of 140" in busy.found and "gpu_memory_utilization" in busy.advice
    assert check_gpus("")[0].status == "fail" and check_gpus(None)[0].status == "ok"
    shared, free = check_gpus("NVIDIA GB10, [N/A], [N/A]\nNVIDIA H200, 4, 143771\n")
    assert (shared.name, shared.status, shared.found) == ("gpu 0", "ok", "NVIDIA GB10, its memory is not told")
    assert free.name == "gpu 1"


def test_ports_memory_disk_and_clock(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check = check_port("dashboard", port)
        assert check.status == "fail" and "in use" in check.found and "dashboard.port" in check.advice
    assert check_port("dashboard", port).status == "ok"
    assert check_memory(7 * 2**30).status == "warn" and check_memory(8 * 2**30).status == "ok"
    assert check_clock(tmp_path, time.time()).status == "ok"
    skewed = check_clock(tmp_path, time.time() + 30)
    assert skewed.status == "warn" and "ahead of" in skewed.found and "NTP" in skewed.advice
    assert check_clock(tmp_path, 1000.0).status == "fail"
    assert not list(tmp_path.iterdir())
    assert check_disk(tmp_path).name == "disk"
    assert doctors.check_shared_memory(tmp_path / "none").status == "warn"
    assert doctors.check_compiler(None).status == "warn" and doctors.check_compiler("/usr/bin/g++").status == "ok"
    assert doctors.check_files(1024).status == "warn" and doctors.check_files(-1).found == "no limit"


def test_it_is_printed_with_the_remedy_under_the_fault():
    text = render([Check("python", "ok", "3.11"), Check("disk", "fail", "1.0 GiB free", "free some")])
    assert text.splitlines() == [
        "ok   python  3.11", "FAIL disk    1.0 GiB free", "             → free some", "1 ok, 0 to look at, 1 to mend",
    ]  # fmt: skip


# Logs


@pytest.fixture
def clean_root():
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in [handler for handler in root.handlers if handler not in before]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


def lines_in(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_log_line_says_who_and_when(tmp_path, clean_root, capsys):
    path = setup_logging(tmp_path, "demo", "trainer", rank=2)
    logging.getLogger("workers.trainer").info("step %d done", 7, extra={"step": 7, "loss": 2.5})
    assert path == tmp_path / "logs" / "trainer-2.jsonl"
    (line,) = lines_in(path)
    assert time.strptime(line.pop("time")[:19], "%Y-%m-%dT%H:%M:%S")
    assert line == {"level": "info", "run": "demo", "role": "trainer", "rank": 2, "logger": "workers.trainer",
                    "message": "step 7 done", "step": 7, "loss": 2.5}  # fmt: skip
    assert capsys.readouterr().err.rstrip().endswith("trainer 2 step 7 done (step=7 loss=2.5)")
    setup_logging(tmp_path, "demo", "trainer", rank=3)
    logging.getLogger("x").info("again")
    assert len(lines_in(path)) == 1 and len(lines_in(tmp_path / "logs" / "trainer-3.jsonl")) == 1


def test_what_a_record_factory_adds_is_not_the_calls(tmp_path, clean_root, monkeypatch):
    usual = logging.getLogRecordFactory()

    def naming(*args, **kwargs):
        record = usual(*args, **kwargs)
        record.process_title = "EngineCore"  # as vLLM's factory does, set when vLLM is imported
        return record

    monkeypatch.setattr(logging, "_logRecordFactory", naming)
    path = setup_logging(tmp_path, "demo", "target")
    logging.getLogger("x").info("ready", extra={"port": 5})
    (line,) = lines_in(path)
    assert line["port"] == 5 and "process_title" not in line


def test_secrets_are_never_logged(tmp_path, clean_root, capsys):
    path = setup_logging(tmp_path, "demo", "driver", secrets=("hunter2", ""))
    log = logging.getLogger("driver")
    log.info("key is %s", "hunter2", extra={"header": "Authorization: Bearer abc.def-123"})
    log.info("GET http://h/?token=tok123&x=1 with hf_ABCDEFGHIJKLMNOPQRSTUV and api_key='zzz9'")
    log.info("proxy http://me:pa55word@proxy:80 tokens=5 at tcp://10.0.0.1:5555, open")
    try:
        raise ValueError("sent hunter2")
    except ValueError as error:
        log_crash(error, log)
    written = path.read_text() + capsys.readouterr().err
    for secret in ("hunter2", "abc.def-123", "tok123", "hf_ABCDEFGHIJKLMNOPQRSTUV", "zzz9", "pa55word"):
        assert secret not in written, secret
    assert "token=***&x=1" in written and "tokens=5" in written and "me:***@proxy" in written
    assert "at tcp://10.0.0.1:5555, open" in written  # a port is no password


def test_a_crash_ends_with_its_one_cause(tmp_path, clean_root, capsys):
    path = setup_logging(tmp_path, "demo", "driver")
    capsys.readouterr()

    class RayTaskError(Exception):
        def __init__(self, cause):
            super().__init__("ray::Trainer.step() (pid=1)\nTraceback …\n" * 5)
            self.cause = cause

    try:
        try:
            try:
                raise KeyError("fc")
            except KeyError as error:
                raise RayTaskError(error) from None
        except RayTaskError as error:
            raise RuntimeError("the trainer failed") from error
    except RuntimeError as error:
        line = log_crash(error, logging.getLogger("driver"))
    assert line.startswith("KeyError: 'fc' (at test_doctor.py:")
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and line in shown and "CRITICAL" in shown  # one line, no traceback
    assert "the trainer failed" in lines_in(path)[0]["traceback"]  # all of it is in the file


def test_the_cause_is_what_a_person_can_mend():
    log = logging.getLogger("silent")
    log.propagate, log.handlers = False, [logging.NullHandler()]
    mendable = UserError("port 8000: taken;\nchoose another")
    mendable.__cause__ = OSError(98, "Address already in use")
    outer = RuntimeError("driver")
    outer.__cause__ = mendable
    assert log_crash(outer, log) == "port 8000: taken; choose another"
    group = ExceptionGroup("many", [ValueError("first"), ValueError("second")])
    assert str(cause_of(group)) == "first" and one_line(ValueError()) == "ValueError: no message"


def test_an_uncaught_error_of_a_process_is_one_line(tmp_path):
    code = (
        "import logging, sys; from torchspec_lite.logs import catch_everything, setup_logging\n"
        "setup_logging(sys.argv[1], 'demo', 'driver'); catch_everything(logging.getLogger('driver')); 1 / 0"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=env)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert "driver CRITICAL ZeroDivisionError: division by zero (at <string>:2)" in ended.stderr
