"""Training state on disk: `checkpoints/step_000050/`, readable with any number of ranks, never half of one.

Tensors are written with torch.distributed.checkpoint, each rank its own part; `state.json` holds what is plain data and
`whole.json` the size and SHA-256 of every file. All functions work with and without a process group; with one, every
rank calls them and they fail on every rank together.
"""

import json
import logging
import random
import re
import shutil
import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from torchspec_lite.atomic import PARTIAL, commit, no_space_explained, open_partial, sha256
from torchspec_lite.drafter import DrafterConfig
from torchspec_lite.errors import UserError

STATE, WHOLE = "state.json", "whole.json"
SCHEMA = 1
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class State:
    """The plain data of a checkpoint. `schedule` and `extra` are the caller's own, JSON in and JSON out.

    `draft_ids` None: the whole vocabulary.
    """

    schema: int
    step: int
    ranks: int
    config: DrafterConfig
    draft_ids: list[int] | None
    schedule: dict
    extra: dict

    def vocabulary(self) -> torch.Tensor:
        """The draft vocabulary [D] int64, to build the drafter that `load` fills."""
        return torch.arange(self.config.vocab_size) if self.draft_ids is None else torch.tensor(self.draft_ids)


def step_path(directory: Path, step: int) -> Path:
    """Where a step's checkpoint is: `checkpoints/step_000050`."""
    return Path(directory) / f"step_{step:06d}"


def save(directory: Path, step: int, config: DrafterConfig, drafter: nn.Module,
         optimizers: Sequence[torch.optim.Optimizer], schedule: dict, extra: dict, tensors: dict[str, torch.Tensor],
         keep: int) -> Path:
    """Write the state after optimizer step `step` and return its directory; then keep the `keep` newest.

    `drafter` plain, in DDP or sharded by FSDP2; `tensors` are others to keep (a moving average), likewise.
    Each rank's random number generators are saved under its rank. Written to a temporary name, flushed, renamed.
    A broken one of this step, which `newest` went past, is kept as `broken-step_…`. Raises UserError when the disk is full or
    the step is there already; nothing half-written is left.
    """
    final = step_path(directory, step)
    partial = final.with_name(f".{final.name}{PARTIAL}")
    try:
        with _together("make room for a checkpoint"):
            if _rank() == 0:
                _set_aside_if_broken(final)
                open_partial(final)
        with no_space_explained(final), _together("write a checkpoint"):
            weights, moments = get_state_dict(drafter, optimizers, options=FLAT)
            state = {"drafter": weights, "optimizer": moments, "tensors": tensors, "rng": {str(_rank()): _rng_state()}}
            _unwrapped(dcp.save, state, checkpoint_id=partial)
        with no_space_explained(final), _together("finish a checkpoint"):
            if _rank() == 0:
                ids = None if config.draft_vocab_size == config.vocab_size else weights["draft_ids"].tolist()
                plain = State(SCHEMA, step, _ranks(), config, ids, schedule, extra)
                (partial / STATE).write_text(json.dumps(asdict(plain)))
                files = {path.name: [path.stat().st_size, sha256(path)] for path in partial.iterdir()}
                (partial / WHOLE).write_text(json.dumps(files))
                commit(partial, final)
                _prune(Path(directory), keep)
    except BaseException:
        if _rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def newest(directory: Path) -> Path | None:
    """The newest checkpoint that is whole, or None when there is none; the same on every rank.

    A broken one is skipped with a warning that names it and says what is wrong.
    """
    chosen = -1
    with _together("look for a checkpoint"):
        if _rank() == 0:
            for step, path in sorted(_steps(Path(directory)).items(), reverse=True):
                try:
                    check(path)
                except UserError as error:
                    log.warning("checkpoint skipped, the next older one is tried: %s", error)
                    continue
                chosen = step
                break
    if dist.is_initialized():
        box = torch.tensor([chosen], device=_device())
        dist.broadcast(box, 0)
        chosen = int(box)
    return None if chosen < 0 else step_path(directory, chosen)


def newest_state(directory: Path) -> tuple[Path, State] | None:
    """The newest checkpoint whose plain data can be read, and these; its tensors are not looked at. None when there is none.
    For a process that is no rank."""
    for _, path in sorted(_steps(Path(directory)).items(), reverse=True):
        try:
            return path, read(path)
        except UserError:
            continue  # `newest` says why
    return None


