"""The experts of a rank: each an MLP on the rows of its tokens.

``m`` rows of width ``h``, those of an expert behind each other.  Under expert tensor parallelism
the inner width is divided over expt_tp and a result is this rank's term of a sum, which the
dispatcher adds up; the first rank's has the second bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import device
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.grouped_linear import can_group, grouped_linear
from megatron.core.transformer.transformer_config import TransformerConfig


class Expert(MLP):
    """An MLP that weighs its tokens."""

    def forward(self, rows: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        """[m, h] and [m] -> [m, h]"""
        inner, _ = self.linear_fc1(rows)
        return self.biased(*self.narrow(inner, weights, self.linear_fc2), weights)

    def biased(self, result: Tensor, bias: Tensor | None, weights: Tensor) -> Tensor:
        """[m, h], [h] or [m, h], [m] -> [m, h], once among the ranks whose terms are summed."""
        if bias is None:
            return result
        if self.tp_group.rank() == 0:
            return result + bias * weights.unsqueeze(-1).to(bias.dtype)
        # Here it counts 0, yet the copy of the bias needs the gradient that the first rank's has.
        term = bias * weights.detach().unsqueeze(-1).to(bias.dtype)
        return result + (term - term.detach())

    def narrow(
        self, inner: Tensor, weights: Tensor, linear: Callable[[Tensor], tuple[Tensor, Any]]
    ) -> tuple[Tensor, Any]:
        """Activate, weigh and go through ``linear``, the second matrix of one expert or of all."""
        recomputes = self.training and "moe_act" in self.config.modules_to_recompute
        memory = CheckpointWithoutOutput() if recomputes else None
        weigh = self._activated if memory is None else partial(memory.checkpoint, self._activated)
        result, bias = linear(weigh(inner, weights))
        if memory is not None:
            memory.discard_output_and_register_recompute(result)
        return result, bias

    def _activated(self, inner: Tensor, weights: Tensor) -> Tensor:
        """Weighed before the second matrix, which is linear."""
        return self.activate(inner) * weights.unsqueeze(-1).to(inner.dtype)


class Experts(MegatronModule):
    """Experts by their numbers in the whole layer, so that names do not depend on the layout."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        local_experts: Sequence[int],
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config)
        self.local_experts = nn.ModuleDict(
            {
                str(number): Expert(
                    config,
                    submodules,
                    tp_group=pg_collection.expt_tp,
                    is_expert=True,
                    ffn_hidden_size=config.moe_ffn_hidden_size,
                )
                for number in local_experts
            }
        )

    def forward(self, rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
        """[m, h], [m] and rows per expert -> [m, h].  An expert without tokens computes on none."""
        if self._are_grouped(rows):
            first: Any = next(iter(self.local_experts.values()))
            inner, bias = self._grouped(rows, counts, "linear_fc1")
            inner = inner if bias is None else inner + bias
            narrow = first.narrow(inner, weights, lambda x: self._grouped(x, counts, "linear_fc2"))
            return first.biased(*narrow, weights)
        parts = zip(
            self.local_experts.values(), rows.split(counts), weights.split(counts), strict=True
        )
        return torch.cat([expert(mine, weight) for expert, mine, weight in parts])

    def _grouped(
        self, rows: Tensor, counts: Sequence[int], name: str
    ) -> tuple[Tensor, Tensor | None]:
        """Rows times the matrix ``name`` of their experts, and what bias each is still to get."""
        linears: list[Any] = [getattr(expert, name) for expert in self.local_experts.values()]
        result = grouped_linear(rows, counts, [linear.weight for linear in linears])
        if not self.config.add_bias_linear:
            return result, None
        biases = [linear.bias.expand(n, -1) for linear, n in zip(linears, counts, strict=True)]
        return result, torch.cat(biases)

    def _are_grouped(self, rows: Tensor) -> bool:
        """Whether --moe-grouped-gemm has something to act on: a GPU, sizes its kernel takes."""
        if not self.config.moe_grouped_gemm:
            return False
        weights = [expert.linear_fc1.weight for expert in self.local_experts.values()]
        return device.is_cuda(rows.device) and can_group(weights)
