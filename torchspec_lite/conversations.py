"""Conversation files: JSONL, indexed once by id, read by place, in an order that a seed fixes."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchspec_lite.errors import UserError

MAX_LINE_BYTES = 64 << 20
MAX_ID_LENGTH = 256
EXPECTED = '{"id": "…", "conversations": [{"role": "user", "content": "…"}, …]} (or "messages")'
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant",
                  "tool": "tool"}


@dataclass(frozen=True)
class Conversation:
    """Turns as a chat template takes them: dicts with `role`, `content` and what else the file gave (tool calls)."""

    id: str
    messages: tuple[dict, ...]
    tools: list | None


@dataclass(frozen=True)
class Place:
    """Where one conversation is: file (index into Dataset.files), byte offset, bytes, line number from 1."""

    file: int
    offset: int
    size: int
    line: int


class Dataset:
    """Conversations of some JSONL files. Each file is read once to check and index it; `get` reads one line.

    Raises UserError naming file and line for a line that is not as EXPECTED, and for an id used twice. A line without
    `id` gets the file's stem and its line number. An empty list of turns is allowed here: chat.py rejects it.
    """

    def __init__(self, files: list[str | Path]):
        self.files = [Path(file) for file in files]
        self._places: dict[str, Place] = {}
        for index, path in enumerate(self.files):
            for place, line in _lines(path, index):
                conversation = parse(line, path, place.line)
                self._add(conversation.id, place)
        for id in self._places:
            base, epoch = split_epoch(id)
            if epoch > 1 and base in self._places:
                raise UserError(f"{self._where(id)}: id {id!r} reads as epoch {epoch} of id {base!r}; rename one")

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, id: str) -> bool:
        return id in self._places or split_epoch(id)[0] in self._places

    @property
    def ids(self) -> list[str]:
        """Ids in the files' order."""
        return list(self._places)

    def get(self, id: str) -> Conversation:
        """The conversation of an id, or of `id#epoch`. Raises UserError if there is none or the file has changed."""
        base = id if id in self._places else split_epoch(id)[0]
        if base not in self._places:
            raise UserError(f"no conversation {id!r} in {', '.join(map(str, self.files)) or 'no files'}")
        place = self._places[base]
        path = self.files[place.file]
        try:
            with path.open("rb") as file:
                file.seek(place.offset)
                line = file.read(place.size)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; keep the run's conversation files in place") from error
        conversation = parse(line, path, place.line)
        if conversation.id != base:
            raise UserError(f"{self._where(base)}: id {base!r} was here and is not any more; the file was changed "
                            "during the run")
        return conversation

    def order(self, seed: int, epochs: int, max_prompts: int | None) -> list[str]:
        """Sample ids in the run's fixed order: each epoch shuffled anew, ids of epoch e > 1 written `id#e`.

        The order depends on seed and ids alone, not on the files' order nor on a library's generator.
        `max_prompts` stops the whole list.
        """
        order = []
        for epoch in range(1, epochs + 1):
            shuffled = sorted(self._places, key=lambda id: _rank(seed, epoch, id))
            order += shuffled if epoch == 1 else [f"{id}#{epoch}" for id in shuffled]
        return order[:max_prompts]

    def _add(self, id: str, place: Place) -> None:
        if id in self._places:
            here = f"{self.files[place.file]}, line {place.line}"
            raise UserError(f"{here}: id {id!r} was used before ({self._where(id)}); ids must differ")
        self._places[id] = place

    def _where(self, id: str) -> str:
        place = self._places[id]
        return f"{self.files[place.file]}, line {place.line}"


def resolve_files(names: list[str], purpose: str, cache: Path) -> list[Path]:
    """Paths of the files named in the config; `demo` is the prompts shipped with the project, written to `cache`.

    `purpose`: train or held_out. Raises UserError for a file that is not there.
    """
    paths = []
    for name in names:
        if name == "demo":
            # Imported here: building the demo prompts is needed by the demo only.
            from torchspec_lite.demo_prompts import demo_files
            train, held_out = demo_files(cache)
            paths.append(Path(train if purpose == "train" else held_out))
        elif Path(name).is_file():
            paths.append(Path(name).resolve())
        else:
            raise UserError(f"data.{purpose}: no file {name}; give a conversation JSONL file, or `demo`")
    return paths


