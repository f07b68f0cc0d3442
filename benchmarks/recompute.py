"""Measure what each kind of recomputation saves for backward, and what it computes again.

    python -m benchmarks.recompute [--rounds 5]

Runs the layers of a model in bfloat16 without embedding and loss.  Saved bytes are those of all
storages that autograd holds when the forward pass ends, without parameters.  Matrix FLOPs are
counted by torch over forward and backward.  Time is the median CPU time of one thread; contenders
alternate.  The rows of tensor parallelism run the first rank of two, without a partner, which
changes no size.  Dated results are in docs/recompute.md.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.weight_gradient import medians
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.tensor_parallel.random import model_parallel_seed
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig

_TOKENS, _WIDTH, _LAYERS = 1024, 512, 4
_COMMON: dict[str, Any] = {
    "num_layers": _LAYERS,
    "hidden_size": _WIDTH,
    "num_attention_heads": 8,
    "params_dtype": torch.bfloat16,
    "bf16": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "GPT-2 shape, plain attention, dropout 0.1": {
        "attention_backend": AttnBackend.unfused,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "bias_activation_fusion": True,
    },
    "Llama shape, attention kernel": {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "ffn_hidden_size": 1408,
        "num_query_groups": 2,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
}
_SELECTIVE: list[tuple[str, ...]] = [
    ("core_attn",),
    ("layernorm",),
    ("mlp",),
    ("layernorm", "mlp"),
    ("core_attn", "layernorm", "mlp"),
]
_FULL = [("block", _LAYERS // 2), ("uniform", 1), ("uniform", _LAYERS)]


def kinds() -> dict[str, dict[str, Any]]:
    """Return description of the flags -> config changes."""
    found: dict[str, dict[str, Any]] = {"none": {}}
    for modules in _SELECTIVE:
        changes = {"recompute_granularity": "selective", "recompute_modules": modules}
        found[f"selective, {' '.join(modules)}"] = changes
    for method, layers in _FULL:
        found[f"full, {method} {layers}"] = {
            "recompute_granularity": "full",
            "recompute_method": method,
            "recompute_num_layers": layers,
        }
    return found


def formula(config: TransformerConfig) -> float:
    """Return the bytes that a layer saves for backward (extends arXiv 2205.05198).

    Per token: inputs and outputs of two norms; queries, keys and values; input of the output
    projection; attention scores unless a fused kernel omits them; input and output of the
    activation in the MLP (the former twice as wide if gated); two dropout masks.
    """
    h, f, tp = config.hidden_size, config.ffn_hidden_size, config.tensor_model_parallel_size
    modules = config.modules_to_recompute
    cut = tp if config.sequence_parallel else 1
    if config.recompute_granularity == "full":
        layers = config.recompute_num_layers
        held = 2 * h / (tp if config.distribute_saved_activations else cut)
        if config.recompute_method == "uniform":
            return _TOKENS * held / layers
        rest = replace(config, recompute_granularity=None)
        return (layers * _TOKENS * held + (_LAYERS - layers) * formula(rest)) / _LAYERS
    keys = h * config.num_query_groups / config.num_attention_heads
    per_token = 2 * 2 * h / cut
    per_token += 0 if "layernorm" in modules else 2 * 2 * h / cut
    per_token += (2 * (h + 2 * keys) + 2 * h) / tp
    if config.attention_backend is AttnBackend.unfused and "core_attn" not in modules:
        per_token += 5 * config.num_attention_heads * _TOKENS / tp
    if "mlp" not in modules:
        per_token += 2 * f * (3 if config.gated_linear_unit else 2) / tp
    return _TOKENS * (per_token + (2 * h / cut if config.hidden_dropout else 0))


class Layers:
    """Decoder of one config on the first tensor-parallel rank."""

    def __init__(self, config: TransformerConfig) -> None:
        config = replace(config)
        self.formula = formula(config)
        groups = create_process_groups(
            *make_grids(dist.get_world_size(), tp=config.tensor_model_parallel_size)
        )
        spec = get_gpt_layer_local_spec(config=config)
        self.block = TransformerBlock(config, spec, post_layer_norm=False, pg_collection=groups)
        for param in self.block.parameters():
            torch.nn.init.normal_(param, std=0.02)
        tokens = _TOKENS // (config.tensor_model_parallel_size if config.sequence_parallel else 1)
        self.x = torch.randn(tokens, 1, _WIDTH).to(config.params_dtype).requires_grad_()

    def forward_backward(self) -> None:
        self.block(self.x).sum().backward()

    def kept(self) -> int:
        """Return the bytes that the forward pass saves for the backward pass."""
        own = {p.untyped_storage().data_ptr() for p in self.block.parameters()}
        held: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x) or x, lambda x: x):
            out = self.block(self.x)
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
        del out
        return sum(size for start, size in storages.items() if start not in own)

    def flops(self) -> int:
        """Return the matrix FLOPs of forward and backward."""
        with FlopCounterMode(display=False) as counter:
            self.forward_backward()
        return counter.get_total_flops()


def report(contenders: dict[str, Layers], rounds: int) -> None:
    """Print one row for each config, with ratios to the first."""
    print("| recomputation | kept MiB a layer | by formula | kept | FLOPs | time |")
    print("|---|---|---|---|---|---|")
    times = medians({name: c.forward_backward for name, c in contenders.items()}, rounds)
    numbers = {name: (c.kept(), c.flops(), times[name]) for name, c in contenders.items()}
    first = next(iter(numbers.values()))
    for name, row in numbers.items():
        ratios = " | ".join(f"{a / b:.2f}" for a, b in zip(row, first, strict=True))
        expected = contenders[name].formula / 2**20
        print(f"| {name} | {row[0] / _LAYERS / 2**20:.2f} | {expected:.2f} | {ratios} |")


def main() -> None:
    """Print the tables of docs/recompute.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    model_parallel_seed(1, tp_rank=0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    for title, shape in SHAPES.items():
        print(f"\n{title}:\n")
        config = TransformerConfig(**_COMMON, **shape)
        report({name: Layers(replace(config, **kind)) for name, kind in kinds().items()}, rounds)
    print("\nLlama shape, the first of two tensor-parallel ranks:\n")
    config = replace(config, tensor_model_parallel_size=2)
    uniform = kinds()["full, uniform 1"]
    cases = {
        "none": {},
        "none, --sequence-parallel": {"sequence_parallel": True},
        "full, uniform 1": uniform,
        "full, uniform 1 --distribute-saved-activations": {
            **uniform,
            "distribute_saved_activations": True,
        },
        "full, uniform 1 --sequence-parallel": {**uniform, "sequence_parallel": True},
    }
    report({name: Layers(replace(config, **kind)) for name, kind in cases.items()}, rounds)


if __name__ == "__main__":
    main()
