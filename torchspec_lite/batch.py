"""Documents packed into one batch without padding, and the plan of which rows each unrolled step works on."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchspec_lite.drafter import DrafterConfig
from torchspec_lite.teacher import TeacherStatistics

ROUND = 64              # rows are counted in multiples of this
BLOCK_ROWS = 256        # rows of one attention block
BLOCK_SCORES = 1 << 20  # scores of one attention block for each head, about


@dataclass(frozen=True)
class Batch:
    """N documents end to end, T tokens in all.

    Row t holds what the target knew after reading token t. A document's last token has no states: its row is zero and
    never supervised. `target_lse` and `target_argmax` are of the target's full vocabulary, at rows that some step
    may supervise, zero elsewhere (see `teacher_statistics`).
    """

    token_ids: torch.Tensor        # [T] int64
    mask: torch.Tensor             # [T] bool, true: token of an assistant answer
    aux: torch.Tensor              # [T, L, Ht]
    last: torch.Tensor             # [T, Ht] stream after the target's last layer, before its final norm
    document_starts: torch.Tensor  # [N + 1] int64 on the CPU: 0 first, T last
    target_lse: torch.Tensor       # [T] fp32
    target_argmax: torch.Tensor    # [T] int64

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


def pack(samples: Sequence, statistics: Sequence[TeacherStatistics], device: torch.device | str = "cpu") -> Batch:
    """Pack samples (sample.py) and each one's teacher statistics. Raises ValueError when there are none."""
    if not samples:
        raise ValueError("a batch needs at least one sample")
    lengths = [len(sample.token_ids) for sample in samples]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    total = int(starts[-1])
    first = samples[0]
    aux = torch.empty(total, *first.aux.shape[1:], dtype=first.aux.dtype)
    last = torch.empty(total, *first.last.shape[1:], dtype=first.last.dtype)
    lse, argmax = torch.zeros(total), torch.zeros(total, dtype=torch.int64)
    for sample, known, start, length in zip(samples, statistics, starts[:-1].tolist(), lengths, strict=True):
        end = start + length - 1
        aux[start:end], last[start:end] = sample.aux, sample.last
        aux[end], last[end] = 0, 0
        lse[start:end], argmax[start:end] = known.lse, known.argmax
    token_ids = torch.cat([sample.token_ids for sample in samples]).to(torch.int64)
    mask = torch.cat([sample.mask for sample in samples]).bool()
    return Batch(token_ids.to(device), mask.to(device), aux.to(device), last.to(device), starts, lse.to(device),
                 argmax.to(device))


def empty_batch(config: DrafterConfig, device: torch.device | str = "cpu") -> Batch:
    """A batch without documents: its loss is 0 and so are its gradients."""
    whole, real = torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, device=device)
    width = config.target_hidden_size
    return Batch(whole, whole.bool(), real.view(0, 1, 1).expand(0, len(config.layer_ids), width),
                 real.view(0, 1).expand(0, width), torch.zeros(1, dtype=torch.int64), real, whole)


def supervised_places(mask: torch.Tensor, document_starts: torch.Tensor, steps: int) -> torch.Tensor:
    """Bool [K, T]: whether row t is supervised at step k.

    With j = t+1+k, the place whose next token the drafter predicts: tokens t+1, j and j+1 all belong to answers and to
    row t's document. Both arguments on the CPU.
    """
    total = len(mask)
    lengths = document_starts.diff()
    end = document_starts[1:].repeat_interleave(lengths)                    # [T] first row after the row's document
    here = torch.arange(total)
    padded = torch.cat([mask.bool(), torch.zeros(steps + 1, dtype=torch.bool)])
    places = torch.empty(steps, total, dtype=torch.bool)
    for k in range(steps):
        inside = here + 2 + k < end
        places[k] = padded[1:1 + total] & padded[1 + k:1 + k + total] & padded[2 + k:2 + k + total] & inside
    return places


def supervised_counts(masks: Sequence[torch.Tensor], steps: int) -> torch.Tensor:
    """Supervised places [K] fp64 of documents, each given by its mask [n]; what `normaliser` of a step is summed from."""
    if not masks:
        return torch.zeros(steps, dtype=torch.float64)
    starts = torch.tensor([0, *map(len, masks)]).cumsum(0)
    return supervised_places(torch.cat([mask.cpu() for mask in masks]), starts, steps).sum(1).double()


@dataclass(frozen=True)
class Rows:
    """The rows one unrolled step computes: those that it or a later step supervises, in the batch's order."""

    index: torch.Tensor                 # [R] place among the rows of step 0
    from_previous: torch.Tensor | None  # [R] place among the previous step's rows; None: the same rows
    tokens: torch.Tensor                # [R] place of the token it reads in Plan.tokens
    positions: torch.Tensor             # [R] RoPE position
    firsts: torch.Tensor                # [R] first step-0 key that it sees, as a place in Plan.keys
    limits: torch.Tensor                # [R] last one
    real: int                           # rows before the copies that fill up
    blocks: list[tuple[int, int, int, int]]  # attention blocks: rows [a, b) see keys within [c, d)


