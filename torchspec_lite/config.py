"""The typed configuration of a run: strict, YAML plus dotted overrides, every default in one place."""

import difflib
import os
from pathlib import Path

import yaml
from pydantic import Field, ValidationError, model_validator

from torchspec_lite.errors import UserError
from torchspec_lite.sections import (
    CaptureConfig,
    DashboardConfig,
    DataConfig,
    DrafterConfigSection,
    MetricsConfig,
    RayConfig,
    RolloutConfig,
    Section,
    ServeConfig,
    StreamConfig,
    TargetConfig,
    TrafficConfig,
    TrainerConfig,
)


class Config(Section):
    """All of a run. `load` reads it, `save` writes the resolved one into the run directory."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the run; its directory is `run_root/name`."""
    run_root: str = "runs"
    """Where run directories are; on a cluster a path that every node sees."""
    seed: int = 0
    """Order of the prompts and everything random."""
    profile: bool = False
    """Write a trace of some steps and print time by phase."""
    target: TargetConfig
    data: DataConfig = DataConfig()
    capture: CaptureConfig = CaptureConfig()
    stream: StreamConfig = StreamConfig()
    drafter: DrafterConfigSection = DrafterConfigSection()
    trainer: TrainerConfig = TrainerConfig()
    serve: ServeConfig = ServeConfig()
    rollout: RolloutConfig = RolloutConfig()
    traffic: TrafficConfig = TrafficConfig()
    dashboard: DashboardConfig = DashboardConfig()
    metrics: MetricsConfig = MetricsConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _traffic_can_be_learned_from(self):
        if self.traffic.fraction and not self.serve.replicas:
            raise ValueError("traffic.fraction captures what serving replicas answer; set serve.replicas to 1 or more")
        if self.traffic.second_answers and self.serve.external:
            raise ValueError("traffic.second_answers: engines of others (serve.external) answer their users only; set 0")
        if self.traffic.second_answers and self.traffic.second_answers_below >= self.serve.max_num_seqs:
            raise ValueError("traffic.second_answers_below must be less than serve.max_num_seqs, so that a user's request "
                             "always finds a place")
        if self.traffic.fraction and not self.data.train and not self.drafter.init_from:
            raise ValueError("traffic.fraction without data.train needs a drafter to serve from the start: set "
                             "drafter.init_from to its folder, or data.train to some prompts")
        return self

    @property
    def run_dir(self) -> Path:
        return Path(self.run_root).absolute() / self.name


SECTIONS = tuple(name for name, field in Config.model_fields.items() if isinstance(field.annotation, type)
                 and issubclass(field.annotation, Section))
SECRETS = (("serve", "api_key"), ("traffic", "opt_out_key"), ("dashboard", "token"))
PATHS = (("target", "model"), ("data", "train"), ("data", "held_out"), ("drafter", "init_from"), ("serve", "drafter"))
NAMES = ("demo", "smollm2")
# PyYAML lets faults of Python's own conversions through: a date such as 2024-99-99, nesting a thousand deep.
YAML_FAULTS = (yaml.YAMLError, ValueError, RecursionError)


def load(path: str | Path, overrides: list[str] = ()) -> Config:
    """Read a YAML file and apply `dotted.key=value` overrides (values are YAML).

    Raises UserError naming the file, the key and the nearest known key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"config {path}: {error.strerror or error}; give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"config {path}: not UTF-8 text; give the path of a YAML file") from error
    try:
        values = yaml.safe_load(text) or {}
    except YAML_FAULTS as error:
        raise UserError(f"config {path}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"config {path}: expected keys and values at the top, found {type(values).__name__}")
    # A section whose keys are all commented out is an empty one.
    values = {key: {} if value is None and key in SECTIONS else value for key, value in values.items()}
    for override in overrides:
        _apply(values, override)
    return build(values, str(path))


def build(values: dict, source: str) -> Config:
    """Validate plain values as a Config. Raises UserError listing every fault; `source` names the place."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise UserError("\n".join(f"config {source}: {_explain(fault)}" for fault in error.errors())) from error


def save(config: Config, path: Path) -> None:
    """Write the resolved config as YAML, for commands given from any directory; secrets are replaced by a note of where
    they came from."""
    values = config.model_dump(mode="json")
    values["run_root"] = str(Path(config.run_root).absolute())
    for section, key in PATHS:
        values[section][key] = _from_anywhere(values[section][key])
    for section, key in SECRETS:
        secret = values[section][key]
        if secret is not None and not secret.startswith("env:"):
            values[section][key] = "env:TORCHSPEC_LITE_" + key.upper()
    path.write_text(yaml.safe_dump(values, sort_keys=False))


def _from_anywhere(value):
    """A path or a list of paths, absolute where it leads to something; names (demo, a hub's) stay names."""
    if isinstance(value, list):
        return [_from_anywhere(item) for item in value]
    return str(Path(value).absolute()) if value and value not in NAMES and Path(value).exists() else value


def resolve_secret(value: str | None, key: str) -> str | None:
    """A secret's value: `env:NAME` is read from the environment, anything else is the secret itself.

    Raises UserError when the variable is not set; `key` is the config key to name.
    """
    if value is None or not value.startswith("env:"):
        return value
    name = value.removeprefix("env:")
    if not os.environ.get(name):
        raise UserError(f"{key}: the environment variable {name} is not set; export it and try again")
    return os.environ[name]


def secrets(config: Config) -> tuple[str, ...]:
    """Values that no log may show. Raises UserError when a variable that one is read from is not set."""
    values = config.model_dump()
    found = (resolve_secret(values[section][key], f"{section}.{key}") for section, key in SECRETS)
    return tuple(value for value in found if value)


def _apply(values: dict, override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals:
        raise UserError(f"override {override!r}: expected dotted.key=value")
    *parents, last = key.split(".")
    here = values
    for parent in parents:
        here = here.setdefault(parent, {})
        if not isinstance(here, dict):
            raise UserError(f"override {override!r}: {parent} is a value, not a section")
    try:
        here[last] = yaml.safe_load(value)
    except YAML_FAULTS as error:
        raise UserError(f"override {override!r}: the value is not valid YAML: {error}") from error


def _explain(fault: dict) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "missing":
        return f"{where}: this key is needed"
    if fault["type"] != "extra_forbidden":
        secret = where in {f"{section}.{key}" for section, key in SECRETS}
        found = "a secret, not shown" if secret else _shorten(repr(fault["input"]))
        return f"{where}: {fault['msg']} (found {found})" if where else fault["msg"]
    nearest = difflib.get_close_matches(where, known_keys(), n=1, cutoff=0.0)
    return f"unknown key {where}; did you mean {nearest[0]}?"


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def known_keys(section: type[Section] = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the config, sections included, in order."""
    keys = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            keys += known_keys(field.annotation, prefix + name + ".")
    return keys
