"""Rotation by angles of channels, as models of projects apply it in attention of their own.

``freqs`` are angles [s, 1 or b, 1, r], of which both channels of a pair have the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.fusions.rope import RotaryTable, apply_rotary
from megatron.core.packed_seq_params import position_in_sequence
from megatron.core.parallel.context_parallel_partition import held_tokens, row_lengths
from megatron.core.parallel.default_groups import library_call
from megatron.core.transformer.rope import table_of_angles
from megatron.core.transformer.transformer_config import TransformerConfig


def get_pos_emb_on_this_cp_rank(
    pos_emb: Tensor, seq_dim: int, cp_group: ProcessGroup | None
) -> Tensor:
    """Return the part of ``pos_emb`` for this context-parallel rank's tokens."""
    if cp_group is None:
        raise ValueError("get_pos_emb_on_this_cp_rank: give cp_group")
    lengths = (pos_emb.shape[seq_dim],)
    held = held_tokens(lengths, cp_group.rank(), cp_group.size(), pos_emb.device)
    return pos_emb.index_select(seq_dim, held)


def _rotate_half(x: Tensor, rotary_interleaved: bool) -> Tensor:
    """Return (-b, a) for each pair (a, b) of channels."""
    if rotary_interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _apply_rotary_pos_emb_bshd(
    t: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
) -> Tensor:
    """Rotate the first r channels of ``t`` [s, b, n, d].

    With latent attention, interleaved pairs become pairs of two halves.  ``mscale`` multiplies
    cosines and sines.
    """
    if multi_latent_attention:
        rotated = t[..., : freqs.shape[-1]].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        t = torch.cat((rotated, t[..., freqs.shape[-1] :]), -1)
    table = table_of_angles(freqs, rotary_interleaved, freqs.dtype)
    cos = (table.cos * mscale).to(t.dtype)
    sin = (table.sin * mscale).to(t.dtype)
    return apply_rotary(t, RotaryTable(cos, sin, rotary_interleaved))


def _apply_rotary_pos_emb_thd(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
    cp_group: ProcessGroup | None = None,
) -> Tensor:
    """Rotate this rank's tokens [t, n, d] of packed sequences; ``freqs`` are those of positions."""
    if cp_group is None:
        raise ValueError("rotary embedding of packed sequences: give cp_group")
    rank = cp_group.size(), cp_group.rank()
    form = rotary_interleaved, multi_latent_attention, mscale
    return _rotate_packed(t, cu_seqlens, freqs, *rank, *form)


def _rotate_packed(
    t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int, cp_rank: int, *form: Any
) -> Tensor:
    total = len(t) * cp_size
    positions = position_in_sequence(cu_seqlens, total)
    if cp_size > 1:
        lengths = row_lengths([n for n in cu_seqlens.diff().tolist() if n], total)
        positions = positions[held_tokens(lengths, cp_rank, cp_size, t.device)]
    return _apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs[positions], *form).squeeze(1)


def fused_apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, transpose_output_memory: bool = False, interleaved: bool = False
) -> Tensor:
    """Rotate ``t`` [s, b, n, d] (Transformer Engine's call)."""
    return _apply_rotary_pos_emb_bshd(t, freqs[: len(t)], interleaved)


def fused_apply_rotary_pos_emb_thd(
    t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int = 1, cp_rank: int = 0
) -> Tensor:
    """Rotate this rank's tokens [t, n, d] of packed sequences (Transformer Engine's call)."""
    return _rotate_packed(t, cu_seqlens, freqs, cp_size, cp_rank)


@library_call()
def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    config: TransformerConfig,
    cu_seqlens: Tensor | None = None,
    mscale: float = 1.0,
    cp_group: ProcessGroup | None = None,
) -> Tensor:
    """Rotate ``t`` [s, b, n, d], or with ``cu_seqlens`` tokens of packed sequences [t, n, d]."""
    form = config.rotary_interleaved, config.multi_latent_attention, mscale
    if cu_seqlens is None:
        return _apply_rotary_pos_emb_bshd(t, freqs, *form)
    return _apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, *form, cp_group=cp_group)


def apply_rotary_pos_emb_with_cos_sin(
    t: Tensor, cos: Tensor, sin: Tensor, rotary_interleaved: bool = False
) -> Tensor:
    """Rotate ``t`` [s, b, n, d] by the cosines and sines of pairs [s, r/2]."""
    cos, sin = (pair.to(t.dtype)[:, None, None] for pair in (cos, sin))
    return apply_rotary(t, RotaryTable(cos, sin, rotary_interleaved))
