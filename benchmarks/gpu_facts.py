"""Report what this GPU, its libraries and torch support: what the choice of kernels depends on.

    python -m benchmarks.gpu_facts

One line for each fact.  tools/dev/gpu_lease.py runs this first.
"""

from __future__ import annotations

import itertools
import math
import platform
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core import device
from megatron.core.fusions import quantize
from megatron.core.fusions.rms_norm import norm_rows_of_sum
from megatron.core.optional import require, why_missing

_BYTES = 2**31  # of the tensor that is copied: many times a cache
# Name, then rows, query heads, key and value heads, tokens and head width.
_ATTENTION = {
    "GPT 1.3B": (8, 16, 16, 2048, 128),
    "GPT 124M": (32, 12, 12, 1024, 64),
    "Llama 8B": (1, 32, 8, 8192, 128),
}
_GEMMS = ((8192, 8192, 8192), (16384, 2048, 8192), (16384, 8192, 2048))
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def main() -> int:
    """Print all facts; return 1 without a GPU."""
    if not torch.cuda.is_available():
        print("no GPU")
        return 1
    device.choose("cuda")
    warnings.simplefilter("ignore")  # torch explains each kernel that it does not choose
    for line in itertools.chain(versions(), gemms(), launches(), attention_times(), ceilings()):
        print(line, flush=True)
    return 0


def versions() -> Iterator[str]:
    """Yield the releases of the device's libraries."""
    what = "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit"
    smi = ["nvidia-smi", what, "--format=csv,noheader"]
    yield f"GPU: {subprocess.run(smi, capture_output=True, text=True, check=False).stdout.strip()}"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    yield (
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, "
        f"NCCL {nccl}, Triton {_version('triton')}"
    )
    for package in ("transformer_engine", "flash_attn", "flash_attn_interface", "causal_conv1d"):
        yield f"{package}: {why_missing(package) or 'installed'}"


def _version(package: str) -> str:
    return why_missing(package) or str(require(package, "the report").__version__)


def gemms() -> Iterator[str]:
    """Yield which GEMMs torch has for this device."""
    where = device.current()
    yield f"capability {device.capability(where)}, fp8: {device.multiplies_fp8(where)}"
    yield f"addmm of bf16 into fp32: {device.supports_fp32_accumulate_addmm()}"
    formats = torch.float8_e4m3fn, torch.float8_e4m3fn
    for pair in quantize._PAIRS:
        is_right = quantize._is_right(where, pair, formats, torch.bfloat16)
        yield f"block-scaled GEMM {pair[0]} by {pair[1]}: {is_right}"


def launches() -> Iterator[str]:
    """Yield whether kernels are launched without Triton's own launcher."""
    launch = require("megatron.core.fusions.triton.launch", "the report")
    x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):  # the first launch compiles
        norm_rows_of_sum((x, None), x, 0.0)
    direct = [kernel is not None for kernel in launch._compiled.values()]
    hooks = triton_hooks()
    yield f"direct launches: {bool(direct) and all(direct)}; hooks of Triton: {hooks}"


def triton_hooks() -> int:
    """Return the number of hooks around launches, which make them slower."""
    runtime = require("triton", "the report").knobs.runtime
    return len(runtime.launch_enter_hook.calls) + len(runtime.launch_exit_hook.calls)


def attention_times() -> Iterator[str]:
    """Yield milliseconds of forward and of backward of each kernel of causal attention."""
    for name, (rows, heads, groups, tokens, width) in _ATTENTION.items():
        # Tokens before heads in memory, as a layer has them.
        q, k, v = (
            torch.randn(rows, tokens, n, width, device="cuda", dtype=torch.bfloat16)
            .transpose(1, 2)
            .requires_grad_()
            for n in (heads, groups, groups)
        )
        found = [f"attention of {name}: torch chooses {_chosen(q, k, v)}"]
        flops = 2 * rows * heads * tokens**2 * width
        for backend, kernel in _BACKENDS.items():
            try:
                with sdpa_kernel(kernel):
                    forward_ms, backward_ms = _attend(q, k, v)
            except RuntimeError as error:
                found.append(f"{backend} {str(error).splitlines()[0]}")
                continue
            rates = flops / forward_ms / 1e9, 2.5 * flops / backward_ms / 1e9
            found.append(
                f"{backend} {forward_ms:.3f} and {backward_ms:.3f} ms "
                f"({rates[0]:.0f} and {rates[1]:.0f} TFLOP/s)"
            )
        yield "; ".join(found)


def _chosen(q: Tensor, k: Tensor, v: Tensor) -> str:
    number = torch._fused_sdp_choice(q, k, v, None, 0.0, True, enable_gqa=q.shape[1] != k.shape[1])
    return SDPBackend(number).name


def _attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[float, float]:
    is_grouped = q.shape[1] != k.shape[1]

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)

    out = forward()
    grad = torch.randn_like(out)
    backward_ms = milliseconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    return milliseconds(forward), backward_ms


def ceilings() -> Iterator[str]:
    """Yield the rates of a copy and of large GEMMs, which no kernel of ours exceeds."""
    source = torch.empty(_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy_ms = milliseconds(lambda: target.copy_(source))
    yield f"copy: {2 * _BYTES / copy_ms / 1e9:.2f} TB/s, read and written"
    for sizes in _GEMMS:
        rows, columns, inner = sizes
        a = torch.randn(rows, inner, device="cuda")
        b = torch.randn(columns, inner, device="cuda")
        rates = [
            f"{name} {2 * math.prod(sizes) / milliseconds(run) / 1e9:.0f} TFLOP/s"
            for name, run in _gemms(a, b).items()
        ]
        yield f"GEMM {rows} x {columns} x {inner}: {', '.join(rates)}"


def _gemms(a: Tensor, b: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return the GEMMs a b^T of each format, by name."""
    total = torch.zeros(len(a), len(b), device="cuda")
    one = torch.ones((), device="cuda")
    x = a.bfloat16()
    y = b.bfloat16()
    codes = [m.clamp(-400, 400).to(torch.float8_e4m3fn) for m in (a, b)]
    left = codes[0]
    right = codes[1].t()
    fp8 = partial(torch._scaled_mm, left, right, one, one, out_dtype=torch.bfloat16)
    return {
        "bf16": partial(torch.mm, x, y.t()),
        "into fp32": partial(torch.addmm, total, x, y.t(), out_dtype=torch.float32, out=total),
        "fp8": partial(fp8, use_fast_accum=True),
        "fp8 with full accumulation": fp8,
    }


def milliseconds(run: Callable[[], object], repeats: int = 10) -> float:
    """Return the median time of ``run`` on the device after three warmups."""
    for _ in range(3):
        run()
    found = []
    for _ in range(repeats):
        begin = device.moment()
        run()
        found.append((begin, device.moment()))
    device.synchronize()
    return 1e3 * statistics.median(device.seconds_between(*pair) for pair in found)


if __name__ == "__main__":
    sys.exit(main())
