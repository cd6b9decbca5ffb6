"""Logs of a run: one file for each role in `run_dir/logs`, one JSON object a line, no secret in any of them.

The same messages go to standard error in short form, which is what a terminal, and Ray's page for an actor, shows.
"""

import json
import logging
import re
import sys
import time
import traceback
from pathlib import Path

from torchspec_lite.errors import UserError

HIDDEN = "***"
SECRETS = re.compile(
    r"(?i)(bearer\s+|token=|(?:api[_-]?key|password)[\"']?\s*[=:]\s*[\"']?|://[^/\s:@]+:(?=\S*@))[^\s\"'&@,}]+"
    r"|\b(?:hf|sk|ghp|wandb)[_-][A-Za-z0-9_-]{16,}"
)
"""What looks like a secret: after `Bearer`, `token=`, `api_key:`, in an address, or a known kind of key by itself."""


def setup_logging(
    run_dir: Path | str, run: str, role: str, rank: int = 0, secrets: tuple[str, ...] = (), level: int = logging.INFO
) -> Path:
    """Send this process's logs to `run_dir/logs/ROLE-RANK.jsonl` and standard error; returns the file.

    Every line carries time, level, run, role and rank, and what a call gives by `extra={"step": 7}`. The values in
    `secrets` are never written, nor is anything that looks like a key. Called again, it replaces what it set up.
    """
    folder = Path(run_dir) / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{role}-{rank}.jsonl"
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler.formatter, (_Lines, _Words))]:
        root.removeHandler(handler)
        handler.close()
    file, screen = logging.FileHandler(path), logging.StreamHandler()
    file.setFormatter(_Lines(run, role, rank, secrets))
    screen.setFormatter(_Words(run, role, rank, secrets))
    for handler in (file, screen):
        root.addHandler(handler)
    root.setLevel(level)
    for noisy in ("httpx", "httpcore", "watchfiles"):  # one line for each request says nothing about the run
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return path


def cause_of(error: BaseException) -> BaseException:
    """The error that started it all: behind `raise … from`, a Ray task's error, or a group with one member first.

    A UserError on the way says what to mend: it is the cause even when it has one itself.
    """
    seen: set[int] = set()
    while id(error) not in seen and not isinstance(error, UserError):
        seen.add(id(error))
        inner = vars(error).get("cause")  # ray.exceptions.RayTaskError keeps the remote error here
        if isinstance(inner, BaseException):
            error = inner
        elif error.__cause__ is not None:
            error = error.__cause__
        elif isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
    return error


def one_line(error: BaseException) -> str:
    """An error as one line: a UserError's own words, another with its type and the place it came from."""
    words = " ".join(str(error).split()) or "no message"
    if isinstance(error, UserError):
        return words
    frames = traceback.extract_tb(error.__traceback__)
    place = f" (at {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {words}{place}"


def log_crash(error: BaseException, log: logging.Logger) -> str:
    """Record why the process ends: all tracebacks in the file, the one cause on standard error and as the result."""
    line = one_line(cause_of(error))
    log.critical(line, exc_info=error)
    return line


def _extra(record: logging.LogRecord) -> dict:
    """What the call gave as `extra`. A record factory's own fields (vLLM's names its process) are none of it."""
    usual = vars(logging.makeLogRecord({})).keys() | {"message", "asctime"}
    return {name: value for name, value in vars(record).items() if name not in usual}


class _Redacting(logging.Formatter):
    def __init__(self, run: str, role: str, rank: int, secrets: tuple[str, ...]):
        super().__init__()
        self.fields = {"run": run, "role": role, "rank": rank}
        self.secrets = sorted((secret for secret in secrets if secret), key=len, reverse=True)

    def hide(self, text: str) -> str:
        for secret in self.secrets:
            text = text.replace(secret, HIDDEN)
        return SECRETS.sub(lambda match: (match[1] or "") + HIDDEN, text)


class _Lines(_Redacting):
    """A record as one JSON object: the log file."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {"time": f"{moment}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), **self.fields}
        entry |= {"logger": record.name, "message": self.hide(record.getMessage())}
        for name, value in _extra(record).items():
            entry[name] = value if isinstance(value, (int, float, bool)) else self.hide(str(value))
        if record.exc_info and record.exc_info[1]:
            entry["traceback"] = self.hide("".join(traceback.format_exception(record.exc_info[1])))
        return json.dumps(entry)


class _Words(_Redacting):
    """A record as one short line: the terminal. Tracebacks stay in the file."""

    def format(self, record: logging.LogRecord) -> str:
        where = self.fields["role"] if self.fields["rank"] == 0 else f"{self.fields['role']} {self.fields['rank']}"
        level = "" if record.levelno < logging.WARNING else f" {record.levelname}"
        extra = " ".join(f"{name}={value}" for name, value in _extra(record).items())
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        return self.hide(f"{clock} {where}{level} {record.getMessage()}" + (f" ({extra})" if extra else ""))


def catch_everything(log: logging.Logger) -> None:
    """Let an error that nobody catches end the process with its one cause instead of its tracebacks."""
    sys.excepthook = lambda _, error, __: log_crash(error, log)
