"""The Mamba-2 mixer: projection, short convolution, state-space scan, gated norm, projection.

``s`` tokens, ``b`` sequences, ``h`` hidden size, ``i`` inner width, ``n`` heads of width ``p``
(i = n p), ``g`` groups of heads that share B and C, ``d`` state width; ``x/tp`` this rank's share.
The input projection computes z [i], x [i], B [g d], C [g d] and dt [n], concatenated in this order;
each of them is sharded over tensor-parallel ranks.

Collectives: those of the two linear layers over tp.  With context parallelism, an all-to-all over
cp from tokens to heads before the convolution and one back after the scan, also in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError
from megatron.core.fusions.rms_norm import norm_rows
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel.context_parallel_partition import order_of_gathered
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_init import Init
from megatron.core.ssm.mamba_hybrid_layer_allocation import mixer_problems, mixer_shape
from megatron.core.ssm.recurrent_mixer import CausalConv, RecurrentMixer, causal_conv
from megatron.core.ssm.scan import chunked_scan
from megatron.core.transformer.context_parallel import heads_for_tokens, tokens_for_heads
from megatron.core.transformer.kv_cache import KVCache, State
from megatron.core.transformer.module import WithBias
from megatron.core.transformer.spec_utils import Slot, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import deprecate_inference_params


@dataclass
class MambaMixerSubmodules:
    """Submodules of the mixer."""

    in_proj: Slot | None = None
    out_proj: Slot | None = None


class MambaMixer(RecurrentMixer):
    """Mamba-2 mixer with heads sharded over the tensor-parallel group."""

    @library_call(unused="use_mem_eff_path")
    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaMixerSubmodules,
        d_model: int,
        d_conv: int = 4,
        *,
        expand: int = 2,
        chunk_size: int = 64,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        """Create the parameters.  ``layer_number`` counts from 1; ``expand`` is i / h.

        Raises ConfigError for sizes that do not fit each other or the parallelism.
        """
        super().__init__(config)
        for problem in mixer_problems(config):
            raise ConfigError(problem)
        self.layer_number = layer_number or 1
        self.chunk_size = chunk_size
        self.tp_group = pg_collection.tp
        self.cp_group = pg_collection.cp
        shape = mixer_shape(config, expand, d_conv)
        tp = self.tp_group.size()
        self.head_dim = shape.head_dim
        self.state_dim = shape.state_dim
        self.num_heads = shape.num_heads // tp
        self.num_groups = shape.num_groups // tp
        self.inner = shape.inner // tp
        self.convolved = [n // tp for n in shape.convolved]
        offered = {"tp_group": self.tp_group}
        self.in_proj = build_module(
            submodules.in_proj,
            d_model,
            sum(shape.projected),
            config=config,
            init_method=config.init_method,
            bias=False,
            blocks=shape.projected,
            offered=offered,
        )
        heads = (shape.num_heads,)
        self.conv1d = CausalConv(self, shape.convolved, d_conv)
        self.A_log = self.sharded(heads, Init("mamba_decay"))
        self.D = self.sharded(heads, Init("ones"))
        self.dt_bias = self.sharded(heads, Init("mamba_step"))
        self.norm = GatedNorm(
            self.sharded((shape.inner,), Init("ones")), self.num_groups, config.layernorm_epsilon
        )
        self.out_proj: Callable[[Tensor], WithBias] = build_module(
            submodules.out_proj,
            shape.inner,
            d_model,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            offered=offered,
        )

    def forward(
        self,
        hidden_states: Tensor,
        inference_context: KVCache | None = None,
        *,
        inference_params: KVCache | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> WithBias:
        """Mix tokens: [s, b, h] -> [s, b, h], and None, since no bias is left to add.

        Collective over tp and cp.
        """
        cache = deprecate_inference_params(inference_context, inference_params)
        mixed, _ = self.in_proj(hidden_states)
        z, xbc, dt = mixed.split([self.inner, sum(self.convolved), self.num_heads], -1)
        lengths, sequence = self.sequences(len(mixed), packed_seq_params)
        if self.cp_group.size() == 1:
            y = self.scan((xbc, dt), sequence, cache)
        else:
            ranks = tuple(range(self.cp_group.size()))
            order, undo = order_of_gathered(lengths, ranks, len(ranks), mixed.device)
            # From local tokens of all heads to all tokens of this rank's heads and groups.
            parts = *self._by_heads(xbc, -1), dt.unsqueeze(-1)
            *whole, dt = heads_for_tokens(parts, order, self.cp_group)
            xbc = torch.cat([part.flatten(2) for part in whole], -1)
            y, _ = self._scan((xbc, dt.squeeze(-1)), sequence)
            y = tokens_for_heads(y, undo, self.cp_group)
        return self.out_proj(self.norm(y, z))

    def _scan(
        self, rows: State, sequence: Tensor | None, past: State | None = None
    ) -> tuple[Tensor, State]:
        """Convolve and scan, for this rank's heads, x, B and C concatenated and dt [s, b, n]."""
        xbc, dt = rows
        before, state = past or (None, None)
        assert self.conv1d.bias is not None, "a Mamba mixer's convolution has a bias"
        weight, bias = map(self._own_channels, (self.conv1d.weight, self.conv1d.bias))
        xbc, before = causal_conv(xbc, weight, bias, before=before, sequence=sequence)
        wide = torch.promote_types(dt.dtype, torch.float32)
        rates, skip, offset = (
            p.chunk(self.cp_group.size())[self.cp_group.rank()].to(wide)
            for p in (self.A_log, self.D, self.dt_bias)
        )
        heads = dt.shape[-1]
        groups = (xbc.shape[-1] - heads * self.head_dim) // (2 * self.state_dim)
        x, *both = xbc.split([heads * self.head_dim, *[groups * self.state_dim] * 2], -1)
        B, C = (m.unflatten(-1, (groups, self.state_dim)) for m in both)
        y, state = chunked_scan(
            x.unflatten(-1, (heads, self.head_dim)),
            F.softplus(dt.to(wide) + offset),
            -torch.exp(rates),
            B,
            C,
            D=skip,
            state=state,
            sequence=sequence,
            chunk_size=self.chunk_size,
        )
        return y.flatten(2), (before, state)

    # ---- the heads of a context-parallel rank ----------------------------------------------

    def _own_channels(self, param: Tensor) -> Tensor:
        """Return this cp rank's channels (of its heads and groups) of a parameter of x, B and C."""
        size = self.cp_group.size()
        rank = self.cp_group.rank()
        if size == 1:
            return param
        parts = self._by_heads(param, 0)
        return torch.cat([part.chunk(size)[rank].flatten(0, 1) for part in parts])

    def _by_heads(self, mixed: Tensor, dim: int) -> list[Tensor]:
        """Split dimension ``dim`` into x by heads, B and C by groups.

        With fewer groups than cp ranks, groups are repeated so that they divide evenly.
        """
        x, *both = mixed.split(self.convolved, dim)
        size = self.cp_group.size()
        times = size // gcd(self.num_groups, size)
        groups = (m.unflatten(dim, (self.num_groups, -1)) for m in both)
        at = dim % mixed.dim()
        return [
            x.unflatten(dim, (self.num_heads, -1)),
            *(m.repeat_interleave(times, at) if times > 1 else m for m in groups),
        ]


class GatedNorm(nn.Module):
    """RMSNorm of y silu(z) over each group separately; ``weight`` [i/tp] covers all groups."""

    def __init__(self, weight: nn.Parameter, num_groups: int, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.num_groups = num_groups
        self.eps = eps

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """Gate and normalize: 2 x [s, b, i/tp] -> [s, b, i/tp]."""
        groups = (y * F.silu(z)).chunk(self.num_groups, -1)
        weights = self.weight.chunk(self.num_groups)
        normed = [norm_rows(x, w, None, self.eps) for x, w in zip(groups, weights, strict=True)]
        return normed[0] if len(normed) == 1 else torch.cat(normed, -1)
