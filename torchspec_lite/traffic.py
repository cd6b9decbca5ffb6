"""Served requests as training data: how the states of one request become a sample, and which finished ones are kept."""

import hashlib
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from torchspec_lite.sample import MIN_ANSWER_TOKENS

FIRST_ANSWER, SECOND_ANSWER = "traffic-", "traffic-second-"
"""How ids of samples begin: of what a user got, and of another answer of the target to the same prompt."""
REMEMBERED = 1 << 16
MEAN_OVER = 100.0


@dataclass
class Piece:
    """What one engine step computed for one request: rows of consecutive positions, rejected drafts included.

    `ready` returns when a copy from a GPU has arrived; the tensors may be read after it.
    """

    first: torch.Tensor    # [1] position of the first row
    tokens: torch.Tensor   # [r] input tokens
    states: torch.Tensor   # [r, L + 1, H] residual streams of the captured layers, the one before the final norm last
    sampled: torch.Tensor  # [k + 1] tokens that came out, -1 for what was rejected
    drafted: int           # drafts among the rows, at their end
    ready: Callable[[], None] = lambda: None

    def outcome(self) -> list[int]:
        """Tokens that the step yielded."""
        return [token for token in self.sampled.tolist() if token >= 0]


@dataclass
class Trail:
    """The pieces of one running request. `longest`: tokens of a sample; older rows are let go. `second`: no user's, see
    workers.second_answers; its acceptance says nothing of users' requests."""

    prompt_tokens: int
    longest: int
    max_tokens: int | None = None
    min_tokens: int = 0
    stops: frozenset[int] = frozenset()
    second: bool = False
    pieces: list[Piece] = field(default_factory=list)
    rows: int = 0
    nbytes: int = 0
    rounds: int = 0
    accepted: int = 0

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.rows += len(piece.tokens)
        self.nbytes += piece.states.nbytes
        if self.rows >= 2 * self.longest and len(self.pieces) > 2:
            self._let_go()

    def _let_go(self) -> None:
        """Join all but the newest piece, keep their last `longest` rows: a long request takes bounded memory."""
        *old, newest = self.pieces
        self._count(old)
        newest.ready()
        runs = _runs(old, int(newest.first))
        first, tokens, states = _joined(runs) if runs else (int(newest.first), newest.tokens[:0], newest.states[:0])
        spare = max(0, len(tokens) - self.longest)
        joined = Piece(torch.tensor([first + spare]), tokens[spare:], states[spare:].clone(), torch.tensor([-1]), 0)
        self.pieces = [joined, newest]
        self.rows = len(joined.tokens) + len(newest.tokens)
        self.nbytes = joined.states.nbytes + newest.states.nbytes

    def _count(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            piece.ready()
            if piece.drafted:
                self.rounds += 1
                self.accepted += len(piece.outcome()) - 1

    def finish(self) -> "Taken | None":
        """The request ended: what of it can be learned from; None when it holds no answer.

        Each step's rows replace what earlier steps had for the same positions and after, so rejected drafts and rows
        computed again after a preemption leave no trace. Rows that were read from the prefix cache are missing in
        front; the sample starts after them.
        """
        if not self.pieces:
            return None
        self._count(self.pieces)
        last = self.pieces[-1]
        out = last.outcome()
        if last.drafted:
            rows = min(len(last.tokens), len(out))
            last = Piece(last.first, last.tokens[:rows], last.states[:rows], last.sampled, last.drafted)
        first, tokens, states = _joined(_runs([*self.pieces[:-1], last]))
        end = first + len(tokens)
        if end >= self.prompt_tokens and out:  # the middle of a prompt yields a token that means nothing
            tokens = torch.cat([tokens, tokens.new_tensor(out[-1:])])
        tokens = tokens[:self._end(first, tokens) - first]
        spare = max(0, len(tokens) - self.longest)
        tokens, states, first = tokens[spare:], states[spare:spare + max(0, len(tokens) - spare - 1)], first + spare
        answer = (torch.arange(first, first + len(tokens)) >= self.prompt_tokens).to(torch.uint8)
        if int(answer.sum()) < MIN_ANSWER_TOKENS or int(answer[1:].sum()) < MIN_ANSWER_TOKENS - 1:
            return None
        return Taken(tokens.to(torch.int32), answer, states[:, :-1].contiguous(), states[:, -1].contiguous(),
                     1 + self.accepted / self.rounds if self.rounds and not self.second else None)

    def _end(self, first: int, tokens: torch.Tensor) -> int:
        """Where what the user got ends: a round may accept drafts past the end of turn or past `max_tokens`."""
        end = first + len(tokens)
        if self.max_tokens is not None:
            end = min(end, self.prompt_tokens + self.max_tokens)
        earliest = self.prompt_tokens + max(0, self.min_tokens - 1)
        for place in range(max(first, earliest), end):
            if int(tokens[place - first]) in self.stops:
                return place + 1
        return end


@dataclass(frozen=True)
class Taken:
    """The tensors of a sample (`torchspec_lite.sample.Sample`), and the request's own acceptance length."""

    token_ids: torch.Tensor  # [n] int32
    mask: torch.Tensor       # [n] uint8
    aux: torch.Tensor        # [n - 1, L, H]
    last: torch.Tensor       # [n - 1, H]
    acceptance_length: float | None


def _runs(pieces: list[Piece], before: int | None = None) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Pieces as consecutive runs (first position, tokens, states) up to position `before`, later rows winning."""
    runs: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    for piece in pieces:
        piece.ready()
        runs = _up_to(runs, int(piece.first))
        runs.append((int(piece.first), piece.tokens, piece.states))
    return runs if before is None else _up_to(runs, before)


def _up_to(runs: list, first: int) -> list:
    """What of `runs` lies before position `first` and reaches it; after a gap nothing does."""
    runs = [run for run in runs if run[0] < first]
    if not runs:
        return []
    start, tokens, states = runs[-1]
    if start + len(tokens) < first:
        return []
    runs[-1] = start, tokens[:first - start], states[:first - start]
    return runs


def _joined(runs: list) -> tuple[int, torch.Tensor, torch.Tensor]:
    return runs[0][0], torch.cat([run[1] for run in runs]), torch.cat([run[2] for run in runs])


class Allowance:
    """Most tokens per second that may be captured: a bucket that holds ten seconds' worth. None: no limit."""

    def __init__(self, tokens_per_s: float | None, clock: Callable[[], float] = time.monotonic):
        self.rate, self.clock = tokens_per_s, clock
        self.left, self.at = (tokens_per_s or 0) * 10, clock()

    def open(self) -> bool:
        """Whether another request may be captured now."""
        if self.rate is None:
            return True
        now = self.clock()
        self.left, self.at = min(self.rate * 10, self.left + (now - self.at) * self.rate), now
        return self.left > 0

    def spend(self, tokens: int) -> None:
        self.left -= tokens


class Sieve:
    """Which finished requests are sent: no duplicates, and of those that the drafter guesses well already, fewer.

    A request whose acceptance length is above the mean of the last hundred or so is left out with probability
    `prefer_low`: the others teach more. Texts are remembered as keyed hashes, the key lives in this process only.
    """

    def __init__(self, prefer_low: float, seed: int):
        self.prefer_low, self.random = prefer_low, random.Random(seed)
        self.key = self.random.randbytes(16)
        self.seen: OrderedDict[bytes, None] = OrderedDict()
        self.mean: float | None = None

    def refuse(self, taken: Taken) -> str | None:
        """The reason to leave a request out, None to send it."""
        text = self._digest(taken.token_ids)
        if text in self.seen:
            self.seen.move_to_end(text)
            return "duplicate"
        self.seen[text] = None
        if len(self.seen) > REMEMBERED:
            self.seen.popitem(last=False)
        length, mean = taken.acceptance_length, self.mean
        if length is None:
            return None
        self.mean = length if mean is None else mean + (length - mean) / MEAN_OVER
        if mean is not None and length > mean and self.random.random() < self.prefer_low:
            return "drafted_well"
        return None

    def share(self, taken: Taken, parts: int) -> int:
        """Which of the trainer ranks gets a request: for the same prompt always the same one, since the first rank predicts
        on requests before their like is trained. Of an answer so long that nothing is left of its prompt the tokens decide."""
        prompt = taken.token_ids[taken.mask == 0]
        return int.from_bytes(self._digest(prompt if len(prompt) else taken.token_ids)) % parts

    def _digest(self, token_ids: torch.Tensor) -> bytes:
        return hashlib.blake2b(token_ids.numpy().tobytes(), digest_size=16, key=self.key).digest()


@dataclass
class TrafficStats:
    """Counts since the start. `left_out`: requests that were sampled and not sent, by reason."""

    sampled: int = 0
    second_answers: int = 0
    sent: int = 0
    sent_tokens: int = 0
    sent_bytes: int = 0
    left_out: Counter = field(default_factory=Counter)

    def values(self) -> dict:
        return {"sampled": self.sampled, "second_answers": self.second_answers, "sent": self.sent, "sent_tokens": self.sent_tokens,
                "sent_bytes": self.sent_bytes, "left_out": dict(self.left_out)}
