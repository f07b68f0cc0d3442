"""Gated DeltaNet and KDA: linear attention that takes the place of softmax attention in a layer.

Projection, short convolution of queries, keys and values, gated delta rule, gated norm, projection.
``s`` tokens, ``b`` sequences, ``h`` hidden size, ``g`` key heads, ``n`` value heads, a multiple of
g; ``x/tp`` this rank's share.  The input projection computes queries, keys, values, the output gate
z, beta and alpha, concatenated in this order; each of them is sharded over tensor-parallel ranks.
Queries and keys have length 1; a state is multiplied by exp(-exp(A_log) softplus(alpha + dt_bias))
per token and corrected by sigmoid(beta).

In Kimi Delta Attention (KDA) alpha has a value per key channel.  In place of z and alpha the input
projection computes their latent vectors, [s, b, v] and [s, b, k] with the widths of a head, which
are gathered over tp and multiplied by the rows of this rank's heads of `gate_up` and `alpha_up`.

Collectives: those of the two linear layers over tp, and the all-gathers of latent vectors.  With
context parallelism, an all-to-all over cp from tokens to heads before the convolution and one back
after the rule, also in backward; if cp does not divide the key heads of a rank, two all-gathers
instead: the last inputs of the convolution of each chunk of the sequence, and what the chunk does
to a state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError
from megatron.core.fusions.rms_norm import norm_rows
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel.context_parallel_partition import order_of_gathered
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_init import Init, new_parameter, param_info_for
from megatron.core.ssm.gated_delta_rule import gated_delta_rule
from megatron.core.ssm.mamba_hybrid_layer_allocation import delta_net_shape
from megatron.core.ssm.recurrent_mixer import CausalConv, RecurrentMixer, causal_conv
from megatron.core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.context_parallel import heads_for_tokens, tokens_for_heads
from megatron.core.transformer.kv_cache import KVCache, State
from megatron.core.transformer.module import WithBias
from megatron.core.transformer.spec_utils import Slot, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import deprecate_inference_params

_EPSILON = 1e-6  # added to the squared length of queries and keys


@dataclass
class GatedDeltaNetSubmodules:
    """Submodules of the layer."""

    in_proj: Slot | None = None
    out_proj: Slot | None = None


class GatedDeltaNet(RecurrentMixer):
    """Gated DeltaNet, or KDA, with heads sharded over the tensor-parallel group."""

    @library_call()
    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int = 1,
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        """Create the parameters.  ``layer_number`` counts from 1 over the complete model."""
        super().__init__(config)
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        self.cp_group = pg_collection.cp
        shape = delta_net_shape(config)
        tp = self.tp_group.size()
        self.widths = [n // tp for n in shape.projected]
        self.key_width = shape.key_width
        self.value_width = shape.value_width
        self.trades_heads = shape.key_heads // tp % self.cp_group.size() == 0
        self.checkpoint_core_attention = "core_attn" in config.modules_to_recompute
        offered = {"tp_group": self.tp_group}
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            sum(shape.projected),
            config=config,
            init_method=config.init_method,
            bias=False,
            blocks=shape.projected,
            offered=offered,
        )
        heads = (shape.value_heads,)
        self.conv1d = CausalConv(self, shape.convolved, shape.conv_width, bias=False)
        self.A_log = self.sharded(heads, Init("mamba_decay"))
        start = Init("mamba_step") if shape.is_kda else Init("ones")
        self.dt_bias = self.sharded((shape.decays,), start)
        self.is_kda = shape.is_kda
        self.strength = 2 if config.linear_allow_neg_eigval else 1
        if self.is_kda:
            init = config.init_method
            self.gate_up = self.sharded((shape.inner, shape.value_width), init)
            self.alpha_up = self.sharded((shape.decays, shape.key_width), init)
        # Each rank normalizes its own heads only, so the weight's gradient is a partial sum.
        info = param_info_for((shape.value_width,), Init("ones"), sequence_parallel=tp > 1)
        weight = new_parameter(info.global_shape, config.params_dtype, info)
        eps = config.linear_norm_epsilon or config.layernorm_epsilon
        self.out_norm = GatedHeadNorm(weight, eps, torch.sigmoid if self.is_kda else F.silu)
        self.out_proj: Callable[[Tensor], WithBias] = build_module(
            submodules.out_proj,
            shape.inner,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            offered=offered,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: object = None,
        inference_context: KVCache | None = None,
        *,
        inference_params: KVCache | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **of_attention: object,
    ) -> WithBias:
        """Mix tokens: [s, b, h] -> [s, b, h], and None, since no bias is left to add.

        Further arguments of softmax attention, which all layers of a model receive, are ignored.
        Collective over tp and cp.
        """
        cache = deprecate_inference_params(inference_context, inference_params)
        mixed, _ = self.in_proj(hidden_states)
        convolved = self.widths[:3]
        qkv, gate, beta, alpha = mixed.split([sum(convolved), *self.widths[3:]], -1)
        if self.is_kda:
            gate, alpha = (
                F.linear(all_gather_last_dim_from_tensor_parallel_region(x, self.tp_group), up)
                for x, up in ((gate, self.gate_up), (alpha, self.alpha_up))
            )
        rates = beta, alpha
        lengths, sequence = self.sequences(len(mixed), packed_seq_params)
        if self.cp_group.size() == 1:
            y = self.scan((qkv, *rates), sequence, cache)
        elif not self.trades_heads:
            if sequence is not None:
                raise ConfigError(
                    f"--context-parallel-size {self.cp_group.size()} does not divide the key heads "
                    "of linear attention on a rank, as packed sequences need: use a divisor"
                )
            y = self._pass_states((qkv, *rates))
        else:
            ranks = tuple(range(self.cp_group.size()))
            order, undo = order_of_gathered(lengths, ranks, len(ranks), mixed.device)
            # From local tokens of all heads to all tokens of this rank's heads.
            decays = self.key_width if self.is_kda else 1
            widths = self.key_width, self.key_width, self.value_width, 1, decays
            parts = [
                x.unflatten(-1, (-1, width))
                for x, width in zip((*qkv.split(convolved, -1), *rates), widths, strict=True)
            ]
            *whole, beta, alpha = heads_for_tokens(parts, order, self.cp_group)
            qkv = torch.cat([part.flatten(2) for part in whole], -1)
            y = self.scan((qkv, beta.flatten(2), alpha.flatten(2)), sequence, None)
            y = tokens_for_heads(y, undo, self.cp_group)
        return self.out_proj(self.out_norm(y, gate))

    def scan(self, rows: State, sequence: Tensor | None, cache: KVCache | None) -> Tensor:
        """Mix sequences; recompute the convolution and the rule in backward if configured."""
        if not (self.checkpoint_core_attention and self.training and cache is None):
            return super().scan(rows, sequence, cache)

        def core(*rows: Tensor) -> Tensor:
            return self._scan(rows, sequence)[0]

        y: Tensor = checkpoint(core, False, *rows)
        return y

    def _scan(
        self, rows: State, sequence: Tensor | None, past: State | None = None
    ) -> tuple[Tensor, State]:
        """Convolve and mix: queries, keys and values concatenated, beta [s, b, n], and alpha.

        alpha has one value per head, or per channel of a key head.
        """
        before, state = past or (None, None)
        inputs, before = self._inputs(rows, before, sequence)
        y, state = gated_delta_rule(*inputs, state=state, sequence=sequence)
        return y.flatten(2), (before, state)

    def _inputs(
        self, rows: State, before: Tensor | None, sequence: Tensor | None
    ) -> tuple[State, Tensor]:
        """Return the inputs of the rule, and the last ones of the convolution; see `_scan`."""
        qkv, beta, alpha = rows
        qkv, before = causal_conv(qkv, self._own_channels(), None, before=before, sequence=sequence)
        wide = torch.promote_types(alpha.dtype, torch.float32)
        A_log, offset = (x.to(wide) for x in (self.A_log, self.dt_bias))
        if self.trades_heads:
            cp = self.cp_group
            A_log, offset = (x.chunk(cp.size())[cp.rank()] for x in (A_log, offset))
        values = beta.shape[-1] * self.value_width
        keys = (qkv.shape[-1] - values) // 2
        q, k, v = qkv.split([keys, keys, values], -1)
        # Divided by their lengths, queries also by the square root of their width.
        scale = q.new_full((self.key_width,), self.key_width**-0.5, dtype=wide)
        eps = _EPSILON / self.key_width
        q, k = (x.unflatten(-1, (-1, self.key_width)).to(wide).contiguous() for x in (q, k))
        g = F.softplus(alpha.to(wide) + offset)
        decay = -A_log.exp()
        inputs = (
            norm_rows(q, scale.square(), None, eps),
            norm_rows(k, scale, None, eps),
            v.unflatten(-1, (-1, self.value_width)),
            decay[:, None] * g.unflatten(-1, (len(decay), -1)) if self.is_kda else decay * g,
            beta.sigmoid() * self.strength,
        )
        return inputs, before

    def _pass_states(self, rows: State) -> Tensor:
        """Mix this rank's two chunks of each sequence, after those of other ranks: [s, b, i].

        A chunk turns a state S into A S + B.  The rule computes B from zeros, and A in additional
        columns of the state that start from the unit matrix; their outputs, times the state before
        the chunk, are what this state adds to the chunk's outputs.  Collective over cp.
        """
        num_rows = rows[0].shape[1]
        cp = self.cp_group
        # The chunks become rows of a batch: [s, b, ..] -> [s/2, 2 b, ..].
        rows = tuple(x.unflatten(0, (2, -1)).transpose(0, 1).flatten(1, 2) for x in rows)
        mine = cp.rank(), 2 * cp.size() - 1 - cp.rank()
        reach = self.conv1d.weight.shape[-1] - 1
        if len(rows[0]) < reach:
            raise ConfigError(
                f"--linear-conv-kernel-dim {reach + 1}: a chunk of {len(rows[0])} tokens is "
                "shorter; use a smaller --context-parallel-size or longer sequences"
            )

        def of_all_chunks(x: Tensor) -> Tensor:
            """All-gather, in the order of the sequence: [2 b, ..] -> [2 cp, b, ..]."""
            found = gather_from_sequence_parallel_region(x.contiguous(), group=cp)
            first, second = found.view(cp.size(), 2, num_rows, *x.shape[1:]).unbind(1)
            return torch.cat([first, second.flip(0)])

        ends = of_all_chunks(rows[0][len(rows[0]) - reach :].transpose(0, 1))
        ends = torch.cat([torch.zeros_like(ends[:1]), ends])
        before = torch.cat([ends[i] for i in mine]).transpose(0, 1)
        (q, k, v, *rates), _ = self._inputs(rows, before, None)
        width = self.value_width
        state = k.new_zeros(k.shape[1], v.shape[2], self.key_width, width + self.key_width)
        state[..., width:] = torch.eye(self.key_width, dtype=k.dtype, device=k.device)
        y, last = gated_delta_rule(
            q, k, F.pad(v.to(k.dtype), (0, self.key_width)), *rates, state=state
        )
        entering = [torch.zeros_like(state[:num_rows, ..., :width])]
        for change in of_all_chunks(last):
            entering.append(change[..., :width] + change[..., width:] @ entering[-1])
        own = torch.cat([entering[i] for i in mine])
        y = y[..., :width] + torch.einsum("sbhk,bhkv->sbhv", y[..., width:], own)
        halves: Tensor = y.to(v.dtype).flatten(2).unflatten(1, (2, -1))
        return halves.transpose(0, 1).flatten(0, 1)

    def _own_channels(self) -> Tensor:
        """Return the weight of the convolution for the channels of this cp rank's heads."""
        size = self.cp_group.size()
        weight = self.conv1d.weight
        if size == 1 or not self.trades_heads:
            return weight
        parts = weight.split(self.widths[:3])
        return torch.cat([part.chunk(size)[self.cp_group.rank()] for part in parts])


class GatedHeadNorm(nn.Module):
    """RMSNorm of each head of y, times ``activation`` of z; all heads share ``weight`` [d]."""

    def __init__(
        self, weight: nn.Parameter, eps: float, activation: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self.activation = activation

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """Normalize and gate: 2 x [s, b, n d] -> [s, b, n d]."""
        heads = y.unflatten(-1, (-1, len(self.weight)))
        return norm_rows(heads, self.weight, None, self.eps).flatten(-2) * self.activation(z)
