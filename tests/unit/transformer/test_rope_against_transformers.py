"""Scaled rotary frequencies against those of `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.transformer.rope import (
    RopeScaling,
    RotaryEmbedding,
)

rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
configs = pytest.importorskip("transformers.models.llama.configuration_llama")

HF_KINDS: dict[str, dict[str, Any]] = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {},
    "yarn of gpt-oss": {"beta_fast": 20.0, "beta_slow": 2.0, "truncate": False},
    "longrope": {
        "short_factor": [1.0 + 0.1 * i for i in range(16)],
        "long_factor": [2.0 + 0.5 * i for i in range(16)],
    },
}


@pytest.mark.parametrize("case", HF_KINDS)
@pytest.mark.parametrize("length", [32, 4096])
def test_frequencies_are_those_of_transformers(case: str, length: int) -> None:
    original, factor, kind = 64, 16.0, case.split()[0]
    hf = configs.LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=int(original * factor),
        rope_parameters={
            "rope_type": kind,
            "rope_theta": 10000.0,
            "factor": factor,
            "original_max_position_embeddings": original,
            **HF_KINDS[case],
        },
    )
    expected, amplitude = rope_utils.ROPE_INIT_FUNCTIONS[kind](hf, "cpu", seq_len=length)
    scaling = RopeScaling(
        kind=kind,
        factor=factor,
        original_max_positions=original,
        short_factors=tuple(HF_KINDS[case].get("short_factor", ())),
        long_factors=tuple(HF_KINDS[case].get("long_factor", ())),
        beta_fast=HF_KINDS[case].get("beta_fast", 32.0),
        beta_slow=HF_KINDS[case].get("beta_slow", 1.0),
        round_correction_range=HF_KINDS[case].get("truncate", True),
    )
    rope = RotaryEmbedding(32, scaling=scaling)
    torch.testing.assert_close(rope.frequencies(length), expected, rtol=1e-6, atol=0)
    assert scaling.amplitude == pytest.approx(amplitude)
    table = rope.table(length, 0, torch.float32)
    torch.testing.assert_close(table.cos[0], torch.full_like(table.cos[0], amplitude))
