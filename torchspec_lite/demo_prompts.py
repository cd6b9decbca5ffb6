"""The demo's prompts: conversation, maths and code that exist on any machine, split once and for all.

About three parts in ten are school maths, three in ten code and four in ten everything else. The text is the same on
every machine with the same Python; a run shuffles it by its own seed, so any beginning of a run is a fair mixture.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

from torchspec_lite import demo_code, demo_templates

PROMPTS = Path(__file__).parent / "prompts"
SOURCES = (Path(__file__), Path(demo_code.__file__), Path(demo_templates.__file__))
HELD_OUT_ONE_IN = 66
# Chosen so that the held-out prompts have about the mixture of the training prompts.
SPLIT_SALT = "split-236"


def is_held_out(identity: str) -> bool:
    """Whether a prompt is kept from training: about one in `HELD_OUT_ONE_IN`, by its id alone."""
    digest = hashlib.sha256(f"{SPLIT_SALT}/{identity}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def hand_written() -> list[dict]:
    """The conversations shipped as they are (`prompts/hand.jsonl`); some hold earlier turns of an assistant."""
    return [json.loads(line) for line in (PROMPTS / "hand.jsonl").read_text(encoding="utf-8").splitlines()]


def demo_conversations() -> list[dict]:
    """All prompts as `{"id", "conversations": [{"role", "content"}, …]}`; the last turn is the user's.

    Of prompts with the same text the first is kept.
    """
    generated = [
        *demo_templates.maths_prompts(),
        *demo_templates.writing_prompts(),
        *demo_templates.paragraph_prompts(),
        *demo_code.code_prompts(),
    ]
    rows = hand_written()
    rows += [{"id": name, "conversations": [{"role": "user", "content": text}]} for name, text in generated]
    by_text = {}
    for row in rows:
        by_text.setdefault(json.dumps(row["conversations"]), row)
    return list(by_text.values())


def _stamp() -> str:
    """What the files depend on: Python's version, the generator and its tables."""
    digest = hashlib.sha256(sys.version.encode())
    for path in sorted([*SOURCES, *(file for file in PROMPTS.iterdir() if file.is_file())]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _replace(path: Path, text: str) -> None:
    """Write a file under another name first, so that no reader sees half of it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def demo_files(cache_dir: Path) -> tuple[Path, Path]:
    """Paths of `demo-train.jsonl` and `demo-held-out.jsonl` in `cache_dir`, written if they are missing or old.

    Old means made by another version of Python, of the generator or of its tables.
    """
    train, held_out, stamp = (cache_dir / f"demo-{name}" for name in ("train.jsonl", "held-out.jsonl", "prompts.stamp"))
    current = _stamp()
    if train.exists() and held_out.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == current:
        return train, held_out
    cache_dir.mkdir(parents=True, exist_ok=True)
    lines = {False: [], True: []}
    for row in demo_conversations():
        lines[is_held_out(row["id"])].append(json.dumps(row, ensure_ascii=False) + "\n")
    _replace(train, "".join(lines[False]))
    _replace(held_out, "".join(lines[True]))
    _replace(stamp, current)
    return train, held_out
