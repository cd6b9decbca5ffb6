"""docs/config.md, made from the config's own types, defaults and docstrings.

`python -m torchspec_lite.config_reference > docs/config.md` writes it anew; a test holds the two together.
"""

import types
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from torchspec_lite.config import Config, Section

HEAD = """# Every config key

Made from [`torchspec_lite/sections.py`](../torchspec_lite/sections.py) by `python -m torchspec_lite.config_reference`; do not edit.

A config is one YAML file. Any key can also be set on the command line: `torchspec-lite train my.yaml trainer.reuse=2`. An
unknown key is an error that names the nearest known one. The resolved config is saved as `config.yaml` in the run directory;
secrets are not: write `env:NAME` for one, and the environment variable `NAME` is read. One written as such becomes
`env:TORCHSPEC_LITE_API_KEY` (`…_OPT_OUT_KEY`, `…_TOKEN`) in the saved file: export that before `serve` or `--resume` reads it.
"""
BOUNDS = (("ge", "≥ {}"), ("gt", "> {}"), ("le", "≤ {}"), ("lt", "< {}"))
NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "none", dict: "keys and values"}


def reference() -> str:
    """The whole page as Markdown: the keys at the top first, then one table a section."""
    parts = [HEAD, "## At the top\n", _table(Config, "")]
    for name, field in Config.model_fields.items():
        if _is_section(field):
            parts += [f"## {name}\n", _table(field.annotation, f"{name}.")]
    return "\n".join(parts)


def _table(section: type[Section], prefix: str) -> str:
    rows = ["| key | value | default | |", "| --- | --- | --- | --- |"]
    for name, field in section.model_fields.items():
        if not _is_section(field):
            meaning = " ".join((field.description or "").split())
            rows.append(f"| `{prefix}{name}` | {_values(field)} | {_default(field)} | {meaning} |".replace("|  |", "| |"))
    return "\n".join(rows) + "\n"


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Section)


def _values(field: FieldInfo) -> str:
    bounds = [text.format(f"{getattr(limit, name):g}") for limit in field.metadata for name, text in BOUNDS
              if hasattr(limit, name)]
    return ", ".join([_kind(field.annotation), *bounds])


def _kind(annotation) -> str:
    """A type in words: `integer or none`, `list of text`, the choices of a Literal."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(one) for one in inner)
    if origin is Annotated:
        return _kind(inner[0])
    if origin is list:
        return "list of texts" if inner[0] is str else f"list of {_kind(inner[0])}s"
    if origin is tuple:
        return f"{len(inner)} {_kind(inner[0])}s"
    return NAMES[origin or annotation]


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "needed"
    if field.default is None:
        return "none"
    if isinstance(field.default, tuple):
        return f"`{list(field.default)}`"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


if __name__ == "__main__":
    print(reference(), end="")
