"""What machine a benchmark ran on."""

import os
import platform
from pathlib import Path


def machine() -> dict:
    cpu = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
           if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": cpu[0] if cpu else platform.machine(), "cores": os.cpu_count(), "memory_gib": round(memory / 2**30),
            "python": platform.python_version(), "load_1m": round(os.getloadavg()[0], 2)}