def check_disjoint(train: Dataset, held_out: Dataset) -> None:
    """Raises UserError if a conversation is both learned from and measured on."""
    for id in held_out.ids:
        if id in train:
            raise UserError(f"{held_out._where(id)}: id {id!r} is among the training files too; remove one")


def split_epoch(id: str) -> tuple[str, int]:
    """`name#3` → (name, 3); an id without a number after its last `#` → (id, 1)."""
    base, mark, epoch = id.rpartition("#")
    if mark and base and epoch.isascii() and epoch.isdecimal() and len(epoch) < 9 and int(epoch) > 1:
        return base, int(epoch)
    return id, 1


def parse(line: bytes, path: Path, number: int) -> Conversation:
    """One line of a file. Raises UserError naming file and line, what was expected and what was found."""
    where = f"{path}, line {number}"
    try:
        record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error}); expected {EXPECTED}") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected {EXPECTED}, found {_kind(record)}")
    keys = [key for key in ("conversations", "messages") if key in record]
    if len(keys) != 1:
        found = "both" if keys else f"the keys {', '.join(map(repr, list(record)[:8])) or '(none)'}"
        raise UserError(f"{where}: expected one of \"conversations\" and \"messages\", found {found}")
    turns = record[keys[0]]
    if not isinstance(turns, list):
        raise UserError(f"{where}: {keys[0]}: expected a list of turns, found {_kind(turns)}")
    messages = tuple(_message(turn, f"{where}: turn {place}") for place, turn in enumerate(turns, 1))
    tools = record.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"{where}: tools: expected a list, found {_kind(tools)}")
    return Conversation(_id(record, path, number, where), messages, tools or None)


def _id(record, path, number, where) -> str:
    id = record.get("id")
    if id is None:
        return f"{path.stem}:{number}"
    if isinstance(id, int) and not isinstance(id, bool):
        id = str(id)
    if not isinstance(id, str) or not 0 < len(id) <= MAX_ID_LENGTH or not id.isprintable():
        raise UserError(f"{where}: id: expected 1 to {MAX_ID_LENGTH} printable characters, found {_show(id)}")
    return id


def _message(turn, where) -> dict:
    if not isinstance(turn, dict):
        raise UserError(f'{where}: expected {{"role": …, "content": …}}, found {_kind(turn)}')
    if "from" in turn and "role" not in turn:
        turn = {"role": SHAREGPT_ROLES.get(turn["from"], turn["from"]) if isinstance(turn["from"], str) else None,
                "content": turn.get("value")}
    role, content = turn.get("role"), turn.get("content")
    if not isinstance(role, str) or not role:
        raise UserError(f"{where}: role: expected text such as \"user\", found {_show(role)}")
    if isinstance(content, list):
        content = _join_parts(content, where)
    if not isinstance(content, str) and not (content is None and turn.get("tool_calls")):
        raise UserError(f"{where}: content: expected text, found {_show(content)}")
    message = {**turn, "content": content}
    if isinstance(turn.get("tool_calls"), list):
        message["tool_calls"] = [_tool_call(call) for call in turn["tool_calls"]]
    return message


def _tool_call(call):
    """A tool call with its arguments as an object, which is what vLLM gives to templates."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (ValueError, RecursionError):
        return call


def _join_parts(parts, where) -> str:
    """Text of OpenAI-style content parts, joined by line ends as vLLM joins them."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UserError(f'{where}: content: expected parts {{"type": "text", "text": …}}, found {_show(part)}')
    return "\n".join(part["text"] for part in parts)


def _lines(path: Path, index: int) -> Iterator[tuple[Place, bytes]]:
    offset, number = 0, 0
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise UserError(f"{path}, line {number}: longer than {MAX_LINE_BYTES >> 20} MiB; "
                                    "expected one conversation a line")
                if line.strip():
                    yield Place(index, offset, len(line), number), line
                offset += len(line)
    except OSError as error:
        raise UserError(f"conversations {path}: {error.strerror or error}; give a readable JSONL file") from error


def _rank(seed: int, epoch: int, id: str) -> bytes:
    return hashlib.blake2b(f"{seed}/{epoch}/{id}".encode(), digest_size=16).digest()


def _kind(value) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number",
             float: "a number", type(None): "null"}
    return names[type(value)]


def _show(value) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
