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


_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_QWEN = {
    **{"depth": 3, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "patch_size": 4},
    **{"out_hidden_size": 32, "num_position_embeddings": 16},
}
_IDS = {
    **{"image_token_id": 60, "video_token_id": 61},
    **{"vision_start_token_id": 62, "vision_end_token_id": 59},
}


def _qwen3_vl(transformers: Any) -> Any:
    return transformers.Qwen3VLConfig(
        text_config={**_TEXT, "num_hidden_layers": 4, "rope_parameters": _ROPE},
        vision_config={**_QWEN, "deepstack_visual_indexes": [0, 2]},
        **_IDS,
    )


def _qwen3_5(transformers: Any) -> Any:
    delta_net = {
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_hidden_layers": 4},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 16},
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
    }
    return transformers.Qwen3_5Config(
        text_config={**_TEXT, **delta_net}, vision_config=_QWEN, **_IDS
    )


def _mistral3(transformers: Any) -> Any:
    text = {"model_type": "mistral", "sliding_window": None, "rms_norm_eps": 1e-5}
    images = {
        **{"model_type": "pixtral", "hidden_size": 16, "num_attention_heads": 2},
        **{"intermediate_size": 24, "num_hidden_layers": 2, "image_size": 48, "patch_size": 4},
        "hidden_act": "silu",
    }
    return transformers.Mistral3Config(
        text_config={**_TEXT, **text}, vision_config=images, tie_word_embeddings=False
    )


# Name -> config of the class <...>ForConditionalGeneration.
FAMILIES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "Gemma-3": ("Gemma3", _gemma3),
    "Qwen3-VL": ("Qwen3VL", _qwen3_vl),
    "Qwen3.5": ("Qwen3_5", _qwen3_5),
    "Mistral 3": ("Mistral3", _mistral3),
}


def image_family(name: str) -> Any:
    """Return a random model of `transformers` in float32."""
    transformers = pytest.importorskip("transformers")
    class_name, make = FAMILIES[name]
    torch.manual_seed(4 if name == "Qwen3.5" else 3)
    model = getattr(transformers, f"{class_name}ForConditionalGeneration")(make(transformers))
    with torch.no_grad():
        for key, param in model.named_parameters():
            if key.endswith("dt_bias"):
                param.fill_(-3)  # with long steps nothing is kept, and their gradients are noise
            param.add_(0.1 * torch.randn_like(param))
    return model.eval()
