"""One sample as text, with what the loss counts marked (--sft-show-sample)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from megatron.core.packed_seq_params import PackedBounds
from megatron.training.tokenizer.base import MegatronTokenizer

_GREEN = "\x1b[32m"
_PLAIN = "\x1b[0m"


def sample_as_text(row: Mapping[str, Any], tokenizer: MegatronTokenizer, *, in_color: bool) -> str:
    """Return the first conversation of a row; trained text is green, or between {+ and +}."""
    bounds = row["packed_seq_params"]
    assert isinstance(bounds, PackedBounds), "a row of conversations has their bounds"
    stop = int(bounds.cumulative[1]) - int(row["is_padding"][: bounds.cumulative[1]].sum())
    tokens = [*row["tokens"][:1].tolist(), *row["labels"][:stop].tolist()]
    is_trained = [False, *(row["loss_mask"][:stop] > 0).tolist()]
    begin, end = (_GREEN, _PLAIN) if in_color else ("{+", "+}")
    text = ""
    for marked, pairs in groupby(zip(tokens, is_trained, strict=True), key=lambda pair: pair[1]):
        part = tokenizer.detokenize([token for token, _ in pairs])
        text += f"{begin}{part}{end}" if marked else part
    num_trained = sum(is_trained)
    mark = "green" if in_color else "{+marked+}"
    return (
        f"first training sample, {len(tokens)} tokens, of which {num_trained} are trained "
        f"({mark}):\n{text}"
    )
