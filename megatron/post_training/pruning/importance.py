"""Importance of the parts of a model, measured on the activations of calibration samples.

The criteria are Minitron's (arXiv 2407.14679).  For each token: a channel of the hidden
states has the absolute value that norms give it, summed over all norms; an MLP neuron its absolute
activation; an attention head the norm of its output; an expert its routing weight; a layer 1 - the
cosine of its input and output.  All are sums over the tokens of all ranks, so they do not depend on
the layout.

Order of collectives in `Importance.gather`: for each score of this rank an all-gather or an
all-reduce over tp and an all-reduce over dp_cp, then a gather and a broadcast over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel.collectives import broadcast_json, gather_json
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_gather_first_dim, all_reduce
from megatron.core.transformer.moe.routing import RoutingResult
from megatron.core.transformer.norms import summed

HIDDEN = "hidden"
# Name of a part of layer N -> key of its scores: the layer itself, heads, neurons, experts.
LAYER = "layer"
HEADS = "heads"
FFN = "ffn"
EXPERTS = "experts"
Scores = dict[str, list[float]]


def key(layer: int, part: str) -> str:
    """Return the key of the scores of ``part`` in layer ``layer``."""
    return f"layers.{layer}.{part}"


class Importance:
    """Hooks that add up scores while the model runs forward; `gather` returns them."""

    def __init__(self, models: Iterable[GPTModel], groups: ProcessGroupCollection) -> None:
        self.groups = groups
        self._sums: dict[str, Tensor] = {}
        self._sharded: set[str] = set()  # over tp: scores of this rank's heads and neurons
        self.sequence_parallel = False
        for model in models:
            decoder = model.decoder
            self.sequence_parallel = model.config.sequence_parallel
            if decoder.final_layernorm is not None:
                self._after(decoder.final_layernorm, self._add_channels)
            for index, layer in zip(decoder.layer_range, decoder.layers, strict=True):
                self._hook_layer(index, layer)

    def gather(self) -> Scores:
        """Return the scores of the complete model, on every rank.  Collective over all ranks."""
        tp = self.groups.tp
        world = self.groups.world
        mine: Scores = {}
        for name, total in self._sums.items():
            if name in self._sharded:
                total = all_gather_first_dim(total, tp)
            elif self.sequence_parallel:  # each rank has the sums over its part of the sequence
                total = all_reduce(total, tp)
            total = all_reduce(total, self.groups.dp_cp)
            mine[name] = total.tolist()
        is_first = tp.rank() == 0 and self.groups.dp_cp.rank() == 0
        merged: Scores = {}
        for part in gather_json(mine if is_first else {}, world) or []:
            for name, values in part.items():  # only hidden channels have parts on several stages
                before = merged.get(name, [0.0] * len(values))
                merged[name] = [a + b for a, b in zip(before, values, strict=True)]
        return broadcast_json(merged, world)

    def _hook_layer(self, index: int, layer: nn.Module) -> None:
        def add_layer(inputs: Any, output: Any) -> None:
            x = summed(inputs[0]).float()
            y = output[0].float()
            distance = (1 - F.cosine_similarity(x, y, dim=-1)).sum()
            self._add(key(index, LAYER), distance.reshape(1))

        def add_experts(_inputs: Any, output: RoutingResult) -> None:
            total = output.weights.new_zeros(output.num_experts + 1, dtype=torch.float64)
            total.index_add_(0, output.experts.flatten(), output.weights.flatten().double())
            self._add(key(index, EXPERTS), total[:-1])

        self._after(layer, add_layer)
        for name, module in layer.named_modules():
            if name in ("input_layernorm", "pre_mlp_layernorm"):
                self._after(module, self._add_channels)
            elif name == "self_attention.linear_proj":
                self._before(module, key(index, HEADS), partial(_norms_of_heads, layer.config))
            elif name == "mlp.linear_fc2":
                self._before(module, key(index, FFN), _absolute)
            elif name == "mlp.router":
                self._after(module, add_experts)

    def _add_channels(self, _inputs: Any, output: Any) -> None:
        self._add(HIDDEN, _absolute(output[1] if isinstance(output, tuple) else output))

    def _after(self, module: nn.Module, add: Callable[[Any, Any], None]) -> None:
        module.register_forward_hook(lambda _m, x, y: add(x, y))

    def _before(self, module: nn.Module, name: str, score: Callable[[Tensor], Tensor]) -> None:
        """Add the scores of the input of ``module``, which is sharded over tp."""
        self._sharded.add(name)
        module.register_forward_pre_hook(lambda _m, x: self._add(name, score(x[0])))

    def _add(self, name: str, values: Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0) + values.double()


def _absolute(x: Tensor) -> Tensor:
    """Return the sum over tokens of the absolute values: [s, b, c] -> [c]."""
    return x.float().abs().flatten(0, -2).sum(0, dtype=torch.float64)


def _norms_of_heads(config: Any, x: Tensor) -> Tensor:
    """Return the sum over tokens of the norm of each head's output: [s, b, n d] -> [n]."""
    norms: Tensor = x.float().unflatten(-1, (-1, config.kv_channels)).norm(dim=-1)
    return norms.flatten(0, -2).sum(0, dtype=torch.float64)
