"""Rotary embeddings by Megatron Core's functions: values, shapes, shares of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.models.common.embeddings import YarnRotaryEmbedding, apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rope_utils import (
    _apply_rotary_pos_emb_bshd,
    _rotate_half,
    apply_rotary_pos_emb_with_cos_sin,
    fused_apply_rotary_pos_emb,
    fused_apply_rotary_pos_emb_thd,
    get_pos_emb_on_this_cp_rank,
)
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    MultimodalRotaryEmbedding,
    RotaryEmbedding,
)
from megatron.core.packed_seq_params import PackedSeqParams
from tests.support.one_process import tiny_config

llama = pytest.importorskip("transformers.models.llama.modeling_llama")
deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")


class Share:
    """The group of one of several context-parallel ranks, none of which runs."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def heads(length: int = 8, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(length, batch, 3, 8, generator=generator, dtype=torch.float64)


def angles(length: int = 8, **more: Any) -> Tensor:
    return RotaryEmbedding(8, **more)(length).double()


def of_llama(x: Tensor, freqs: Tensor) -> Tensor:
    """Rotate [s, b, n, d] by transformers' function for [b, n, s, d]."""
    turned = x.permute(1, 2, 0, 3)
    cos, sin = (f(freqs)[:, 0, 0].unsqueeze(0) for f in (torch.cos, torch.sin))
    return llama.apply_rotary_pos_emb(turned, turned, cos, sin)[0].permute(2, 0, 1, 3)


def test_rotation_by_angles_is_that_of_transformers_with_its_gradient() -> None:
    x, freqs = heads().requires_grad_(), angles()
    ours = apply_rotary_pos_emb(x, freqs, tiny_config())
    grad = torch.autograd.grad((ours * heads().cos()).sum(), x)
    expected = of_llama(x, freqs)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(grad, torch.autograd.grad((expected * heads().cos()).sum(), x))
    formula = x * freqs.cos() + _rotate_half(x, False) * freqs.sin()
    torch.testing.assert_close(ours, formula)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_part_of_the_channels_is_rotated_and_scaled(interleaved: bool) -> None:
    x, freqs = heads(), angles(rotary_percent=0.5, rotary_interleaved=interleaved)
    assert freqs.shape == (8, 1, 1, 4)
    ours = _apply_rotary_pos_emb_bshd(x, freqs, interleaved, mscale=1.5)
    part = x[..., :4]
    turned = 1.5 * (part * freqs.cos() + _rotate_half(part, interleaved) * freqs.sin())
    torch.testing.assert_close(ours, torch.cat((turned, x[..., 4:]), -1))
    fused = fused_apply_rotary_pos_emb(x, freqs, interleaved=interleaved)
    torch.testing.assert_close(fused[..., :4] * 1.5, ours[..., :4])


def test_latent_attention_turns_interleaved_pairs_into_halves() -> None:
    x, freqs = heads(), angles()
    ours = _apply_rotary_pos_emb_bshd(x, freqs, multi_latent_attention=True)
    turned = x.permute(1, 2, 0, 3)
    cos, sin = (f(freqs)[:, 0, 0].unsqueeze(0) for f in (torch.cos, torch.sin))
    theirs = deepseek.apply_rotary_pos_emb_interleave(turned, turned, cos, sin)[0]
    torch.testing.assert_close(ours, theirs.permute(2, 0, 1, 3))


def test_packed_sequences_begin_at_position_0_on_every_rank() -> None:
    lengths, config = (8, 4), tiny_config()
    bounds = torch.tensor([0, 8, 12], dtype=torch.int32)
    x, freqs = heads(12, 1).squeeze(1), angles(8)
    parts = [of_llama(part.unsqueeze(1), freqs[: len(part)]) for part in x.split(lengths)]
    expected = torch.cat(parts).squeeze(1)
    torch.testing.assert_close(apply_rotary_pos_emb(x, freqs, config, bounds), expected)
    for rank in range(2):
        first, second = (torch.arange(n).chunk(4) for n in lengths)
        held = torch.cat(
            [each[i] + at for each, at in ((first, 0), (second, 8)) for i in (rank, 3 - rank)]
        )
        mine = apply_rotary_pos_emb(x[held], freqs, config, bounds, cp_group=Share(rank, 2))
        torch.testing.assert_close(mine, expected[held])
        fused = fused_apply_rotary_pos_emb_thd(x[held], bounds, freqs, cp_size=2, cp_rank=rank)
        torch.testing.assert_close(fused, mine)


def test_cosines_and_sines_of_pairs_rotate_as_angles_do() -> None:
    x, rotary = heads(), RotaryEmbedding(8)
    cos, sin = rotary.get_cos_sin(8)
    assert cos.shape == (8, 4)
    torch.testing.assert_close(
        apply_rotary_pos_emb_with_cos_sin(x, cos, sin), of_llama(x, angles()), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(
        rotary.get_freqs_non_repeated(3, offset=2), angles(5)[2:, 0, 0, :4].float()
    )


def test_an_embedding_gives_each_rank_its_positions_and_packed_sequences_all() -> None:
    whole = RotaryEmbedding(8, 1.0)(16)
    assert whole.shape == (16, 1, 1, 8)
    assert whole.dtype == torch.float32
    for rank in range(2):
        share: Any = Share(rank, 2)
        rotary = RotaryEmbedding(8, 1.0, False, None, 10000, False, 8.0, True, share)
        expected = torch.cat([whole.chunk(4)[i] for i in (rank, 3 - rank)])
        torch.testing.assert_close(rotary(16), expected)
        torch.testing.assert_close(rotary(16, packed_seq=True), whole)
        torch.testing.assert_close(get_pos_emb_on_this_cp_rank(whole, 0, share), expected)
        grid = MultimodalRotaryEmbedding(8, 1.0, cp_group=share)
        positions = torch.arange(16).expand(3, 2, 16)
        torch.testing.assert_close(grid(positions, [2, 1, 1]), expected.expand(-1, 2, -1, -1))
    with pytest.raises(ValueError, match="cp_group"):
        get_pos_emb_on_this_cp_rank(whole, 0, None)


def test_the_number_of_positions_follows_from_what_a_model_has() -> None:
    config = tiny_config(context_parallel_size=2)
    count = RotaryEmbedding(8).get_rotary_seq_len
    hidden = torch.zeros(5, 2, 32)
    assert count(None, None, hidden, config) == 10
    bounds = torch.tensor([0, 7, 9])
    packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=7, max_seqlen_kv=6)
    assert count(None, None, hidden, config, packed) == 7
    parallel = tiny_config(sequence_parallel=True, tensor_model_parallel_size=4)
    stack = type("Stack", (), {"input_tensor": torch.zeros(3, 2, 32)})
    # A project calls it as a function of the class.
    assert RotaryEmbedding.get_rotary_seq_len(object(), None, stack, hidden, parallel) == 12


def test_yarn_gives_the_frequencies_and_the_factor_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    theirs = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=512,
        rope_parameters=scaling | {"rope_theta": 10000.0},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    rotary = YarnRotaryEmbedding(
        32, scaling_factor=8.0, original_max_position_embeddings=64, mscale_all_dim=0.0
    )
    freqs, own_factor = rotary(9)
    torch.testing.assert_close(freqs[:, 0, 0, :16], torch.outer(torch.arange(9.0), frequencies))
    assert own_factor == pytest.approx(factor)
