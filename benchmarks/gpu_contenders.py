"""Contenders of train_gpu.py: same shape, initial weights, tokens and AdamW.

GPT-2 has the approximation of GELU by tanh, as Megatron-LM and OpenAI train it.

Every weight is sampled on the device from a seed derived from its name, so that no contender needs
tensors of another.
"""

from __future__ import annotations

import importlib.util
import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import pretrain_gpt
from benchmarks import ours, peers
from megatron.core import device
from megatron.core.params.param_info import info_of
from megatron.training.planning.memory_warmup import make_optimizer_state
from megatron.training.step.train_step import train_step

ACCUMULATION = 8  # micro-batches of a step, for every contender
MICRO_BATCHES_OF_DATA = 64


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and a micro-batch; ``more`` are flags that our contender needs to fit."""

    name: str
    family: str  # gpt2 or llama
    layers: int
    hidden: int
    heads: int
    seq: int
    batch: int
    vocab: int = 50304
    groups: int = 0  # query groups; 0: as many as heads
    ffn: int = 0  # 0: four times the hidden size
    experts: int = 0  # top-2 routing
    more: str = ""

    @property
    def inner(self) -> int:
        """Width of the MLP."""
        return self.ffn or 4 * self.hidden

    @property
    def rows(self) -> int:
        """Sequences of a step."""
        return self.batch * ACCUMULATION

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.groups or self.heads


_14_BYTES = (  # 14 bytes per parameter with its gradient
    "--use-distributed-optimizer --use-precision-aware-optimizer --main-grads-dtype bf16 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--loss-chunk-size 2048"
)
_8B = (4096, 32, 8192, 1, 128256, 8, 14336)  # hidden, heads, seq, batch, vocab, groups, ffn
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("124m", "gpt2", 12, 768, 12, 1024, 32),
        Shape("1.3b", "gpt2", 24, 2048, 16, 2048, 8),
        Shape("3b", "gpt2", 28, 3072, 24, 2048, 4),
        Shape("llama-8b-stack", "llama", 8, *_8B),
        Shape("llama-8b", "llama", 32, *_8B, more=_14_BYTES),
        Shape("moe", "llama", 12, 1024, 16, 2048, 8, 32000, groups=4, ffn=3584, experts=8),
        Shape("tiny", "gpt2", 2, 64, 2, 64, 2, 512),
        Shape("tiny-llama", "llama", 2, 64, 4, 64, 2, 512, groups=2, ffn=96),
        Shape("tiny-moe", "llama", 2, 64, 4, 64, 2, 512, groups=2, ffn=96, experts=4),
    )
}


def flags(shape: Shape, kind: str) -> list[str]:
    """Return our command line for a shape; ``kind`` is ours, ours-fp8 or ours-loop."""
    words = (
        f"--device {device.current().type} --bf16 --num-layers {shape.layers} "
        f"--hidden-size {shape.hidden} --num-attention-heads {shape.heads} "
        f"--ffn-hidden-size {shape.inner} --seq-length {shape.seq} "
        f"--max-position-embeddings {shape.seq} --micro-batch-size {shape.batch} "
        f"--global-batch-size {shape.rows} --train-iters 1000000 --lr {peers.ADAM['lr']} "
        f"--lr-decay-style constant --adam-beta1 {peers.ADAM['betas'][0]} "
        f"--adam-beta2 {peers.ADAM['betas'][1]} --weight-decay {peers.WEIGHT_DECAY} "
        f"--clip-grad {peers.CLIP} --mock-data --tokenizer-type NullTokenizer "
        f"--vocab-size {shape.vocab - 1} --make-vocab-size-divisible-by 1 --hidden-dropout 0 "
        "--attention-dropout 0 --no-create-attention-mask-in-dataloader --eval-iters 0 "
        f"--num-workers 0 --transformer-impl local {shape.more}"
    )
    if shape.family == "llama":
        words += " --swiglu --normalization RMSNorm --position-embedding-type rope"
        words += " --disable-bias-linear --untie-embeddings-and-output-weights"
    if shape.groups:
        words += f" --group-query-attention --num-query-groups {shape.groups}"
    if shape.experts:
        words += f" --num-experts {shape.experts} --moe-router-topk 2"
        words += "" if kind == "ours-loop" else " --moe-grouped-gemm"
        words += f" --moe-ffn-hidden-size {shape.inner} --moe-router-load-balancing-type none"
    if kind == "ours-fp8":
        words += " --fp8-format hybrid --fp8-recipe tensorwise"
    return words.split()


def draw(name: str, *size: int, std: float = 0.02) -> Tensor:
    """Sample the initial values of a weight, in fp32 on the device."""
    where = device.current()
    generator = torch.Generator(where).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(*size, generator=generator, device=where) * std


class Start:
    """Initial weights of each layer under plain names: q, k, v, proj, fc1 (gate, then up), fc2."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.residual_std = 0.02 / (2 * shape.layers) ** 0.5

    def layer(self, i: int) -> dict[str, Tensor]:
        """Return the weights of layer ``i``."""
        s, h = self.shape, self.shape.hidden
        kv_width, wide = h // s.heads * s.kv_heads, s.inner * (2 if s.family == "llama" else 1)
        sizes = {"q": (h, h), "k": (kv_width, h), "v": (kv_width, h), "proj": (h, h)}
        sizes |= {"fc1": (wide, h), "fc2": (h, s.inner)}
        stds = {"proj": self.residual_std, "fc2": self.residual_std}
        return {n: draw(f"{i}.{n}", *size, std=stds.get(n, 0.02)) for n, size in sizes.items()}

    def table(self, name: str) -> Tensor:
        """Return ``wte`` or ``out`` [vocabulary, width], or ``wpe`` [tokens, width]."""
        rows = self.shape.seq if name == "wpe" else self.shape.vocab
        return draw(name, rows, self.shape.hidden)


