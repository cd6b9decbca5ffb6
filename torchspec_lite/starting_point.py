"""The drafter that a run starts from or goes on with, and what follows from it: the layers to capture, what a config may say."""

import json
from pathlib import Path

from torchspec_lite.checkpoint import State, newest_state
from torchspec_lite.config import Config
from torchspec_lite.errors import UserError
from torchspec_lite.export import read_drafter_config
from torchspec_lite.target import TargetInfo


def settled(config: Config, info: TargetInfo) -> Config:
    """The config as every part of a run needs it: `capture.layer_ids` are those of the drafter that the run goes on with or
    starts from. With a fresh drafter it stays as it is.

    Raises UserError when that drafter does not fit the config or the target.
    """
    found = newest_state(config.run_dir / "checkpoints")
    if found is not None:
        check_goes_on(*found, config, info)
    elif config.drafter.init_from is None:
        return config
    ids = list(layer_ids(config, info))
    return config.model_copy(update={"capture": config.capture.model_copy(update={"layer_ids": ids})})


def layer_ids(config: Config, info: TargetInfo) -> tuple[int, ...]:
    """The residual streams to capture: those that the checkpoint's drafter reads, else `drafter.init_from`'s, else
    `capture.layer_ids`, else the target's default.

    Raises UserError when `capture.layer_ids` names others than the drafter reads.
    """
    asked, found = tuple(config.capture.layer_ids or ()), newest_state(config.run_dir / "checkpoints")
    if found is not None:
        place, ids = f"the drafter of checkpoint {found[0]}", found[1].config.layer_ids
    elif config.drafter.init_from is not None:
        place = f"drafter.init_from {config.drafter.init_from}"
        ids = read_drafter_config(Path(config.drafter.init_from), info).layer_ids
    else:
        return asked or info.default_layer_ids()
    if asked and asked != ids:
        raise UserError(f"capture.layer_ids is {list(asked)}, but {place} reads the streams entering layers {list(ids)}; set "
                        f"capture.layer_ids={json.dumps(ids)} or leave it out, or begin a run of another name with a fresh "
                        "drafter")
    return ids


def check_goes_on(path: Path, state: State, config: Config, info: TargetInfo) -> None:
    """Raise UserError, with the key to set, when a run of this config and target cannot go on from a checkpoint that
    workers.trainer wrote."""
    trained_on = state.extra.get("target", info.fingerprint)  # older ones do not say
    if trained_on != info.fingerprint:
        raise UserError(f"checkpoint {path}: trained on target {trained_on}, but target.model is {info.fingerprint} now; give "
                        "that target again, or begin a run of another name with drafter.init_from=OLD_DRAFTER")
    if config.drafter.init_from is not None:
        return  # its shape is that folder's, whatever the other keys say
    for name, asked in _shape(config, info).items():
        if (was := getattr(state.config, name)) != asked:
            raise UserError(f"drafter.{name}: the drafter of checkpoint {path} has {json.dumps(was)}, the config asks for "
                            f"{json.dumps(asked)}; set drafter.{name}={json.dumps(was)}, or begin a run of another name")


def _shape(config: Config, info: TargetInfo) -> dict[str, bool | int]:
    """What a config says of a fresh drafter."""
    options = config.drafter
    return {"fc_norm": options.fc_norm, "norm_output": options.norm_output,
            "intermediate_size": options.intermediate_size or info.intermediate_size,
            "draft_vocab_size": min(options.draft_vocab_size or info.vocab_size, info.vocab_size)}
