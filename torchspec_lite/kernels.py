"""kernels_*.cpp built with this machine's compiler and called on CPU tensors.

Compared with torch.compile on a CPU: built once in seconds instead of a minute, no shape is ever new, and no
intermediate result goes through memory. `KERNELS` has each by the name of the PyTorch function that defines it, with
the same arguments and results (some reuse an argument's memory for a result, as said there). `out` is memory for the last
result, contiguous.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from torchspec_lite.errors import UserError

FOLDER = Path(__file__).parent
SOURCES = tuple(FOLDER / f"kernels_{name}.cpp" for name in ("layer", "attention", "losses"))
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-std=c++17", "-fPIC", "-fopenmp")
BUILD_LIMIT_S = 300.0
TYPES = (torch.float32, torch.bfloat16)


@cache
def compiler() -> str | None:
    """The C++ compiler of this machine, or None; the kernels need Linux and a compiler that knows OpenMP."""
    return (shutil.which("g++") or shutil.which("c++")) if platform.system() == "Linux" else None


@cache
def library(dtype: torch.dtype) -> ctypes.CDLL:
    """The kernels for fp32 or bf16 tensors, built unless this machine has built the same source before.

    Raises UserError with the compiler's words when it fails.
    """
    flags = (*FLAGS, "-DBF16") if dtype == torch.bfloat16 else FLAGS
    version = subprocess.run([compiler(), "--version"], capture_output=True, check=True).stdout
    source = b"".join(path.read_bytes() for path in (FOLDER / "kernels.h", *SOURCES))
    key = hashlib.sha256(source + version + " ".join(flags).encode() + _processor()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "torchspec_lite"
    built = folder / f"kernels-{key}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            # Linked without -fopenmp: OpenMP's names are found in the library that torch has loaded, so that both share
            # one pool of threads.
            objects = [f"{work}/{path.stem}.o" for path in SOURCES]
            commands = [[compiler(), *flags, "-c", str(path), "-o", to] for path, to in zip(SOURCES, objects, strict=True)]
            for command in [*commands, [compiler(), "-shared", *objects, "-o", f"{work}/kernels.so"]]:
                done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_LIMIT_S)
                if done.returncode:
                    raise UserError(f"the CPU kernels did not build with {compiler()}; mend the compiler or set "
                                    f"trainer.compile=false:\n{done.stderr.strip()}")
            os.replace(f"{work}/kernels.so", built)
    return ctypes.CDLL(str(built))


def _processor() -> bytes:
    """What -march=native depends on."""
    lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    return b"".join(sorted({line for line in lines if line.startswith((b"model name", b"flags", b"Features"))}))


def _run(name: str, dtype: torch.dtype, *arguments) -> None:
    """Tensors go by address, None as a null pointer, floats as float, ints as int64."""
    kinds = []
    for value in arguments:
        if isinstance(value, torch.Tensor):
            kinds.append(ctypes.c_void_p(value.data_ptr()))
        elif isinstance(value, float):
            kinds.append(ctypes.c_float(value))
        else:
            kinds.append(value if value is None else ctypes.c_int64(value))
    library(dtype)[name](*kinds)


def unit_norm(x, eps):
    x = x.contiguous()
    out = torch.empty_like(x)
    _run("norm", x.dtype, x, None, None, eps, None, out, x.numel() // x.shape[-1], x.shape[-1])
    return out


def norm(x, weight, eps, out=None):
    x = x.contiguous()
    out = torch.empty_like(x) if out is None else out
    _run("norm", x.dtype, x, None, weight, eps, None, out, *x.shape)
    return out


def add_norm(x, branch, weight, eps, out=None):
    x, branch = x.contiguous(), branch.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x) if out is None else out
    _run("norm", x.dtype, x, branch, weight, eps, total, out, *x.shape)
    return total, out


def norm_backward(gradient, x, weight, eps, around, out=None):
    gradient, x, around = gradient.contiguous(), x.contiguous(), around.contiguous()
    by_weight, out = torch.empty_like(weight), torch.empty_like(x) if out is None else out
    _run("norm_backward", x.dtype, gradient, x, weight, eps, around, out, by_weight, *x.shape)
    return by_weight, out


def split_rotate(qkv, embedded, places, cos, sin, kv_heads):
    rows, width = len(qkv), 2 * cos.shape[-1]
    group = qkv.shape[1] // width // kv_heads - 2
    queries = qkv.new_empty(kv_heads, rows, group, width)
    keys, values = qkv.new_empty(kv_heads, rows, width), qkv.new_empty(kv_heads, rows, width)
    _run("split_rotate", qkv.dtype, qkv.contiguous(), embedded.contiguous(), places, cos, sin, queries, keys, values, rows,
         kv_heads, group, width // 2)
    return queries, keys, values


def split_rotate_backward(queries, keys, values, cos, sin, out=None):
    queries, keys, values = queries.contiguous(), keys.contiguous(), values.contiguous()
    kv_heads, rows, group, width = queries.shape
    out = queries.new_empty(rows, kv_heads * (group + 2) * width) if out is None else out
    _run("split_rotate_backward", queries.dtype, queries, keys, values, cos, sin, out, rows, kv_heads, group, width // 2)
    return out


def gated(gate_up, out=None):
    gate_up = gate_up.contiguous()
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2) if out is None else out
    _run("gated", gate_up.dtype, gate_up, out, *out.shape)
    return out


def gated_backward(gradient, gate_up, out=None):
    """`out` may be `gate_up`."""
    gradient, gate_up = gradient.contiguous(), gate_up.contiguous()
    out = torch.empty_like(gate_up) if out is None else out
    _run("gated_backward", gate_up.dtype, gradient, gate_up, out, *gradient.shape)
    return out


def merged_softmax(scores, queries, own_keys, firsts, limits, unused):
    """`scores` becomes the weights."""
    heads, rows, group, columns = scores.shape
    places, width = own_keys.shape[0], own_keys.shape[-1]
    own = scores.new_empty(places, heads, rows, group, dtype=torch.float32)
    lse = scores.new_empty(heads, rows, group, dtype=torch.float32)
    _run("merged_softmax", scores.dtype, scores, queries, own_keys, firsts, limits, own, lse, heads, rows, group, columns,
         places, unused, width, queries.stride(0), own_keys.stride(0), own_keys.stride(1))
    return scores, own, lse


def add_own_values(shared, own, own_values, unused):
    """`shared` becomes the result."""
    heads, rows, group, width = shared.shape
    _run("add_own_values", shared.dtype, shared, own, own_values, heads, rows, group, len(own), unused, width,
         own_values.stride(0), own_values.stride(1))
    return shared


def own_backward(gradient, out, lse, queries, own_keys, own_values, unused):
    heads, rows, group, width = queries.shape
    places = len(own_keys)
    by_query = torch.empty(queries.shape)
    by_key, by_value = (torch.empty(places, heads, rows, width) for _ in range(2))
    delta = torch.empty(lse.shape)
    own_keys, own_values = own_keys.contiguous(), own_values.contiguous()
    _run("own_backward", queries.dtype, gradient.contiguous(), out.contiguous(), lse, queries.contiguous(), own_keys,
         own_values, by_query, delta, by_key, by_value, heads, rows, group, places, unused, width, own_keys.stride(0),
         own_keys.stride(1))
    return by_query, delta, by_key, by_value


def softmax_backward(scores, slopes, lse, delta, firsts, limits, width):
    """`scores` becomes the weights and `slopes` the gradients."""
    _run("softmax_backward", scores.dtype, scores, slopes, lse, delta, firsts, limits, *scores.shape, width, lse.stride(0))
    return scores, slopes


def summary(logits):
    lse, best = torch.empty(len(logits)), torch.empty(len(logits), dtype=torch.int64)
    _run("summary", logits.dtype, logits, lse, best, *logits.shape)
    return lse, best


def restricted_probabilities(logits, lse):
    p = torch.empty(logits.shape)
    _run("restricted_probabilities", logits.dtype, logits, lse.contiguous(), p, *logits.shape)
    return p


def _step_losses(kind):
    def step_losses(logits, p, place, scale):
        losses, best = torch.empty(len(logits)), torch.empty(len(logits), dtype=torch.int64)
        _run("step_losses", logits.dtype, kind, logits, p, place.contiguous(), scale, losses, best, *logits.shape)
        return losses, best
    return step_losses


def transposed(x):
    out = torch.empty(x.shape[1], x.shape[0])
    _run("transposed", x.dtype, x, out, *x.shape)
    return out


KERNELS = {function.__name__: function for function in (
    unit_norm, norm, add_norm, norm_backward, split_rotate, split_rotate_backward, gated, gated_backward, merged_softmax,
    add_own_values, own_backward, softmax_backward, summary, restricted_probabilities, transposed)}
KERNELS |= {name: _step_losses(kind) for kind, name in enumerate(("cross_entropy", "total_variation", "log_acceptance"))}
