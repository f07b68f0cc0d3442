"""Measure the host's time for a transformer layer and micro-batch, forward and backward.

    [WORLD_SIZE=2] python -m tests.support.host_gpu.host_time [gpt|llama] [FLAGS]
    python -m tests.support.host_gpu.host_time transformers   layers of transformers' Llama

The device computes on the host, and its kernels count their own time, which is subtracted: the rest
is Python, torch's dispatcher and autograd, and Triton's own launcher, whose calls of the driver do
nothing.  A GPU adds the driver's time of each launch.  The difference between 8 layers and 2
removes the rest of the model.
Of several ranks, this process is rank 0: torch's fake backend has no other, and waits for none.
Its collectives do nothing: Python, c10d's dispatch and the Work object are measured, and a GPU adds
NCCL's time to enqueue.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tests.support import host_gpu
from tests.support.host_gpu.triton_driver import Launch, cuda_driver

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import ModuleList

    Step = Callable[[ModuleList], Tensor]  # a forward pass through these layers

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
_PEER = "transformers"
_OF = {
    "gpt": "",
    "llama": "--swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --untie-embeddings-and-output-weights",
}


def main() -> None:
    """Measure and print one line."""
    kind, *more = sys.argv[1:] or ["llama"]
    last = _load()
    if kind == _PEER:
        step, layers = _peer()
    else:
        step, layers = _own([*_FLAGS.split(), *_OF[kind].split(), *more])
    forward, backward, launches = _measure(step, layers, last)
    print(
        f"{' '.join([kind, *more])}: {forward + backward:.3f} ms per layer and micro-batch "
        f"(forward {forward:.3f}, backward {backward:.3f}), {launches:.0f} launches of Triton",
        flush=True,
    )
    os._exit(0)  # threads of a group without peers may outlive the interpreter, which aborts then


def _load() -> Launch:
    """Install the device and Triton's driver; return what the emulated driver receives."""
    folder = Path("build/host_gpu").resolve()
    os.environ[host_gpu.ASKED] = str(host_gpu.build(folder))
    triton: Any = importlib.import_module("triton")
    os.environ["TRITON_INTERPRET"] = "1"  # otherwise `load` hides Triton
    host_gpu.load()
    del os.environ["TRITON_INTERPRET"]
    driver, last = cuda_driver(folder)
    triton.runtime.driver.set_active(driver)
    return last


def _measure(step: Step, layers: ModuleList, last: Launch) -> tuple[float, float, float]:
    """Return milliseconds of forward and of backward, and launches, per layer and micro-batch."""
    import torch

    from tests.support.host_gpu import torch_cuda

    device = torch_cuda.compiled_device
    few = torch.nn.ModuleList(list(layers)[:_FEW])

    def now() -> int:
        return time.perf_counter_ns() - int(device.kernel_ns())

    def run(count: int) -> tuple[int, int, int]:
        launched = last.launches
        begin = now()
        y = step(few if count == _FEW else layers)
        middle = now()
        y.backward(torch.zeros_like(y))
        end = now()
        return middle - begin, end - middle, last.launches - launched

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


def _own(flags: list[str]) -> tuple[Step, ModuleList]:
    """Return the forward pass of this project's layers, and the layers."""
    import torch

    from tests.support.host_gpu import torch_cuda

    torch_cuda.check_no_collectives()
    _use_cheap_kernels()
    wrapper, block, shared = _model(flags)
    rows = _TOKENS // block.tp_group.size() if block.config.sequence_parallel else _TOKENS
    given = torch.zeros(rows, 1, _WIDTH, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    wrapper.no_sync().__enter__()  # a micro-batch that is not the last

    def step(layers: ModuleList) -> Tensor:
        block.layers = layers
        return cast("Tensor", block(given, **shared))

    return step, block.layers


def _peer() -> tuple[Step, ModuleList]:
    """Return the forward pass of layers of transformers' Llama, and the layers."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaModel

    from megatron.core.transformer.dot_product_attention import DotProductAttention

    _use_cheap_kernels()
    torch.nn.functional.scaled_dot_product_attention = DotProductAttention.sdpa
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=_WIDTH,
        intermediate_size=4 * _WIDTH,
        num_hidden_layers=_LAYERS,
        num_attention_heads=2,
        attn_implementation="sdpa",
    )
    model = LlamaModel(config).to("cuda", torch.bfloat16)
    given = torch.zeros(1, _TOKENS, _WIDTH, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    positions = torch.arange(_TOKENS, device="cuda")[None]
    with torch.no_grad():
        angles = model.rotary_emb(given, positions)

    def step(layers: ModuleList) -> Tensor:
        x: Any = given
        for layer in layers:
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=angles)
        return cast("Tensor", x)

    return step, model.layers


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
    wrapper: Any = setup.build_model_chunks(run, pretrain_gpt.model_provider)[0]
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
