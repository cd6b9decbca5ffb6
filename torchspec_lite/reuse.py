"""The bounded reuse buffer: each streamed sample is trained `reuse` times, in shuffled order, from memory only."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from torchspec_lite.sample import Sample


@dataclass
class Entry:
    """A sample in the buffer. `passes` counts the optimizer steps that used it; `statistics` is what the teacher
    says of it, worked out once."""

    sample: Sample
    statistics: object
    passes: int = 0
    tokens: int = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self):
        self.tokens = len(self.sample.token_ids)
        self.nbytes = self.sample.nbytes


class ReuseBuffer:
    """Samples waiting for their passes. Draws are without replacement within a step and prefer samples that were
    used least; equal ones are drawn at random from `seed`.

    `ordered` draws strictly by the run's order instead, a batch `reuse` times in a row, so that a repeated run sees the
    same batches however fast samples came.
    """

    def __init__(self, reuse: float, max_bytes: int, seed: int, ordered: bool = False):
        self.reuse, self.max_bytes, self.seed, self.ordered = reuse, max_bytes, seed, ordered
        self.random = random.Random(seed)
        self.entries: dict[str, Entry] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def tokens(self) -> int:
        """Tokens waiting, each sample counted once whatever passes it has left."""
        return sum(entry.tokens for entry in self.entries.values())

    def has_room(self) -> bool:
        """Whether one more sample may be added; the bound is passed by at most the last one added."""
        return self.nbytes < self.max_bytes

    def add(self, entry: Entry) -> None:
        self.entries[entry.sample.id] = entry
        self.nbytes += entry.nbytes

    def draw(self, max_tokens: int) -> list[Entry]:
        """Entries for one optimizer step, at most `max_tokens` together (one longer sample is drawn alone)."""
        waiting = list(self.entries.values())
        if self.ordered:
            waiting.sort(key=lambda entry: entry.sample.ordinal)
        else:
            self.random.shuffle(waiting)
            waiting.sort(key=lambda entry: entry.passes)
        drawn, tokens = [], 0
        for entry in waiting:
            if drawn and tokens + entry.tokens > max_tokens:
                break
            drawn.append(entry)
            tokens += entry.tokens
        return drawn

    def count_pass(self, entries: Iterable[Entry]) -> list[Entry]:
        """Note that a step used these; returns those that have had all their passes and have left the buffer."""
        done = []
        for entry in entries:
            entry.passes += 1
            if entry.passes >= self.reuse:
                self.remove(entry.sample.id)
                done.append(entry)
        return done

    def remove(self, id: str) -> Entry:
        """Take a sample out, whatever passes it has left."""
        entry = self.entries.pop(id)
        self.nbytes -= entry.nbytes
        return entry
