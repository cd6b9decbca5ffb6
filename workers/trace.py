"""A torch.profiler trace of a few steady optimizer steps."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from torchspec_lite.atomic import no_space_explained

SKIPPED = 3   # first steps: kernels are built and memory is laid out
WARM_UP = 1   # the profiler's own
RECORDED = 3


class Trace:
    """Records steps SKIPPED + WARM_UP + 1 … + RECORDED since the start. `path` is None until it is written, and stays
    None in a run that ends before the recorded steps."""

    def __init__(self, folder: Path):
        self.folder, self.path = folder, None
        on = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self.profiler = profile(
            activities=on, schedule=schedule(wait=SKIPPED, warmup=WARM_UP, active=RECORDED, repeat=1),
            on_trace_ready=self._write)
        self.profiler.start()

    def step(self) -> None:
        """An optimizer step is over. Raises UserError when the disk is full."""
        self.profiler.step()

    def close(self) -> None:
        """Write what is recorded if the run ends in the middle of it."""
        self.profiler.stop()

    def _write(self, profiler) -> None:
        path = self.folder / "trace.json.gz"
        with no_space_explained(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        self.path = path