def _set_aside_if_broken(path: Path) -> None:
    if path.exists():
        try:
            check(path)
        except UserError:
            aside = path.with_name(f"broken-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def check(path: Path) -> State:
    """Check that a checkpoint is whole: every file there with its size and SHA-256, the plain data readable.

    Raises UserError naming the checkpoint and what is wrong.
    """
    path = Path(path)
    try:
        files = json.loads((path / WHOLE).read_text())
        known = {name: (int(size), str(digest)) for name, (size, digest) in files.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"checkpoint {path}: {WHOLE} is not readable: {error}") from error
    present = {file.name: file for file in path.iterdir() if file.name != WHOLE}
    if present.keys() != known.keys():
        raise UserError(f"checkpoint {path}: files differ from {WHOLE}: {sorted(present.keys() ^ known.keys())}")
    for name, file in present.items():
        if file.stat().st_size != known[name][0] or sha256(file) != known[name][1]:
            raise UserError(f"checkpoint {path}: {name} is not the file that was written")
    state = read(path)
    if state.step != _step_of(path):
        raise UserError(f"checkpoint {path}: holds step {state.step}")
    return state


def read(path: Path) -> State:
    """The plain data of a checkpoint. Raises UserError when it is missing or of another version of this program."""
    place = Path(path) / STATE
    try:
        values = json.loads(place.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint {place}: not readable: {error}") from error
    for kind, part in ((State, values), (DrafterConfig, values.get("config", {}))):
        if set(part) != {field.name for field in fields(kind)} or values["schema"] != SCHEMA:
            raise UserError(f"checkpoint {place}: written by another version of torchspec-lite")
    config = values["config"] | {"layer_ids": tuple(values["config"]["layer_ids"])}
    return State(**values | {"config": DrafterConfig(**config)})


def load(path: Path, config: DrafterConfig, drafter: nn.Module, optimizers: Sequence[torch.optim.Optimizer],
         tensors: dict[str, torch.Tensor]) -> State:
    """Fill drafter, optimizers, `tensors` and this rank's random number generators in place; return the plain data.

    The drafter is built beforehand (config and vocabulary from `read`) on any number of ranks, sharded or not. A rank
    that the saving run did not have keeps its own generators. Raises UserError when the run's drafter differs from
    the saved one, naming what differs.
    """
    with _together("load a checkpoint"):
        saved = read(path)
        for field in fields(DrafterConfig):
            was, wanted = (vars(one)[field.name] for one in (saved.config, config))
            if was != wanted:
                raise UserError(f"checkpoint {path}: the drafter's {field.name} was {was}, the run asks for {wanted}; "
                                "resume with the config that it was saved with or start another run")
        available = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        missing = [name for name in tensors if f"tensors.{name}" not in available]
        if missing:
            raise UserError(f"checkpoint {path}: holds no {', '.join(missing)}; resume with the config that it was "
                            "saved with")
        weights, moments = get_state_dict(drafter, optimizers, options=FLAT)
        state = {"drafter": weights, "optimizer": moments, "tensors": tensors}
        mine = f"rng.{_rank()}."
        generators = {key.removeprefix(mine): None for key in available if key.startswith(mine)}
        if generators:
            generators = {name: value for name, value in _rng_state().items() if name in generators}
            state["rng"] = {str(_rank()): generators}
        _unwrapped(dcp.load, state, checkpoint_id=path)
        set_state_dict(drafter, optimizers, model_state_dict=weights, optim_state_dict=moments, options=FLAT)
        _set_rng_state(generators)
    return saved


def _steps(directory):
    found = {}
    for path in directory.glob("step_*"):
        step = _step_of(path)
        if step is not None and path.is_dir():
            found[step] = path
    return found


def _step_of(path):
    match = re.fullmatch(r"step_(\d{6,})", path.name)
    return int(match[1]) if match else None


def _prune(directory, keep):
    for _, path in sorted(_steps(directory).items(), reverse=True)[keep:]:
        # Renamed first: a crash half-way through must not leave half a checkpoint under a checkpoint's name.
        doomed = path.with_name(f".{path.name}.old{PARTIAL}")
        path.rename(doomed)
    for left in directory.glob(f".step_*{PARTIAL}"):
        shutil.rmtree(left, ignore_errors=True)


def _rng_state():
    _, words, gauss = random.getstate()
    state = {"torch": torch.get_rng_state(), "python": torch.tensor(words),
             "gauss": torch.tensor(torch.nan if gauss is None else gauss, dtype=torch.float64)}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state):
    if "torch" in state:
        torch.set_rng_state(state["torch"])
        gauss = float(state["gauss"])
        random.setstate((3, tuple(state["python"].tolist()), None if gauss != gauss else gauss))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _rank():
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks():
    return dist.get_world_size() if dist.is_initialized() else 1


def _device():
    return torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")


def _unwrapped(function, *arguments, **options):
    """Call into torch.distributed.checkpoint and raise what went wrong itself, not the wrapper around it."""
    try:
        with warnings.catch_warnings():
            # One process without a group is a normal run here, not an oversight.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            return function(*arguments, **options)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


@contextmanager
def _together(what: str):
    """Leave the block on all ranks or on none: a rank that failed raises its own error, the others say that one did."""
    failed = None
    try:
        yield
    except Exception as error:
        failed = error
    if dist.is_initialized():
        failures = torch.tensor([failed is not None], dtype=torch.int32, device=_device())
        dist.all_reduce(failures)
        if failed is None and int(failures):
            raise UserError(f"rank {_rank()} could not {what}: {int(failures)} of {_ranks()} ranks failed, see the others' "
                            "logs")
    if failed is not None:
        raise failed