@dataclass(frozen=True)
class Plan:
    """Which rows and tokens of a batch take part, computed from its masks alone.

    Documents without a supervised place are left out, and so are rows after the last live one. A row that no step
    supervises is a key of step 0 and nothing more. Lists are filled up with copies of their last entry to a multiple of
    ROUND, because a CPU prepares each new shape of a product for milliseconds; a copy is never supervised.
    """

    keys: torch.Tensor           # [Tk] rows of the batch that are step-0 keys
    key_positions: torch.Tensor  # [Tk] place in the document
    key_tokens: torch.Tensor     # [Tk] place of the token that the row reads at step 0 in `tokens`
    tokens: torch.Tensor         # [Tt] places in the batch of the tokens that are read
    live: torch.Tensor           # [R0] rows of the batch that some step supervises
    live_keys: torch.Tensor      # [R0] their places in `keys`
    steps: list[Rows]            # one for each step that supervises something
    supervised: torch.Tensor     # [K, R0] bool, on the CPU
    counts: torch.Tensor         # [K] int64, supervised places


def plan_rows(mask: torch.Tensor, document_starts: torch.Tensor, steps: int,
              device: torch.device | str = "cpu") -> Plan:
    """Plan K steps over a batch's mask [T] and document starts; the plan's tensors are on `device`."""
    places = supervised_places(mask.cpu(), document_starts, steps)          # [K, T]
    later = places.flip(0).cummax(0).values.flip(0)                         # supervised at this step or a later one
    live = later[0].nonzero().squeeze(1)
    starts = document_starts[:-1]
    document = torch.bucketize(live, document_starts[1:], right=True)
    depth = later[:, live].sum(0)                                           # steps that each live row computes
    used, document = torch.unique(document, return_inverse=True)
    starts = starts[used]
    last_row = starts.scatter_reduce(0, document, live, "amax")
    last_token = starts.scatter_reduce(0, document, live + depth, "amax")
    keys, key_starts = _ranges(starts, last_row + 1)
    tokens, token_starts = _ranges(starts, last_token + 1)
    key_document = torch.arange(len(used)).repeat_interleave(key_starts.diff())
    key_positions = keys - starts[key_document]
    key_tokens = token_starts[key_document] + key_positions + 1
    real = len(live)
    live, document = round_up(live), round_up(document)
    depth = torch.cat([depth, depth.new_zeros(len(live) - real)])
    position = live - starts[document]
    token, token_end = token_starts[document] + position + 1, token_starts[document + 1] - 1
    firsts = key_starts[document]
    supervised = places[:, live]
    supervised[:, real:] = False
    keys, key_positions, key_tokens, tokens = map(round_up, (keys, key_positions, key_tokens, tokens))
    rows, previous = [], None
    for k in range(int(depth.max()) if real else 0):
        chosen = (depth > k).nonzero().squeeze(1)
        index, kept = round_up(chosen), None
        if previous is None:
            index, count = torch.arange(len(live)), real
        elif len(index) == len(previous):
            index = previous
        else:
            count, kept = len(chosen), torch.searchsorted(previous, index).to(device)
        limits = firsts[index] + position[index]
        blocks = _blocks(firsts[index].tolist(), limits.tolist(), len(keys))
        parts = torch.minimum(token[index] + k, token_end[index]), position[index] + k, firsts[index], limits
        rows.append(Rows(index.to(device), kept, *(part.to(device) for part in parts), count, blocks))
        previous = index
    parts = keys, key_positions, key_tokens, tokens, live, firsts + position
    return Plan(*(part.to(device) for part in parts), rows, supervised, places.sum(1))


def _ranges(starts: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The integers of all ranges [start, end) one after the other, and where each range begins among them."""
    lengths = ends - starts
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.arange(int(offsets[-1])) + (starts - offsets[:-1]).repeat_interleave(lengths), offsets


def round_up(values: torch.Tensor) -> torch.Tensor:
    """`values` [n] with the last one repeated until their number is a multiple of ROUND."""
    return torch.cat([values, values[-1:].expand(-len(values) % ROUND)])


def _blocks(firsts: list[int], limits: list[int], keys: int) -> list[tuple[int, int, int, int]]:
    """Cut rows, ordered by document and place, into attention blocks of few different shapes."""
    blocks, a, rows = [], 0, len(firsts)
    while a < rows:
        b = min(a + BLOCK_ROWS, rows)
        while b - a > ROUND // 4 and (b - a) * (limits[b - 1] + 1 - firsts[a]) > BLOCK_SCORES:
            b = a + (b - a) // 2
        width = min(keys, -(-(limits[b - 1] + 1 - firsts[a]) // (2 * ROUND)) * 2 * ROUND)
        first = min(firsts[a], keys - width)
        blocks.append((a, b, first, first + width))
        a = b
    return blocks
