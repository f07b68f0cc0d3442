"""The local experts of a rank: each is an MLP on the rows of its tokens.

``m`` rows of width ``h``, sorted by expert.  Under expert tensor parallelism the inner width is
sharded over expt_tp and each rank computes a partial sum, which the dispatcher reduces; only the
first rank adds the second bias, so that it counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import device
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule, WithBias
from megatron.core.transformer.moe.grouped_linear import (
    RowGroups,
    bias_of_rows,
    grouped_linear,
    share_storage,
    unsupported_reason,
)
from megatron.core.transformer.moe.grouped_quantized_linear import GroupQuantizer
from megatron.core.transformer.transformer_config import TransformerConfig

_MATRICES = ("linear_fc1", "linear_fc2")


class Expert(MLP):
    """An MLP whose output is multiplied by the router's weight of each token."""

    def forward(self, rows: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        """Compute rows [m, h], weighted by ``weights`` [m], -> [m, h]."""
        inner, _ = self.linear_fc1(rows)
        return self.biased(*self.narrow(inner, weights, self.linear_fc2), weights)

    def biased(self, result: Tensor, bias: Tensor | None, weights: Tensor) -> Tensor:
        """Add the weighted bias once per group: [m, h], [h] or [m, h], [m] -> [m, h]."""
        if bias is None:
            return result
        if self.tp_group.rank() == 0:
            return result + bias * weights.unsqueeze(-1).to(bias.dtype)
        # The value added is 0, but its gradient is that of the first rank: the copies of the bias
        # on all ranks must receive the same gradient to stay equal.
        term = bias * weights.detach().unsqueeze(-1).to(bias.dtype)
        return result + (term - term.detach())

    def narrow(
        self, inner: Tensor, weights: Tensor, linear: Callable[[Tensor], WithBias]
    ) -> WithBias:
        """Apply activation and router weights, then ``linear``, the second layer of one or all."""
        recomputes = self.training and "moe_act" in self.config.modules_to_recompute
        memory = CheckpointWithoutOutput() if recomputes else None
        # Weighing before the second matrix gives the same result, since the matrix is linear, and
        # lets the activation kernel do it.
        weigh = self.activate if memory is None else partial(memory.checkpoint, self.activate)
        result, bias = linear(weigh(inner, weights))
        if memory is not None:
            memory.discard_output_and_register_recompute(result)
        return result, bias


class Experts(MegatronModule):
    """The local experts.  Their names are global expert numbers, the same in every layout."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        local_experts: Sequence[int],
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config)
        # Registered in reverse: buffers lay parameters out in reverse order, so that the weights of
        # consecutive experts are contiguous there, as a grouped GEMM requires.
        self.local_experts = nn.ModuleDict(
            {
                str(number): Expert(
                    config,
                    submodules,
                    tp_group=pg_collection.expt_tp,
                    is_expert=True,
                    ffn_hidden_size=config.moe_ffn_hidden_size,
                )
                for number in reversed(local_experts)
            }
        )
        experts = [self.local_experts[str(number)] for number in local_experts]
        self._in_order = [expert for expert in experts if isinstance(expert, Expert)]
        # Why the 16-bit kernel cannot compute all experts; None if it can.
        self._unsupported = self._unsupported_reason()
        if self._unsupported is None and device.is_cuda():
            for linears in self._matrices().values():
                share_storage([linear.weight for linear in linears])
        self._quantizers: dict[str, GroupQuantizer] = {}  # of fp8 experts that are grouped
        # Grouped GEMMs of an external package (Transformer Engine), by the name of the matrix.
        self._products: dict[str, Callable[[Tensor, Sequence[int]], Tensor]] = {}
        if config.moe_grouped_gemm and hasattr(self._in_order[0].linear_fc1, "product_of_all"):
            for name, own in self._matrices().items():
                self._products[name] = own[0].product_of_all(own)

    def _linears(self, name: str) -> list[Any]:
        return [getattr(expert, name) for expert in self._in_order]

    def _matrices(self) -> dict[str, list[Any]]:
        return {name: self._linears(name) for name in _MATRICES}

    def _unsupported_reason(self) -> str | None:
        for linears in self._matrices().values():
            # A layer of another class, such as Transformer Engine's, computes its GEMM itself.
            if type(linears[0]) not in (ColumnParallelLinear, RowParallelLinear):
                return f"a {type(linears[0]).__name__} computes its own GEMM"
            if reason := unsupported_reason([linear.weight for linear in linears]):
                return reason
        return None

    def takes_tail(self, where: torch.device) -> bool:
        """Return whether rows after those of the last expert are allowed; see `grouped_linear`."""
        return self._multiplies_together(where) and not self._has_adapters()

    def wait_reason(self, where: torch.device) -> str | None:
        """Return why the host waits for the row counts of experts on the GPU ``where``.

        None if it does not.  Call it once the layers are quantized and have their adapters.
        """
        if self._products:
            return "Transformer Engine's grouped GEMM reads them on the host"
        if reason := self._loop_reason(where):
            return f"a loop computes them ({reason})"
        return "a loop computes their adapters" if self._has_adapters() else None

    def _has_adapters(self) -> bool:
        return any(getattr(self._in_order[0], name).lora is not None for name in _MATRICES)

    def _loop_reason(self, where: torch.device) -> str | None:
        """Return why a loop computes the experts; None if `_multiplies_together`."""
        if self._unsupported is not None:
            return self._unsupported
        matrices = [*self._matrices().values()]
        if all(linears[0].quantizer is None for linears in matrices):
            return None
        reasons = [GroupQuantizer.unsupported_reason(linears, where) for linears in matrices]
        return next(filter(None, reasons), None)

    def _multiplies_together(self, where: torch.device) -> bool:
        """Return whether `grouped_linear` computes all experts, with or without a flag.

        A loop over experts on a GPU needs their row counts on the host, which waits for them.
        """
        if self._quantizers:
            return True
        if not device.is_cuda(where) or self._loop_reason(where) is not None:
            return False
        if self._in_order[0].linear_fc1.quantizer is not None:
            self._quantizers = {n: GroupQuantizer(own) for n, own in self._matrices().items()}
        return True

    def forward(self, rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
        """Run all experts: rows [m, h], their weights [m] and the rows per expert -> [m, h].

        An expert without tokens runs on zero rows, so that its parameters get gradients of zero.
        """
        if self._products or self._multiplies_together(rows.device):
            first, groups = self._in_order[0], RowGroups.on(rows.device, counts)
            inner, bias = self._grouped(rows, groups, "linear_fc1")
            inner = inner if bias is None else inner + bias
            narrow = first.narrow(inner, weights, lambda x: self._grouped(x, groups, "linear_fc2"))
            return first.biased(*narrow, weights)
        sizes = list(counts)
        parts = zip(self._in_order, rows.split(sizes), weights.split(sizes), strict=True)
        return torch.cat([expert(mine, weight) for expert, mine, weight in parts])

    def _grouped(self, rows: Tensor, groups: RowGroups, name: str) -> WithBias:
        """Multiply rows by their experts' weights ``name``; also return each row's bias."""
        linears = self._linears(name)
        if name in self._products:
            result = self._products[name](rows, list(groups.counts))
        else:
            weights = [linear.weight for linear in linears]
            result = grouped_linear(rows, groups, weights, self._quantizers.get(name))
        if linears[0].lora is not None:
            each = zip(linears, rows.split(list(groups.counts)), strict=True)
            result = result + torch.cat([linear.lora(mine) for linear, mine in each])
        if not self.config.add_bias_linear:
            return result, None
        if name not in self._products:
            return result, bias_of_rows(len(rows), groups, [linear.bias for linear in linears])
        sized = zip(linears, groups.counts, strict=True)
        return result, torch.cat([linear.bias.expand(count, -1) for linear, count in sized])
