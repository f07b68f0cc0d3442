"""Layers of linear attention in a GPT: names, generation, recomputation, packed sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.dist_checkpointing.megatron_formats.names import stage_names
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.inference.paged_engine.engine import Engine, EngineOptions
from megatron.core.inference.paged_engine.request import Request
from megatron.core.inference.paged_engine.runner import GenerationModel
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.models.gpt.gpt_layer_specs import ENGINE, LOCAL, decoder_block_of
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.params.param_info import info_of
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config

VOCABULARY, LENGTH = 50, 24
SIZES = {
    **{"linear_key_head_dim": 6, "linear_value_head_dim": 4, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "attention_output_gate": True},
}
# As in Kimi-Linear: KDA, and latent attention without positions.
KIMI = {
    **{**SIZES, "linear_num_value_heads": 2, "attention_output_gate": False},
    **{"experimental_attention_variant": "kda", "linear_allow_neg_eigval": True},
    **{"multi_latent_attention": True, "no_rope_freq": 1, "kv_lora_rank": 6, "qk_head_dim": 4},
    **{"qk_pos_emb_head_dim": 2, "v_head_dim": 4},
}
each_variant = pytest.mark.parametrize("sizes", [SIZES, KIMI], ids=["gdn", "kda"])
_CLOSE = tolerances.of(torch.float64)


def build(freq: object = 2, backend: Any = LOCAL, **changes: Any) -> GPTModel:
    variant = {"experimental_attention_variant": "gated_delta_net"}
    config = tiny_config(
        params_dtype=torch.float64,
        num_layers=4,
        init_method_std=0.1,
        linear_attention_freq=freq,
        **{**variant, **SIZES, **changes},
    )
    torch.manual_seed(5)
    return GPTModel(
        config,
        decoder_block_of(backend, config),
        VOCABULARY,
        LENGTH,
        position_embedding_type="rope",
        pg_collection=one_process_groups(),
    )


def tokens(length: int = LENGTH) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(2))
    return ids, torch.arange(length).expand(2, length)


def gradients(model: GPTModel, **kwargs: Any) -> dict[str, Tensor]:
    ids, places = tokens()
    losses = model(ids, places, None, labels=ids.roll(-1, 1), **kwargs)
    (losses * torch.linspace(0.5, 1.5, losses.numel()).view(losses.shape)).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"losses": losses.detach(), **{n: g for n, g in grads.items() if g is not None}}


@pytest.mark.parametrize(
    ("freq", "linear"), [(None, (0, 1, 2, 3)), (4, (0, 1, 2)), ((0, 1, 1, 0), (1, 2))]
)
def test_the_frequency_says_which_layers_are_linear(freq: object, linear: tuple[int, ...]) -> None:
    names = {info_of(p).name for p in build(freq).parameters()}
    own = ("in_proj.weight", "conv1d.weight", "A_log", "dt_bias", "out_norm.weight")
    for layer in range(4):
        prefix = f"decoder.layers.{layer}.self_attention."
        assert {prefix + name in names for name in own} == {layer in linear}
        assert (prefix + "linear_qkv.weight" in names) == (layer not in linear)


def test_checkpoints_of_both_implementations_have_the_same_names() -> None:
    kinds = [build(2, backend).sharded_state_dict() for backend in (LOCAL, ENGINE)]
    keys = [{entry.key for entry in of_one.values()} for of_one in kinds]
    assert keys[0] == {key for key in keys[1] if "_extra_state" not in key}
    assert "decoder.layers.0.self_attention.in_proj.layer_norm_weight" in keys[0]


@pytest.mark.feature("Linear attention: generation by recurrent state beside keys and values")
@each_variant
def test_token_by_token_gives_the_logits_of_the_whole(sizes: dict[str, Any]) -> None:
    model = build(**sizes).eval()
    ids, places = tokens()
    cache, found = StaticInferenceContext(2, LENGTH), []
    with torch.no_grad():
        whole = model(ids, places, None)
        for start, stop in ((0, 7), (7, 12), *((i, i + 1) for i in range(12, LENGTH))):
            part = slice(start, stop)
            found.append(model(ids[:, part], places[:, part], None, inference_context=cache))
            cache.increment_sequence_len_offset(stop - start)
    expected = whole[:, [6, 11, *range(12, LENGTH)]]
    torch.testing.assert_close(torch.cat(found, 1), expected, **_CLOSE)


@pytest.mark.parametrize("sizes", [SIZES, KIMI, {**KIMI, "cache_mla_latents": True}])
def test_the_engine_takes_the_most_likely_token_of_each_full_pass(sizes: dict[str, Any]) -> None:
    model = build(**sizes).eval()
    engine = Engine(
        GenerationModel(
            module=model,
            config=model.config,
            groups=model.pg_collection,
            device=torch.device("cpu"),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            eod=None,
        ),
        EngineOptions(page_size=4),
    )
    prompts = {"one": tokens(5)[0][0].tolist(), "two": tokens(9)[0][1].tolist()}
    params = SamplingParams(num_tokens_to_generate=10, top_k=1)
    answers = engine.generate([Request(name, list(p), params) for name, p in prompts.items()])
    for name, ids in prompts.items():
        for token in (t.token for t in answers[name]):
            with torch.no_grad():
                logits = model(torch.tensor([ids]), torch.arange(len(ids))[None], None)
            assert token == int(logits[0, -1].argmax())
            ids.append(token)
        assert len({*ids[-10:]}) > 1


@each_variant
@pytest.mark.parametrize(
    "changes",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform"},
        {"recompute_granularity": "selective"},
    ],
)
def test_recomputation_changes_no_gradient(changes: dict[str, Any], sizes: dict[str, Any]) -> None:
    expected, found = gradients(build(**sizes)), gradients(build(**sizes, **changes))
    torch.testing.assert_close(found, expected, **_CLOSE)
    assert all(g.abs().max() > 0 for g in expected.values())


@pytest.mark.feature("Linear attention: packed sequences do not mix")
@each_variant
def test_packed_sequences_have_the_losses_they_have_alone(sizes: dict[str, Any]) -> None:
    model, lengths = build(**sizes), (5, 11, 8)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends)
    ids, labels = tokens()[0], tokens()[0].roll(-1, 1)
    places = torch.cat([torch.arange(n) for n in lengths]).expand(2, LENGTH)
    whole = model(ids, places, None, labels=labels, packed_seq_params=packed)
    for start, stop in zip(ends.tolist(), ends.tolist()[1:], strict=False):
        part = slice(start, stop)
        alone = model(ids[:, part], tokens(stop - start)[1], None, labels=labels[:, part])
        torch.testing.assert_close(whole[:, part], alone, **_CLOSE)


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_a_checkpoint_of_format_torch_counts_each_parameter_once(implementation: str) -> None:
    layer = "decoder.layers.0."
    stored = [f"{layer}input_layernorm.weight", f"{layer}self_attention.in_proj.weight"]
    arguments = {"experimental_attention_variant": "gdn", "transformer_impl": implementation}
    names = [ours for _, ours in stage_names(stored, arguments, 0, experts=None) if ours in stored]
    assert sorted(names) == stored
