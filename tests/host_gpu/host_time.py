"""Measure the host's time for a transformer layer and micro-batch, forward and backward.

    [WORLD_SIZE=2] python -m tests.host_gpu.host_time [gpt|llama] [FLAGS]

The device computes on the host, and its kernels count their own time, which is subtracted: the rest
is Python, torch's dispatcher and autograd, and Triton's launcher up to the driver.  A GPU adds the
driver's time of each launch.  The difference between 8 layers and 2 removes the rest of the model.
Of several ranks, this process is rank 0: torch's fake backend has no other, and waits for none.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests import host_gpu

_LAYERS = 8
_FEW = 2
_TOKENS = 8
_WIDTH = 32
_WARMUP = 30
_PAIRS = 300
_FLAGS = (
    f"--device cuda --bf16 --num-layers {_LAYERS} --hidden-size {_WIDTH} --num-attention-heads 2 "
    f"--seq-length {_TOKENS} --max-position-embeddings {_TOKENS} --micro-batch-size 1 "
    "--global-batch-size 8 --train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 63 --no-create-attention-mask-in-dataloader --eval-iters 0 --num-workers 0 "
    "--hidden-dropout 0 --attention-dropout 0 --transformer-impl local"
)
_OF = {
    "gpt": "",
    "llama": "--swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --untie-embeddings-and-output-weights",
}


def main() -> None:
    """Measure and print one line."""
    kind, *more = sys.argv[1:] or ["llama"]
    driver = _load()
    forward, backward, launches = _measure([*_FLAGS.split(), *_OF[kind].split(), *more], driver)
    print(
        f"{' '.join([kind, *more])}: {forward + backward:.3f} ms per layer and micro-batch "
        f"(forward {forward:.3f}, backward {backward:.3f}), {launches:.0f} launches of Triton",
        flush=True,
    )
    os._exit(0)  # threads of a group without peers may outlive the interpreter, which aborts then


def _load() -> Driver:
    """Install the device and a driver for Triton whose launches do nothing."""
    os.environ[host_gpu.ASKED] = str(host_gpu.build(Path("build/host_gpu").resolve()))
    triton: Any = importlib.import_module("triton")
    os.environ["TRITON_INTERPRET"] = "1"  # otherwise `load` hides Triton
    host_gpu.load()
    del os.environ["TRITON_INTERPRET"]
    driver = Driver()
    triton.runtime.driver.set_active(driver)
    return driver


class Driver:
    """Driver of an H100 that loads compiled kernels and counts launches, which do nothing."""

    def __init__(self) -> None:
        self.launches = 0
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (1, 1, 0, 0, 1024),
            unload_module=lambda *_: None,
            get_device_properties=lambda _: {"max_shared_mem": 227 * 1024},
        )

    def launcher_cls(self, *_: object) -> Callable[..., None]:
        return self._launch

    def _launch(self, *_: object) -> None:
        self.launches += 1

    def get_current_target(self) -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def _measure(flags: list[str], driver: Driver) -> tuple[float, float, float]:
    """Return milliseconds of forward and of backward, and launches, per layer and micro-batch."""
    import torch

    from tests.host_gpu import torch_cuda

    device = torch_cuda.compiled_device
    _use_cheap_kernels()
    wrapper, block, shared = _model(flags)
    rows = _TOKENS // block.tp_group.size() if block.config.sequence_parallel else _TOKENS
    like = torch.empty(rows, 1, _WIDTH, dtype=torch.bfloat16, device="cuda")
    given = torch.zeros_like(like).requires_grad_()
    grad = torch.zeros_like(like)
    layers = block.layers
    few = torch.nn.ModuleList(list(layers)[:_FEW])

    def now() -> int:
        return time.perf_counter_ns() - int(device.kernel_ns())

    def run(count: int) -> tuple[int, int, int]:
        block.layers = few if count == _FEW else layers
        launched = driver.launches
        with wrapper.no_sync():
            begin = now()
            y = block(given, **shared)
            middle = now()
            y.backward(grad)
            end = now()
        return middle - begin, end - middle, driver.launches - launched

    for _ in range(_WARMUP):
        run(_FEW)
        run(_LAYERS)
    gc.collect()
    gc.disable()
    both = [(run(_FEW), run(_LAYERS)) for _ in range(_PAIRS)]
    # The fastest: other processes of the machine only add time.
    least, most = ([min(of) for of in zip(*runs, strict=True)] for runs in zip(*both, strict=True))
    forward, backward, launches = (
        (b - a) / (_LAYERS - _FEW) for a, b in zip(least, most, strict=True)
    )
    return forward / 1e6, backward / 1e6, launches


def _use_cheap_kernels() -> None:
    """Let narrow rows take Triton's kernels, and attention one operation of torch."""
    import torch

    from megatron.core.fusions import rms_norm
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # for so few values its set-up takes longer
    rms_norm._WIDTHS = range(1, 8193)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    def sdpa(q: Any, k: Any, v: Any, *, scale: float, is_causal: bool, **_: object) -> Any:
        return attend(q, k, v, 0.0, is_causal, scale=scale)[0]

    DotProductAttention.sdpa = staticmethod(sdpa)


def _model(flags: list[str]) -> tuple[Any, Any, dict[str, object]]:
    """Return the data-parallel wrapper, the block of layers and its shared inputs."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import pretrain_gpt
    from megatron.training.initialize import configure, start
    from megatron.training.runtime import setup

    if (ranks := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        os.environ["RANK"] = "0"
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    run = start(configure(argv=flags))
    setup.setup_tokenizer(run)
    setup.build_model_chunks(run, pretrain_gpt.model_provider)
    wrapper: Any = run.model_chunks[0]
    wrapper.zero_grad_buffer()
    model = wrapper
    while not hasattr(model, "decoder"):
        model = model.module
    shared: dict[str, object] = {}
    if (rotary := getattr(model, "rotary_pos_emb", None)) is not None:
        shared["rotary_pos_emb"] = rotary.table(_TOKENS, 0, torch.bfloat16)
    return wrapper, model.decoder, shared


if __name__ == "__main__":
    main()
