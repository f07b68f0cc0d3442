"""Padding and packing of rows of text and images under context and sequence parallelism."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.config.errors import ConfigError
from megatron.core.models.multimodal.splicing import Splice
from megatron.core.packed_seq_params import PackedBounds, PackedSeqParams
from megatron.core.parallel.context_parallel_partition import held_tokens, row_lengths
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig


def get_padding(
    seq_len: int,
    cp_size: int,
    tp_size: int,
    has_sp: bool,
    decoder_tp_comm_overlap: bool = False,
    decoder_seq_len: int | None = None,
) -> int:
    """Return the positions to append to a row of ``seq_len`` so that all ranks get equal parts.

    Context parallelism divides a row into 2 ``cp_size`` chunks, sequence parallelism (``has_sp``)
    into ``tp_size``.  If sequence parallelism overlaps its communication
    (``decoder_tp_comm_overlap``), the length is ``decoder_seq_len``; raises ConfigError without it.
    """
    if has_sp and decoder_tp_comm_overlap:
        if decoder_seq_len is None:
            raise ConfigError(
                "--decoder-tp-comm-overlap without --decoder-seq-length: its buffers have a fixed "
                "size; set --decoder-seq-length to the length of a row of text and images"
            )
        return decoder_seq_len - seq_len
    multiple = (tp_size if has_sp else 1) * (2 * cp_size if cp_size > 1 else 1)
    return -seq_len % multiple


def get_packed_seq_params(
    tokens: Tensor,
    img_seq_len: int,
    padding_needed: int,
    cp_size: int,
    use_packed_sequence: bool = False,
) -> PackedSeqParams:
    """Return the boundaries of the rows of ``tokens`` [b, s], each followed by its padding.

    A row has s + ``img_seq_len`` positions, of which the last ``padding_needed`` are padding.  The
    format is "thd", with padded boundaries, if context parallelism shards padded or packed rows.
    """
    rows = torch.arange(len(tokens) + 1, dtype=torch.int32, device=tokens.device)
    length = tokens.shape[1] + img_seq_len
    ends = rows * (length - padding_needed)
    is_packed = cp_size > 1 and (padding_needed > 0 or use_packed_sequence)
    padded = rows * length if is_packed else None
    return PackedSeqParams(
        qkv_format="thd" if is_packed else "sbhd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=length,
        max_seqlen_kv=length,
    )


def held_positions(rows: Tensor, cp_group: ProcessGroup) -> Tensor:
    """Return this context-parallel rank's positions: [b, L, ...] -> [b, L/cp, ...]."""
    if cp_group.size() == 1:
        return rows
    lengths = row_lengths(None, rows.shape[1])
    return rows.index_select(1, held_tokens(lengths, cp_group.rank(), cp_group.size(), rows.device))


def split_over_ranks(
    rows: Tensor, config: TransformerConfig, groups: ProcessGroupCollection
) -> Tensor:
    """Return the part of values [b, L, ...] of each position that this rank's layers read.

    [L/cp, b, ...], or [L/(cp tp), b, ...] with sequence parallelism.
    """
    mine = held_positions(rows, groups.cp).transpose(0, 1).contiguous()
    if config.sequence_parallel and groups.tp.size() > 1:
        mine = scatter_to_sequence_parallel_region(mine, groups.tp)
    return mine


def mask_of_samples(starts: Tensor, token: Tensor, cp_group: ProcessGroup) -> Tensor:
    """Return the mask [b, 1, L/cp, L] that is True where a key is of another sample than the query.

    ``starts`` [b, s] is True at the first token of each sample in a row, ``token`` [b, L] the token
    at each position.
    """
    sample = starts.cumsum(1).gather(1, token)
    mine = held_positions(sample, cp_group)
    return (mine.unsqueeze(2) != sample.unsqueeze(1)).unsqueeze(1)


def mask_without_images(is_image: Tensor, where: Splice, cp_group: ProcessGroup) -> Tensor:
    """Return the mask [b, 1, L/cp, L] of later keys, without those of the query's own image.

    ``is_image`` [b, s]: tokens that stand for an image.
    """
    image = is_image.cumsum(1).gather(1, where.token) * where.is_image  # 0 at text
    key = torch.arange(image.shape[1], device=image.device).expand_as(image)
    query, own = (held_positions(each, cp_group).unsqueeze(2) for each in (key, image))
    hidden = (key.unsqueeze(1) > query) & ((own != image.unsqueeze(1)) | (own == 0))
    return hidden.unsqueeze(1)


def bounds_of_samples(starts: Tensor, token: Tensor) -> PackedBounds:
    """Return the same as bounds of all rows, for kernels; the host waits for their number."""
    sample = starts.cumsum(1).gather(1, token)
    is_first = torch.ones_like(sample, dtype=torch.bool)
    is_first[:, 1:] = sample[:, 1:] != sample[:, :-1]
    inner = is_first.flatten().nonzero().flatten()
    cumulative = torch.cat([inner, inner.new_tensor([sample.numel()])]).int()
    return PackedBounds(cumulative, token.shape[1])
