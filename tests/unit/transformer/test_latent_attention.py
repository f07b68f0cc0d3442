"""Latent attention against transformers' DeepSeek-V3: values and gradients of one layer."""

from __future__ import annotations

import pytest
import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config

deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")

LENGTH, FACTOR = 16, 4.0
NAMES = {  # theirs -> ours
    "q_a_proj": "linear_q_down_proj",
    "q_a_layernorm": "q_layernorm",
    "q_b_proj": "linear_q_up_proj",
    "q_proj": "linear_q_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_a_layernorm": "kv_layernorm",
    "kv_b_proj": "linear_kv_up_proj",
    "o_proj": "linear_proj",
}


@pytest.mark.feature("Attention: latent attention (MLA) as DeepSeek-V3 has it, with YaRN")
@pytest.mark.parametrize(("rank", "factor"), [(12, FACTOR), (None, FACTOR), (12, 1.0)])
def test_latent_attention_is_that_of_transformers(rank: int | None, factor: float) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if factor > 1:
        rope |= {"rope_type": "yarn", "factor": factor, "mscale": 0.7, "mscale_all_dim": 0.7}
        rope |= {"original_max_position_embeddings": LENGTH}
    theirs_config = deepseek.DeepseekV3Config(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=1,
        q_lora_rank=rank, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
        rope_parameters=rope, max_position_embeddings=4 * LENGTH, rope_interleave=True,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(1)
    theirs = deepseek.DeepseekV3Attention(theirs_config, layer_idx=0).eval().double()
    for name, param in theirs.named_parameters():  # large enough that scores differ
        torch.nn.init.normal_(param, mean=1.0 if "norm" in name else 0.0, std=0.3)
    config = tiny_config(
        num_layers=1, multi_latent_attention=True, qk_layernorm=True, normalization="RMSNorm",
        add_bias_linear=False, q_lora_rank=rank, kv_lora_rank=8, qk_head_dim=8,
        qk_pos_emb_head_dim=4, v_head_dim=6, rotary_scaling_factor=factor, mscale=0.7,
        mscale_all_dim=0.7, layernorm_epsilon=1e-6,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(config=config)
    model = GPTModel(
        config, spec, 64, LENGTH, position_embedding_type="rope", pg_collection=one_process_groups()
    )
    ours = model.decoder.layers[0].self_attention.double()
    given = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, param in given.items():
            ours.get_parameter(NAMES[name.split(".")[0]] + ".weight").copy_(param)
    assert {n.split(".")[0] for n, _ in ours.named_parameters()} == {
        NAMES[n.split(".")[0]] for n in given
    }
    x = torch.randn(2, LENGTH, 32, dtype=torch.float64)  # sums in fp32 are not that near
    mine, other = (x.clone().requires_grad_() for _ in range(2))
    mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)[None, None]
    positions = deepseek.DeepseekV3RotaryEmbedding(theirs_config)(x, torch.arange(LENGTH)[None])
    expected = theirs(other, position_embeddings=positions, attention_mask=mask)[0]
    table = model.rotary_pos_emb.table(LENGTH, 0, torch.float64)
    found, _ = ours(mine.transpose(0, 1), rotary_pos_emb=table)
    torch.testing.assert_close(found.transpose(0, 1), expected, **tolerances.LOGITS)
    weight = torch.randn_like(expected)
    (found.transpose(0, 1) * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(mine.grad, other.grad, **tolerances.GRADIENT)
    for name, param in given.items():
        own = ours.get_parameter(NAMES[name.split(".")[0]] + ".weight")
        torch.testing.assert_close(own.grad, param.grad, **tolerances.GRADIENT)


def test_latent_attention_rotates_whatever_the_embedding_adds() -> None:
    logits = {}
    for positions in ("rope", "none", "learned_absolute"):
        config = tiny_config(num_layers=1, multi_latent_attention=True)
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(config=config),
            64,
            LENGTH,
            position_embedding_type=positions,
            pg_collection=one_process_groups(),
        )
        has_table = model.embedding.position_embeddings is not None
        assert has_table == (positions == "learned_absolute")
        with torch.no_grad():
            ids = torch.arange(LENGTH).view(1, -1)
            logits[positions] = model.eval()(ids, ids, None)
    assert torch.equal(logits["rope"], logits["none"])
    assert not torch.allclose(logits["rope"], logits["learned_absolute"])