def _tokens(shape: Shape) -> Tensor:
    """Return the token ids of all micro-batches, page-locked for a GPU."""
    tokens = peers.batches(shape, MICRO_BATCHES_OF_DATA)  # type: ignore[arg-type]
    return device.host_array(tokens, device.current())


# -- ours ------------------------------------------------------------------------------------


class OurTrainer:
    """Our contender: the application's own step, from flags to `train_step`."""

    def __init__(self, shape: Shape, kind: str, more: str) -> None:
        fill = None if shape.experts else partial(_fill_ours, shape=shape)
        self.run = ours.training_run([*flags(shape, kind), *more.split()], pretrain_gpt, fill)
        make_optimizer_state(self.run)
        self.run.data.train = ours.endless(_tokens(shape))

    def step(self) -> Tensor:
        """Run one step as between two log lines; return the loss without synchronizing."""
        result = train_step(self.run)
        self.run.state.advance(result, 0.0)
        return result.losses["lm loss"]


@torch.no_grad()
def _fill_ours(model: nn.Module, shape: Shape) -> None:
    """Load the initial weights; query, key and value are interleaved by query group."""
    begin, params = Start(shape), {info_of(p).name: p for p in model.parameters()}

    def put(name: str, values: Tensor) -> None:
        params.pop(name).copy_(values)

    put("embedding.word_embeddings.weight", begin.table("wte"))
    if shape.family == "llama":
        put("output_layer.weight", begin.table("out"))
    else:
        put("embedding.position_embeddings.weight", begin.table("wpe"))
    for i in range(shape.layers):
        w, prefix = begin.layer(i), f"decoder.layers.{i}."
        by_group = [w[part].view(shape.kv_heads, -1, shape.hidden) for part in ("q", "k", "v")]
        put(prefix + "self_attention.linear_qkv.weight", torch.cat(by_group, 1).flatten(0, 1))
        put(prefix + "self_attention.linear_proj.weight", w["proj"])
        put(prefix + "mlp.linear_fc1.weight", w["fc1"])
        put(prefix + "mlp.linear_fc2.weight", w["fc2"])
    forgotten = [name for name, param in params.items() if param.dim() > 1]
    assert not forgotten, f"the common start has nothing for {forgotten}"


# -- peers -----------------------------------------------------------------------------------


