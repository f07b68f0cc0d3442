"""Peers of train_cpu.py: a GPT in plain PyTorch, transformers, litgpt, and the matmuls alone.

Every contender trains the same shape from the same weights on the same tokens with the same AdamW.
``weights(shape)`` are the common initial weights: a dictionary of fp32 tensors under plain names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ADAM = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8}
WEIGHT_DECAY, CLIP = 0.1, 1.0


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT and of its batch.  ``family`` is gpt2 or llama.

    A shape with query ``groups`` is for our contenders alone.
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    seq: int
    batch: int
    vocab: int = 50304
    groups: int = 0  # 0: as many as heads

    @property
    def inner(self) -> int:
        """MLP width: 4h, or the usual 8h/3 of a gated MLP in multiples of 64."""
        return 4 * self.hidden if self.family == "gpt2" else self.hidden * 8 // 3 // 64 * 64


SHAPES = {
    s.name: s
    for s in (
        Shape("30m", "gpt2", 6, 384, 6, 256, 4),
        Shape("124m", "gpt2", 12, 768, 12, 512, 2),
        Shape("350m", "gpt2", 24, 1024, 16, 512, 2),
        Shape("30m-llama", "llama", 6, 384, 6, 256, 4),
        Shape("gqa-llama", "llama", 4, 1024, 16, 512, 2, 32000, groups=4),
        Shape("tiny", "gpt2", 2, 64, 2, 64, 2, 512),
        Shape("tiny-llama", "llama", 2, 64, 2, 64, 2, 512),
    )
}


def weights(shape: Shape) -> dict[str, Tensor]:
    """Return the common initial weights."""
    g = torch.Generator().manual_seed(1234)
    h, inner, gpt2 = shape.hidden, shape.inner, shape.family == "gpt2"

    def normal(*size: int, std: float = 0.02) -> Tensor:
        return torch.randn(*size, generator=g) * std

    out = {"wte": normal(shape.vocab, h), "lnf": torch.ones(h)}
    if gpt2:
        out["wpe"] = normal(shape.seq, h)
    residual_std = 0.02 / math.sqrt(2 * shape.layers)
    for i in range(shape.layers):
        out[f"{i}.ln1"] = torch.ones(h)
        out[f"{i}.ln2"] = torch.ones(h)
        out[f"{i}.qkv"] = normal(3 * h, h)
        out[f"{i}.proj"] = normal(h, h, std=residual_std)
        out[f"{i}.fc1"] = normal(inner if gpt2 else 2 * inner, h)
        out[f"{i}.fc2"] = normal(h, inner, std=residual_std)
    return out


def batches(shape: Shape, steps: int) -> Tensor:
    """Return token ids [steps, batch, seq + 1]: a noisy random walk that a model can learn."""
    g = torch.Generator().manual_seed(7)
    size = (steps, shape.batch, shape.seq + 1)
    jumps = torch.randint(0, shape.vocab, size, generator=g)
    stays = torch.rand(size, generator=g) < 0.7
    return torch.where(stays, jumps % 97, jumps)


# -- plain PyTorch ---------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self, shape: Shape, gelu: str):
        super().__init__()
        h = shape.hidden
        self.heads = shape.heads
        self.gelu = gelu
        self.ln1, self.ln2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.proj = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.fc1, self.fc2 = nn.Linear(h, shape.inner), nn.Linear(shape.inner, h)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (
            t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, h))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x)), approximate=self.gelu))


class PlainGPT(nn.Module):
    """GPT-2 in one file: tied embeddings, learned positions, mean token loss."""

    def __init__(self, shape: Shape, gelu: str = "none"):
        super().__init__()
        self.wte = nn.Embedding(shape.vocab, shape.hidden)
        self.wpe = nn.Embedding(shape.seq, shape.hidden)
        self.blocks = nn.ModuleList(_Block(shape, gelu) for _ in range(shape.layers))
        self.lnf = nn.LayerNorm(shape.hidden)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.lnf(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@torch.no_grad()
def plain_gpt(shape: Shape) -> nn.Module:
    """Build PlainGPT with the common initial weights."""
    model, w = PlainGPT(shape), weights(shape)
    model.wte.weight.copy_(w["wte"])
    model.wpe.weight.copy_(w["wpe"])
    for i, block in enumerate(model.blocks):
        for name in ("qkv", "proj", "fc1", "fc2"):
            linear = getattr(block, name)
            linear.weight.copy_(w[f"{i}.{name}"])
            linear.bias.zero_()
    return model


# -- transformers ----------------------------------------------------------------------------


class _HF(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def gpt2_of(shape: Shape, gelu: str = "gelu") -> nn.Module:
    """Build transformers' GPT-2 with SDPA."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocab,
        n_positions=shape.seq,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        activation_function=gelu,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="sdpa",
    )
    return GPT2LMHeadModel(config)


@torch.no_grad()
def hf_gpt2(shape: Shape) -> nn.Module:
    """Build transformers' GPT-2 with SDPA and the common initial weights."""
    model, w = gpt2_of(shape), weights(shape)
    body = model.transformer
    body.wte.weight.copy_(w["wte"])
    body.wpe.weight.copy_(w["wpe"])
    for i, block in enumerate(body.h):
        pairs = {
            "qkv": block.attn.c_attn,
            "proj": block.attn.c_proj,
            "fc1": block.mlp.c_fc,
            "fc2": block.mlp.c_proj,
        }
        for name, conv in pairs.items():  # Conv1D keeps [in, out]
            conv.weight.copy_(w[f"{i}.{name}"].t())
            conv.bias.zero_()
    return _HF(model)


