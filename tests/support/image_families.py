"""Random models of `transformers` that read images, each with all parts of its family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

VOCABULARY = 64
_SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
_TEXT = {
    **_SIZES,
    **{"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8},
    **{"vocab_size": VOCABULARY, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
}


def _gemma3(transformers: Any) -> Any:
    kinds = ["sliding_attention", "full_attention"]
    text = {"sliding_window": 6, "query_pre_attn_scalar": 8, "layer_types": kinds}
    images = {"num_hidden_layers": 2, "image_size": 24, "patch_size": 6, "vision_use_head": False}
    return transformers.Gemma3Config(
        text_config={**_TEXT, **text},
        vision_config={**_SIZES, **images},
        mm_tokens_per_image=4,
        image_token_index=60,
        boi_token_index=61,
        eoi_token_index=62,
    )


# Name -> config of the class <name without "-">ForConditionalGeneration.
FAMILIES: dict[str, tuple[str, Callable[[Any], Any]]] = {"Gemma-3": ("Gemma3", _gemma3)}


def image_family(name: str) -> Any:
    """Return a random model of `transformers` in float32."""
    transformers = pytest.importorskip("transformers")
    class_name, make = FAMILIES[name]
    torch.manual_seed(3)
    model = getattr(transformers, f"{class_name}ForConditionalGeneration")(make(transformers))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    return model.eval()