class PeerTrainer:
    """Peer with its usual setup: bf16 autocast over fp32 weights, clipping, fused AdamW."""

    def __init__(self, model: nn.Module, shape: Shape, *, is_compiled: bool) -> None:
        self.model: Any = torch.compile(model) if is_compiled else model
        self.params, self.optimizer = list(model.parameters()), peers.adamw(model)
        self.data = itertools.cycle(_tokens(shape))

    def step(self) -> Tensor:
        """Run one step; return the loss without synchronizing the device."""
        where = device.current()
        total = torch.zeros((), device=where)
        for micro_batch in itertools.islice(self.data, ACCUMULATION):
            batch = micro_batch.to(where, non_blocking=True)
            with torch.autocast(where.type, torch.bfloat16):
                loss: Tensor = self.model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
            (loss / ACCUMULATION).backward()
            total += loss.detach() / ACCUMULATION
        nn.utils.clip_grad_norm_(self.params, peers.CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


@torch.no_grad()
def _plain(shape: Shape) -> nn.Module:
    """Build the single-file GPT with the initial weights."""
    with device.current():
        model = peers.PlainGPT(shape, gelu="tanh")  # type: ignore[arg-type]
    begin = Start(shape)
    model.wte.weight.copy_(begin.table("wte"))
    model.wpe.weight.copy_(begin.table("wpe"))
    for i, block in enumerate(model.blocks):
        w = begin.layer(i)
        w["qkv"] = torch.cat([w[part] for part in ("q", "k", "v")])
        for name in ("qkv", "proj", "fc1", "fc2"):
            linear: Any = getattr(block, name)
            linear.weight.copy_(w[name])
            linear.bias.zero_()
    return model


class _Huggingface(nn.Module):
    """A transformers model that computes its own loss over labels that are already shifted."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        out: Any = self.model(tokens, labels=labels, shift_labels=labels, use_cache=False)
        loss: Tensor = out.loss
        return loss


@torch.no_grad()
def _hf_gpt2(shape: Shape) -> nn.Module:
    with device.current():
        wrapped: Any = peers.gpt2_of(shape, gelu="gelu_pytorch_tanh")  # type: ignore[arg-type]
    begin, body = Start(shape), wrapped.transformer
    body.wte.weight.copy_(begin.table("wte"))
    body.wpe.weight.copy_(begin.table("wpe"))
    for i, block in enumerate(body.h):
        w = begin.layer(i)
        pairs = {
            block.attn.c_attn: torch.cat([w[part] for part in ("q", "k", "v")]),
            block.attn.c_proj: w["proj"],
            block.mlp.c_fc: w["fc1"],
            block.mlp.c_proj: w["fc2"],
        }
        for conv, values in pairs.items():  # Conv1D keeps [in, out]
            conv.weight.copy_(values.t())
            conv.bias.zero_()
    return _Huggingface(wrapped)


@torch.no_grad()
def _hf_llama(shape: Shape) -> nn.Module:
    begin = Start(shape)
    with device.current():
        model: Any = peers.llama_of(shape, shape.kv_heads, begin.layer, is_tied=False)  # type: ignore[arg-type]
    model.model.embed_tokens.weight.copy_(begin.table("wte"))
    model.lm_head.weight.copy_(begin.table("out"))
    return _Huggingface(model)


def _liger_llama(shape: Shape) -> nn.Module:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama()
    return _hf_llama(shape)


# -- the matmul that speeds are compared with ------------------------------------------------


class MatrixProduct:
    """FLOP/s of a large bf16 matmul, reported in place of a loss.

    It is repeated without a pause: the first repeats alone would run at a clock that the power
    limit does not allow for long.
    """

    def __init__(self) -> None:
        self.size = 8192 if device.is_cuda() else 512
        self.repeats = 64 if device.is_cuda() else 4
        where = device.current()
        # Zeros would be faster.
        left, right = (torch.randn(self.size, self.size, device=where).bfloat16() for _ in "ab")
        self.left = left
        self.right = right
        self.out = torch.empty_like(left)

    def step(self) -> Tensor:
        """Run one measurement."""
        begin = device.moment()
        for _ in range(self.repeats):
            torch.mm(self.left, self.right, out=self.out)
        seconds = device.seconds_between(begin, device.moment())
        return torch.tensor(2 * self.size**3 * self.repeats / seconds)


_PEERS: dict[str, Callable[[Shape], nn.Module]] = {
    "plain-compiled": _plain,
    "hf-gpt2": _hf_gpt2,
    "hf-gpt2-compiled": _hf_gpt2,
    "hf-llama-compiled": _hf_llama,
    "hf-llama-liger": _liger_llama,
    "hf-llama": _hf_llama,
}


def contenders(shape: Shape) -> list[str]:
    """Return the names of the contenders that can train this shape on this machine.

    Those that say most come first: time may end before the last one.
    """
    if shape.experts:
        return ["ours", "ours-fp8", "ours-loop"]  # a loop over experts has the same losses
    mark = "hf-llama" if shape.family == "llama" else ("plain", "hf-gpt2")
    left_out = [
        word
        for word, package in (("liger", "liger_kernel"), ("hf", "transformers"))
        if importlib.util.find_spec(package) is None
    ]
    found = [n for n in _PEERS if n.startswith(mark) and not any(word in n for word in left_out)]
    return ["ours", "ours-fp8", *found]


def make_trainer(name: str, shape: Shape, more: str) -> Any:
    """Build the contender ``name``; ``more`` are further flags of ours."""
    if name == "product":
        return MatrixProduct()
    if name.startswith("ours"):
        return OurTrainer(shape, name, more)
    return PeerTrainer(_PEERS[name](shape), shape, is_compiled=name.endswith("compiled"))