@torch.no_grad()
def llama_of(
    shape: Shape, kv_heads: int, layer: Callable[[int], dict[str, Tensor]], *, is_tied: bool
) -> nn.Module:
    """Build transformers' Llama with SDPA; ``layer(i)`` returns the weights of a layer.

    These are q, k, v, proj, fc1 (gate, then up) and fc2.  The caller fills embedding and output
    layer.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab,
        max_position_embeddings=shape.seq,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=is_tied,
        attn_implementation="sdpa",
        rms_norm_eps=1e-5,
    )
    model = LlamaForCausalLM(config)
    for i, block in enumerate(model.model.layers):
        w, attention, mlp = layer(i), block.self_attn, block.mlp
        gate, up = w["fc1"].chunk(2)
        pairs = {
            attention.q_proj: w["q"],
            attention.k_proj: w["k"],
            attention.v_proj: w["v"],
            attention.o_proj: w["proj"],
            mlp.gate_proj: gate,
            mlp.up_proj: up,
            mlp.down_proj: w["fc2"],
        }
        for linear, values in pairs.items():
            linear.weight.copy_(values)
    return model


@torch.no_grad()
def hf_llama(shape: Shape) -> nn.Module:
    """Build transformers' Llama, tied, with SDPA and the common initial weights."""
    w = weights(shape)

    def layer(i: int) -> dict[str, Tensor]:
        own = {name: w[f"{i}.{name}"] for name in ("proj", "fc1", "fc2")}
        return {**own, **dict(zip("qkv", w[f"{i}.qkv"].chunk(3), strict=True))}

    model = llama_of(shape, shape.heads, layer, is_tied=True)
    model.model.embed_tokens.weight.copy_(w["wte"])
    return _HF(model)


class _Litgpt(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1).float(), labels.flatten())


@torch.no_grad()
def litgpt_llama(shape: Shape) -> nn.Module:
    """Build litgpt's model in the shape of Llama, tied, with the common initial weights."""
    from litgpt.config import Config
    from litgpt.model import GPT

    config = Config(
        name="llama",
        block_size=shape.seq,
        padded_vocab_size=shape.vocab,
        vocab_size=shape.vocab,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_embd=shape.hidden,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=1e-5,
        mlp_class_name="LLaMAMLP",
        intermediate_size=shape.inner,
    )
    model, w = GPT(config), weights(shape)
    model.transformer.wte.weight = model.lm_head.weight
    model.lm_head.weight.copy_(w["wte"])
    for i, block in enumerate(model.transformer.h):
        block.attn.qkv.weight.copy_(w[f"{i}.qkv"])
        block.attn.proj.weight.copy_(w[f"{i}.proj"])
        gate, up = w[f"{i}.fc1"].chunk(2)
        block.mlp.fc_1.weight.copy_(gate)
        block.mlp.fc_2.weight.copy_(up)
        block.mlp.proj.weight.copy_(w[f"{i}.fc2"])
    return _Litgpt(model)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Build fused AdamW with weight decay on matrices only."""
    params = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
        ],
        fused=True,
        **ADAM,
    )


class PeerTrainer:
    """Training step of a peer: autocast for bf16 (fp32 weights), clipping, AdamW."""

    def __init__(self, model: nn.Module, shape: Shape, dtype: str, steps: int):
        self.model, self.optimizer = model, adamw(model)
        self.data, self.at = batches(shape, steps), 0
        self.bf16 = dtype == "bf16"

    def step(self) -> float:
        batch = self.data[self.at % len(self.data)]
        self.at += 1
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            loss = self.model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss)


# -- the matmuls alone -----------------------------------------------------------------------


class MatmulFloor:
    """The matmuls of one step alone, each at its own shape."""

    def __init__(self, shape: Shape, dtype: str):
        kind = torch.bfloat16 if dtype == "bf16" else torch.float32
        tokens, h, inner = shape.batch * shape.seq, shape.hidden, shape.inner
        fc1 = inner if shape.family == "gpt2" else 2 * inner
        d, heads = h // shape.heads, shape.batch * shape.heads
        linears = [(3 * h, h), (h, h), (fc1, h), (h, inner)] * shape.layers + [(shape.vocab, h)]
        self.plain = [
            (
                torch.randn(tokens, i).to(kind),
                torch.randn(o, i).to(kind),
                torch.randn(tokens, o).to(kind),
            )
            for o, i in set(linears)
            for _ in [0]
        ]
        self.count = [linears.count((w.size(0), w.size(1))) for _, w, _ in self.plain]
        half = shape.seq // 2  # causal attention needs half of the scores
        self.scores = [
            (torch.randn(heads, shape.seq, d).to(kind), torch.randn(heads, d, half).to(kind)),
            (torch.randn(heads, shape.seq, half).to(kind), torch.randn(heads, half, d).to(kind)),
        ]
        self.attention_products = 3 * shape.layers  # once forward, twice backward

    def step(self) -> float:
        for (x, w, dy), count in zip(self.plain, self.count, strict=True):
            for _ in range(count):
                torch.mm(x, w.t())
                torch.mm(dy, w)
                torch.mm(dy.t(), x)
        for _ in range(self.attention_products):
            for a, b in self.scores:
                torch.bmm(a, b)
        return math.nan
