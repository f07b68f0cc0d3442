"""Loss mask, attention mask and position ids of left-to-right samples.

``s`` is the sequence length, ``...`` any leading dimensions (a batch, or none).
"""

from __future__ import annotations

import torch
from torch import Tensor


def get_ltor_masks_and_position_ids(
    data: Tensor,
    eod_token: int,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
    create_attention_mask: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return (attention_mask, loss_mask, position_ids) of input tokens ``data`` [..., s].

    attention_mask bool [..., 1, s, s] or None, True where attention is forbidden; loss_mask f32
    [..., s]; position_ids i64 [..., s].  The end-of-document token belongs to the document it ends.
    ``reset_position_ids`` restarts positions after it, ``reset_attention_mask`` hides earlier
    documents from later tokens, ``eod_mask_loss`` sets the loss mask at the token itself to 0.
    """
    is_eod = data == eod_token
    loss_mask = torch.ones(data.shape, device=data.device)
    if eod_mask_loss:
        loss_mask = loss_mask.masked_fill(is_eod, 0.0)
    attention_mask = causal_mask(data.shape[-1], data.device) if create_attention_mask else None
    if attention_mask is not None:
        attention_mask = attention_mask.expand(*data.shape[:-1], *attention_mask.shape)
    if attention_mask is not None and reset_attention_mask:
        document = document_of_token(is_eod)
        other_document = document.unsqueeze(-1) != document.unsqueeze(-2)
        attention_mask = attention_mask | other_document.unsqueeze(-3)
    if reset_position_ids:
        position_ids = _positions_in_document(is_eod)
    else:
        place = torch.arange(data.shape[-1], device=data.device)
        position_ids = place.expand(data.shape).contiguous()
    return attention_mask, loss_mask, position_ids


def _positions_in_document(is_eod: Tensor) -> Tensor:
    """Return i64 [..., s]: the distance of each token from the start of its document."""
    place = torch.arange(is_eod.shape[-1], device=is_eod.device)
    starts = torch.zeros(is_eod.shape, dtype=torch.int64, device=is_eod.device)
    torch.mul(is_eod[..., :-1], place[1:], out=starts[..., 1:])
    return place - starts.cummax(dim=-1).values


def causal_mask(sequence_length: int, device: torch.device | None = None) -> Tensor:
    """Return bool [1, s, s], True above the diagonal, where attention is forbidden."""
    ones = torch.ones(1, sequence_length, sequence_length, dtype=torch.bool, device=device)
    return ones.triu(diagonal=1)


def document_of_token(is_eod: Tensor) -> Tensor:
    """Return i64 [..., s]: the number of documents that ended before each token."""
    ended = torch.zeros_like(is_eod, dtype=torch.int64)
    ended[..., 1:] = is_eod[..., :-1]
    return ended.cumsum(dim=-1)
