"""A hidden-state sample: one conversation, its supervised tokens and the target's states over it."""

from dataclasses import dataclass, replace

import numpy as np
import torch

PURPOSES = ("train", "held_out", "traffic")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# A drafter reads one token of an answer and predicts the next: a shorter answer supervises nothing.
MIN_ANSWER_TOKENS = 2
MAX_TEXT = 256  # characters of an id or a fingerprint
MAX_LAYERS = 64
MAX_COUNT = 2**31 - 1  # attempts, token ids
MAX_ORDINAL = 2**53 - 1


class SampleError(Exception):
    """A sample that must not be used: `kind` is a short stable name, `detail` says what was found.

    `str()` gives "kind: detail", the reason that travels to the ledger.
    """

    def __init__(self, kind: str, detail: str):
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


@dataclass(eq=False)
class Sample:
    """What a target hands to a trainer for one conversation of n tokens.

    Layer id i names the residual stream entering layer i (Hugging Face `hidden_states[i]`); `last` is the stream
    after the last layer, before the final norm. The last token was never an input, so it has no states.
    """

    id: str
    attempt: int
    ordinal: int  # place in the run's fixed order
    purpose: str  # "train", "held_out", or "traffic" for a request that users sent
    fingerprint: str  # of the target, see TargetInfo
    layer_ids: tuple[int, ...]  # ascending
    token_ids: torch.Tensor  # [n] int32
    mask: torch.Tensor  # [n] uint8, 1 = token of the assistant
    aux: torch.Tensor  # [n - 1, L, H] bf16, fp16 or fp32
    last: torch.Tensor  # [n - 1, H], dtype of aux

    @property
    def tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the four tensors."""
        return self.token_ids.nbytes + self.mask.nbytes + self.aux.nbytes + self.last.nbytes

    def clone(self) -> "Sample":
        """A copy that owns its memory: what to keep of a received sample after it was released to its receiver."""
        return replace(self, token_ids=self.token_ids.clone(), mask=self.mask.clone(), aux=self.aux.clone(),
                       last=self.last.clone())


def supervised(sample: Sample, which: str) -> Sample:
    """The sample as `trainer.supervise` has it trained: itself (`answers`), or with every token an answer's (`all`)."""
    return sample if which == "answers" else replace(sample, mask=torch.ones_like(sample.mask))


@dataclass(frozen=True)
class Expectation:
    """What a receiver takes: everything else is refused with a reason. `vocab_size`: of the target; None: any token id."""

    fingerprint: str
    layer_ids: tuple[int, ...]
    dtype: torch.dtype
    hidden_size: int
    max_tokens: int
    vocab_size: int | None = None

    def max_sample_bytes(self) -> int:
        """Bytes of the longest sample, labels included."""
        states = (len(self.layer_ids) + 1) * self.hidden_size * self.dtype.itemsize
        return self.max_tokens * (states + 8) + 65536

    def check(self, sample: Sample) -> None:
        """Raises SampleError, kind `mismatch`, naming the first field that differs, `too_long` or `token`."""
        for name, found, wanted in (("target", sample.fingerprint, self.fingerprint),
                                    ("layer ids", tuple(sample.layer_ids), tuple(self.layer_ids)),
                                    ("dtype", sample.aux.dtype, self.dtype),
                                    ("hidden size", sample.aux.shape[-1], self.hidden_size)):
            if found != wanted:
                raise SampleError("mismatch", f"{name} is {found}, this receiver takes {wanted}")
        if sample.tokens > self.max_tokens:
            raise SampleError("too_long", f"{sample.tokens} tokens, this receiver takes {self.max_tokens}")
        if self.vocab_size is not None and (highest := int(np.maximum.reduce(sample.token_ids.numpy()))) >= self.vocab_size:
            raise SampleError("token", f"token id {highest} is outside the target's vocabulary of {self.vocab_size}")


def check_sample(sample: Sample) -> None:
    """Check everything but the states' values. Raises SampleError with the reason."""
    check_labels(sample)
    n = sample.tokens if sample.token_ids.dim() == 1 else 0
    if n < 2:
        raise SampleError("too_short", f"token_ids has shape {tuple(sample.token_ids.shape)}; needs 2 tokens or more")
    layers, hidden = len(sample.layer_ids), sample.last.shape[-1]
    shapes = {"token_ids": (n,), "mask": (n,), "aux": (n - 1, layers, hidden), "last": (n - 1, hidden)}
    for name, shape in shapes.items():
        tensor = vars(sample)[name]
        if tuple(tensor.shape) != shape:
            raise SampleError("shape", f"{name} is {tuple(tensor.shape)}, expected {shape}")
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise SampleError("layout", f"{name} must be contiguous and in CPU memory")
    if sample.aux.dtype not in DTYPES.values() or sample.last.dtype != sample.aux.dtype:
        raise SampleError("dtype", f"aux is {sample.aux.dtype} and last {sample.last.dtype}")
    if sample.token_ids.dtype != torch.int32 or sample.mask.dtype != torch.uint8:
        raise SampleError("dtype", f"token_ids is {sample.token_ids.dtype}, mask {sample.mask.dtype}; "
                                   "expected int32, uint8")
    check_values(sample)


def check_values(sample: Sample) -> None:
    """Check what tensors of the right shapes and types hold, the states' values left out. Raises SampleError."""
    hidden = sample.last.shape[-1]
    if hidden * sample.aux.dtype.itemsize % 8:
        raise SampleError("layout", f"a row of {hidden} states is not a multiple of 8 bytes")
    token_ids, mask = sample.token_ids.numpy(), sample.mask.numpy()  # so small that torch's own overhead would show
    if np.minimum.reduce(token_ids) < 0:
        raise SampleError("token", "a token id is negative")
    if np.maximum.reduce(mask) > 1:
        raise SampleError("mask", "mask holds values other than 0 and 1")
    if not np.maximum.reduce(mask[1:]):
        raise SampleError("no_supervision", "no token after the first is the assistant's")


def check_labels(sample: Sample) -> None:
    """Check what names a sample. Raises SampleError, kind `label` or `layers`."""
    for name in ("id", "fingerprint"):
        text = vars(sample)[name]
        if not isinstance(text, str) or not 0 < len(text) <= MAX_TEXT or not text.isprintable():
            raise SampleError("label", f"{name} must be 1 to {MAX_TEXT} printable characters")
    for name, limit in (("attempt", MAX_COUNT), ("ordinal", MAX_ORDINAL)):
        number = vars(sample)[name]
        if type(number) is not int or not 0 <= number <= limit:
            raise SampleError("label", f"{name} must be an integer from 0 to {limit}")
    if sample.purpose not in PURPOSES:
        raise SampleError("label", f"purpose must be one of {', '.join(PURPOSES)}")
    ids = sample.layer_ids
    if not 0 < len(ids) <= MAX_LAYERS or any(type(i) is not int or not 0 <= i < 2**16 for i in ids):
        raise SampleError("layers", f"layer ids {ids} must be 1 to {MAX_LAYERS} small integers")
    if list(ids) != sorted(set(ids)):
        raise SampleError("layers", f"layer ids {ids} must ascend")
