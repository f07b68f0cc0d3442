"""The local experts of a rank: each is an MLP on the rows of its tokens.

``m`` rows of width ``h``, sorted by expert.  Under expert tensor parallelism the inner width is
sharded over expt_tp and each rank computes a partial sum, which the dispatcher reduces; only the
first rank adds the second bias, so that it counts once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.dist_checkpointing.mapping import (
    ShardedStateDict,
    add_prefix_for_sharding,
    replace_prefix_for_sharding,
)
from megatron.core.dist_checkpointing.module_state import sharded_state_dict_default
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import info_of, set_info
from megatron.core.params.param_init import Init
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from megatron.core.tensor_parallel.linear import LinearCall, linear
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
from megatron.core.transformer.spec_utils import build_module, get_module
from megatron.core.transformer.transformer_config import TransformerConfig

_MATRICES = ("linear_fc1", "linear_fc2")


class Expert(MLP):
    """An MLP whose output is multiplied by the router's weight of each token."""

    def forward(self, rows: Tensor, weights: Tensor) -> WithBias:  # type: ignore[override]
        """Compute rows [m, h], weighted by ``weights`` [m], -> [m, h], and None (no bias left)."""
        inner, _ = self.linear_fc1(rows)
        return self.biased(*self.narrow(inner, weights, self.linear_fc2), weights), None

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
        self.numbers = local_experts
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
        engine = getattr(self._in_order[0].linear_fc1, "engine", None)
        if config.moe_grouped_gemm and engine is not None:
            for name, own in self._matrices().items():
                self._products[name] = own[0].product_of_all(own)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Return the entries of `ShardedModule`; see `_place_of_expert`."""
        entries: ShardedStateDict = {}
        names = {expert: name for name, expert in self.local_experts.named_children()}
        for number, expert in zip(self.numbers, self._in_order, strict=True):
            offsets, part = _place_of_expert(self.config, number, sharded_offsets, metadata)
            name = f"{prefix}local_experts.{names[expert]}."
            mine = sharded_state_dict_default(expert, name, offsets, metadata)
            replace_prefix_for_sharding(mine, name, f"{prefix}experts.{part}")
            entries |= mine
        return entries

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

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Sequence[int] | Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """Run all experts: rows [m, h], the rows per expert and their weights [m] -> [m, h].

        None stands for the unadded bias.  An expert without tokens runs on zero rows, so that its
        parameters get gradients of zero.
        """
        rows, weights = permuted_local_hidden_states, permuted_probs
        counts = host_counts(tokens_per_expert)
        if self._products or self._multiplies_together(rows.device):
            first, groups = self._in_order[0], RowGroups.on(rows.device, counts)
            inner, bias = self._grouped(rows, groups, "linear_fc1")
            inner = inner if bias is None else inner + bias
            narrow = first.narrow(inner, weights, lambda x: self._grouped(x, groups, "linear_fc2"))
            return first.biased(*narrow, weights), None
        sizes = list(counts)
        parts = zip(self._in_order, rows.split(sizes), weights.split(sizes), strict=True)
        results = [expert(mine, weight) for expert, mine, weight in parts]
        # A bias is left by experts of projects only.
        return torch.cat([y if bias is None else y + bias for y, bias in results]), None

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
        biases = [linear.bias for linear in linears]
        if name not in self._products:
            return result, bias_of_rows(len(rows), groups, biases)
        return result, _repeated(biases, groups.counts)


def _place_of_expert(
    config: TransformerConfig, number: int, sharded_offsets: Any, metadata: Any
) -> tuple[Any, str]:
    """Return the offsets of an expert's tensors, and the part of its number in their keys.

    Tensors of all experts are stacked, unless metadata asks for ``singleton_local_shards``.
    """
    if (metadata or {}).get("singleton_local_shards"):
        return sharded_offsets, f"{number}."
    place = len(sharded_offsets), number, config.num_moe_experts
    return (*sharded_offsets, place), ""


def _repeated(biases: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Return each row's bias: [m, o]."""
    return torch.cat([b.expand(n, -1) for b, n in zip(biases, counts, strict=True)])


def host_counts(tokens_per_expert: Sequence[int] | Tensor) -> Sequence[int]:
    """Return the rows per expert as a sequence; the host waits for a tensor."""
    counts = tokens_per_expert
    return counts.tolist() if isinstance(counts, Tensor) else counts


class SequentialMLP(Experts):
    """Experts that are numbered from 0 on each rank, as Megatron Core names them."""

    @library_call("num_local_experts config submodules model_comm_pgs")
    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        first = pg_collection.ep.rank() * num_local_experts
        numbers = range(first, first + num_local_experts)
        super().__init__(config, submodules, numbers, pg_collection=pg_collection)
        self.num_local_experts = num_local_experts
        self.local_experts: Any = nn.ModuleList(self._in_order)

    def global_name(self, name: str) -> str:
        """Return the name of a parameter in every layout; see `name_parameters`."""
        _, number, own = name.split(".", 2)
        return f"local_experts.{self.numbers[int(number)]}.{own}"


class TEGroupedLinear(nn.Module):
    """One linear layer per expert: ``weight0`` [o, i], ``weight1``, ... and ``bias0``, ...

    Our code computes it; class and parameters have the names by which converters know them.
    ``parallel_mode`` "column" shards o over ``tp_group``, "row" shards i, None nothing.  The layer
    does not communicate.  ``skip_bias_add`` returns each row's bias instead of adding it.
    """

    parallel_mode: str | None = None

    @library_call(unused="tp_comm_buffer_name")
    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str | None = None,
        config: TransformerConfig,
        init_method: Init,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool = False,
        blocks: tuple[int, ...] = (1,),
        tp_group: ProcessGroup,
    ) -> None:
        super().__init__()
        if config.is_quantized:
            raise ConfigError(
                f"--{config.format_flag}: a grouped linear layer computes in 16 bits; build the "
                "model with moe_grouped_gemm=False"
            )
        self.config = config
        self.parallel_mode = mode = self.parallel_mode or parallel_mode
        self.num_gemms = num_gemms
        self.in_features = input_size
        self.out_features = output_size
        self.use_bias = bias
        self.skip_bias_add = skip_bias_add
        self.is_expert = is_expert
        self.first_expert = 0  # its number in the model; `TEGroupedMLP` sets it
        kinds = {"column": ColumnParallelLinear, "row": RowParallelLinear, None: ReplicatedLinear}
        # In reverse as in `Experts`.
        for number in reversed(range(num_gemms)):
            one = build_module(
                kinds[mode],
                input_size,
                output_size,
                config=config,
                init_method=init_method,
                bias=bias,
                offered={"tp_group": tp_group, "is_expert": is_expert, "blocks": blocks},
            )
            for name, param in one.named_parameters():
                set_info(param, replace(info_of(param), is_expert=is_expert))
                self.register_parameter(f"{name}{number}", param)
        self._unsupported = unsupported_reason(self._each("weight"))
        if self._unsupported is None and device.is_cuda():
            share_storage(self._each("weight"))

    def _each(self, name: str) -> list[Any]:
        return [getattr(self, f"{name}{number}") for number in range(self.num_gemms)]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Return the entries of `ShardedModule`; see `_place_of_expert`."""
        return self._sharded_state_dict_grouped(None, prefix, sharded_offsets, metadata)

    def _sharded_state_dict_grouped(
        self, tp_axis_map: None, prefix: str, sharded_offsets: Any, metadata: Any
    ) -> ShardedStateDict:
        """Do the same, for projects that replace `sharded_state_dict`."""
        entries: ShardedStateDict = {}
        for i in range(self.num_gemms):
            number = self.first_expert + i
            offsets, part = _place_of_expert(self.config, number, sharded_offsets, metadata)
            one = nn.Module()
            for name in ("weight", "bias") if self.use_bias else ("weight",):
                one.register_parameter(name, getattr(self, f"{name}{i}"))
            mine = sharded_state_dict_default(one, "", offsets, metadata)
            add_prefix_for_sharding(mine, part + prefix)
            entries |= {f"{prefix}{name}{i}": entry for name, entry in mine.items()}
        return entries

    def forward(self, x: Tensor, m_splits: Sequence[int] | Tensor) -> WithBias:
        """Multiply rows [m, i], sorted by expert, with ``m_splits`` rows per expert -> [m, o]."""
        counts = list(host_counts(m_splits))
        weights = self._each("weight")
        if self._unsupported is None and device.is_cuda(x.device):
            y = grouped_linear(x, RowGroups.on(x.device, counts), weights)
        else:
            each = zip(x.split(counts), weights, strict=True)
            y = torch.cat([linear(rows, LinearCall(weight)) for rows, weight in each])
        if not self.use_bias:
            return y, None
        bias = _repeated(self._each("bias"), counts)
        return (y, bias) if self.skip_bias_add else (y + bias, None)


class TEColumnParallelGroupedLinear(TEGroupedLinear):
    """`TEGroupedLinear` whose outputs are sharded."""

    parallel_mode = "column"


class TERowParallelGroupedLinear(TEGroupedLinear):
    """`TEGroupedLinear` whose inputs are sharded."""

    parallel_mode = "row"


class TEGroupedMLP(Expert):
    """The experts of a rank in two modules, one for each matrix, as Megatron Core names them.

    ``linear_fc1.weight3`` is the first matrix of this rank's fourth expert.
    """

    @library_call("num_local_experts config submodules model_comm_pgs")
    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        slots = vars(submodules).values()
        super().__init__(
            config,
            MLPSubmodules(*(partial(get_module(slot), num_local_experts) for slot in slots)),
            tp_group=pg_collection.expt_tp,
            is_expert=True,
            ffn_hidden_size=config.moe_ffn_hidden_size,
        )
        self.num_local_experts = num_local_experts
        self.first_expert = pg_collection.ep.rank() * num_local_experts
        layers: Any = self.children()
        for layer in layers:
            layer.first_expert = self.first_expert

    def forward(  # type: ignore[override]
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Sequence[int] | Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """Run all experts; see `Experts.forward`."""
        counts = list(host_counts(tokens_per_expert))
        second: Any = self.linear_fc2
        inner, _ = self.linear_fc1(permuted_local_hidden_states, counts)
        narrow = self.narrow(inner, permuted_probs, lambda x: second(x, counts))
        return self.biased(*narrow, permuted_probs), None

    def global_name(self, name: str) -> str:
        """Return the name of a parameter in every layout; see `name_parameters`."""
        found = re.fullmatch(r"(linear_fc\d)\.(weight|bias)(\d+)", name)
        if found is None:
            return name
        return f"local_experts.{self.first_expert + int(found[3])}.{found[1]}.{found[2]}"

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Return the entries of the layers, or of modules around them, with keys of `Experts`."""
        entries = super().sharded_state_dict("", sharded_offsets, metadata)
        add_prefix_for_sharding(entries, f"{prefix}experts.")
        return {prefix + name: entry for name, entry in entries.items()}
