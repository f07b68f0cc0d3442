"""GPTModel: documents kept apart, caches, recomputation, positions, precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.enums import AttnBackend
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel import parallel_state
from megatron.core.params.param_info import info_of
from megatron.core.tensor_parallel.random import model_parallel_seed
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config

LENGTH, VOCABULARY = 12, 64
LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "num_query_groups": 2,
}


def build(position: str = "rope", model: dict[str, Any] | None = None, **layer: Any) -> GPTModel:
    torch.manual_seed(5)
    config = tiny_config(**{"init_method_std": 0.3, **LLAMA, **layer})
    spec = get_gpt_layer_local_spec(config=config)
    return GPTModel(
        config,
        spec,
        VOCABULARY,
        LENGTH,
        position_embedding_type=position,
        pg_collection=one_process_groups(),
        **(model or {}),
    )


def tokens(*, batch: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (batch, LENGTH), generator=generator)
    return ids, torch.arange(LENGTH).expand(batch, LENGTH)


def apart(*lengths: int) -> Tensor:
    """[1, 1, s, s], True where a key is in the future or in another document."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = torch.ones(LENGTH, LENGTH).tril().bool() & (document[:, None] == document)
    return ~seen[None, None]


BACKENDS = [AttnBackend.auto, AttnBackend.flash, AttnBackend.unfused, AttnBackend.local]


@pytest.mark.feature("Model: documents kept apart on every attention path, by mask or packed")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("position", ["rope", "learned_absolute", "alibi", "none"])
@pytest.mark.parametrize("extra", [{}, {"window_size": (3, 0)}])
def test_editing_one_document_leaves_the_next_one_alone(
    backend: AttnBackend, position: str, extra: dict[str, Any]
) -> None:
    model = build(position, attention_backend=backend, **extra).eval()
    ids, _ = tokens()
    restarted = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, LENGTH)
    edited = ids.clone()
    edited[:, :5] = (edited[:, :5] + 17) % VOCABULARY
    ends = torch.tensor([0, 5, LENGTH]).int()
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    with torch.no_grad():
        for mask, params in ((apart(5, 7), None), (None, packed)):
            before = model(ids, restarted, mask, packed_seq_params=params)
            after = model(edited, restarted, mask, packed_seq_params=params)
            assert torch.equal(before[:, 5:], after[:, 5:])
            assert not torch.equal(before[:, :5], after[:, :5])
        mixed = model(ids, restarted, None), model(edited, restarted, None)
        assert not torch.equal(mixed[0][:, 5:], mixed[1][:, 5:])


@pytest.mark.parametrize("position", ["rope", "learned_absolute", "alibi"])
def test_packed_sequences_are_what_each_gives_alone(position: str) -> None:
    model = build(position).eval()
    ids, positions = tokens(batch=1)
    ends = torch.tensor([0, 5, LENGTH]).int()
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    restarted = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad():
        together = model(ids, restarted, None, packed_seq_params=packed)
        for part in (slice(0, 5), slice(5, LENGTH)):
            length = part.stop - part.start
            alone = model(ids[:, part], positions[:, :length], None)
            torch.testing.assert_close(together[:, part], alone, **tolerances.LOGITS)


def test_a_causal_mask_changes_nothing_and_the_future_has_no_influence() -> None:
    model = build().eval()
    ids, positions = tokens()
    with torch.no_grad():
        plain = model(ids, positions, None)
        assert torch.equal(model(ids, positions, apart(LENGTH)), plain)
        ids[:, -1] = (ids[:, -1] + 1) % VOCABULARY
        assert torch.equal(model(ids, positions, None)[:, :-1], plain[:, :-1])


@pytest.mark.feature("Model: generation with a cache gives the logits of the whole sequence")
@pytest.mark.parametrize("position", ["rope", "learned_absolute", "alibi", "none"])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"window_size": (3, 0), "qk_layernorm": True},
        {"softmax_type": "learnable", "window_size": (3, 0), "window_attn_skip_freq": 2},
    ],
)
def test_a_cache_gives_the_logits_of_the_whole_sequence(
    position: str, extra: dict[str, Any]
) -> None:
    model = build(position, **extra).eval()
    ids, positions = tokens()
    cache = StaticInferenceContext(2, LENGTH)
    with torch.no_grad():
        expected = model(ids, positions, None)
        start = 0
        for count in (5, 1, 3, 1, 2):
            part = slice(start, start + count)
            out = model(ids[:, part], positions[:, part], None, inference_context=cache)
            cache.increment_sequence_len_offset(count)
            start += count
            assert out.shape == (2, 1, VOCABULARY)
            torch.testing.assert_close(out[:, 0], expected[:, start - 1], **tolerances.LOGITS)


def run_training(**layer: Any) -> tuple[list[Tensor], int]:
    """Loss and gradients of a step with dropout; bytes that forward keeps for backward."""
    dropout = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
    model = build(num_layers=3, **dropout, **layer)
    model_parallel_seed(9, tp_rank=0)
    ids, positions = tokens()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            held.append(x)
        return x

    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model(ids, positions, None, labels=ids).mean()
    storages = [x.untyped_storage() for x in held]
    size = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
    held.clear()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], size


RECOMPUTE: dict[str, dict[str, Any]] = {
    "uniform": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    },
    "block": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 2,
    },
    "core_attn": {"recompute_granularity": "selective"},
    "layernorm": {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    "all": {
        "recompute_granularity": "selective",
        "recompute_modules": ("core_attn", "layernorm", "mlp"),
    },
}


@pytest.mark.feature("Model: full and selective recomputation, gradients with the same bits")
@pytest.mark.parametrize("kind", RECOMPUTE)
@pytest.mark.parametrize("backend", [AttnBackend.auto, AttnBackend.unfused])
def test_recomputation_keeps_less_and_gives_the_same_bits(kind: str, backend: AttnBackend) -> None:
    expected, full_size = run_training(attention_backend=backend)
    found, size = run_training(attention_backend=backend, **RECOMPUTE[kind])
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert size < full_size


def test_parameters_are_named_globally_and_marked_by_what_they_are() -> None:
    groups = one_process_groups()
    config = tiny_config(num_layers=4, virtual_pipeline_model_parallel_size=2)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(config=config),
        VOCABULARY,
        LENGTH,
        pre_process=False,
        share_embeddings_and_output_weights=True,
        pg_collection=groups,
        vp_stage=1,
    )
    names = {info_of(p).name: info_of(p) for p in model.parameters()}
    assert "decoder.layers.2.input_layernorm.weight" in names
    assert "decoder.layers.3.mlp.linear_fc2.bias" in names
    assert "decoder.layers.0.mlp.linear_fc2.bias" not in names
    tied = names["embedding.word_embeddings.weight"]
    assert tied.is_duplicate
    assert tied.is_shared_embedding
    assert tied.is_embedding_or_output
    first = GPTModel(
        config,
        get_gpt_layer_local_spec(config=config),
        VOCABULARY,
        LENGTH,
        post_process=False,
        share_embeddings_and_output_weights=True,
        pg_collection=groups,
        vp_stage=0,
    )
    assert torch.equal(first.embedding.word_embeddings.weight, model.output_layer.weight)


def test_stages_one_after_the_other_are_the_whole_model() -> None:
    whole = build(num_layers=4).eval()
    stages = [
        build(
            model={"pre_process": stage == 0, "post_process": stage == 1, "vp_stage": stage},
            num_layers=4,
            virtual_pipeline_model_parallel_size=2,
        ).eval()
        for stage in (0, 1)
    ]
    ids, positions = tokens()
    with torch.no_grad():
        hidden = stages[0](ids, positions, None)
        stages[1].set_input_tensor([hidden])
        assert torch.equal(stages[1](ids, positions, None), whole(ids, positions, None))


def test_initial_weights_have_the_deviations_that_flags_ask_for() -> None:
    model = build(
        "learned_absolute",
        num_layers=8,
        hidden_size=64,
        init_method_std=0.1,
        embedding_init_method_std=0.5,
    )
    first = model.decoder.layers[0]
    for weight, std in (
        (model.embedding.word_embeddings.weight, 0.5),
        (model.embedding.position_embeddings.weight, 0.5),
        (first.self_attention.linear_qkv.weight, 0.1),
        (first.self_attention.linear_proj.weight, 0.1 / 4),
        (first.mlp.linear_fc2.weight, 0.1 / 4),
    ):
        assert float(weight.detach().std()) == pytest.approx(std, rel=0.1)
    xavier = build(init_method_xavier_uniform=True)
    weight = xavier.decoder.layers[0].mlp.linear_fc2.weight
    assert float(weight.detach().abs().max()) == pytest.approx(
        (6 / sum(weight.shape)) ** 0.5, rel=0.05
    )


def test_rope_may_be_left_out_of_layers() -> None:
    layers = build(num_layers=4, no_rope_freq=4).decoder.layers
    assert [x.self_attention.has_rope for x in layers] == [True, True, True, False]
    layers = build(num_layers=3, no_rope_freq=(1, 0, 1)).decoder.layers
    assert [x.self_attention.has_rope for x in layers] == [False, True, False]


def logits_of(**changes: Any) -> Tensor:
    ids, positions = tokens()
    with torch.no_grad():
        return build(**changes).eval()(ids, positions, None)


@pytest.mark.parametrize(
    "change",
    [
        {"no_rope_freq": 1},
        {"qk_l2_norm": True},
        {"apply_residual_connection_post_layernorm": True},
        {"rotary_interleaved": True},
        {"model": {"rotary_percent": 0.5}},
        {"model": {"rotary_base": 100}},
        {"model": {"seq_len_interpolation_factor": 4}},
        {"embedding_scale": 2.0},
        {"final_logit_softcapping": 1.0},
        {"softmax_scale": 0.01},
        {"layernorm_epsilon": 0.5},
        {"kv_channels": 16},
        {"num_query_groups": 4},
    ],
    ids=str,
)
def test_each_choice_of_architecture_matters(change: dict[str, Any]) -> None:
    assert not torch.allclose(logits_of(**change), logits_of(), atol=1e-3)


def test_a_norm_without_weights_replaces_the_one_with_weights() -> None:
    both = build(qk_l2_norm=True, qk_layernorm=True)
    assert not [name for name, _ in both.named_parameters() if "q_layernorm" in name]
    assert torch.equal(logits_of(qk_l2_norm=True, qk_layernorm=True), logits_of(qk_l2_norm=True))


def test_longrope_takes_its_factors_together() -> None:
    factors = {
        "longrope_short_factor": (1.0, 1.5, 2.0, 2.5),
        "longrope_long_factor": (3.0,) * 4,
        "longrope_original_max_position_embeddings": 6,
    }
    assert not torch.allclose(logits_of(**factors), logits_of(), atol=1e-3)
    with pytest.raises(ConfigError, match="LongRoPE needs --longrope-short-factor"):
        build(longrope_short_factor=(1.0,) * 4)


def test_bf16_parameters_run_with_a_float32_residual_stream() -> None:
    ids, positions = tokens()
    model = build(params_dtype=torch.bfloat16, fp32_residual_connection=True)
    seen = []
    model.decoder.layers[1].register_forward_hook(lambda _m, _i, out: seen.append(out[0].dtype))
    loss = model(ids, positions, None, labels=ids)
    loss.mean().backward()
    assert (loss.dtype, seen) == (torch.float32, [torch.float32])
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in model.parameters())
    expected = build()(ids, positions, None, labels=ids)
    torch.testing.assert_close(loss, expected, rtol=0.1, atol=0.1)


def test_frozen_parts_get_no_gradient_and_the_rest_does() -> None:
    model = build()
    model.decoder.layers[0].requires_grad_(False)
    model.embedding.requires_grad_(False)
    ids, positions = tokens()
    model(ids, positions, None, labels=ids).mean().backward()
    assert all(p.grad is None for p in model.decoder.layers[0].parameters())
    assert all(p.grad is not None for p in model.decoder.layers[1].parameters())


def test_wrong_inputs_are_named() -> None:
    model = build("learned_absolute")
    ids, positions = tokens()
    with pytest.raises(DataError, match=r"token ids from 3 to 64 do not fit a vocabulary of 64"):
        model(torch.tensor([[3, VOCABULARY]]), positions[:1, :2], None)
    with pytest.raises(DataError, match="vocabulary of 64"):
        model(ids, positions, None, labels=ids + VOCABULARY)
    with pytest.raises(IndexError):
        model(ids, positions + 1, None)
    with pytest.raises(ConfigError, match="--position-embedding-type relative is not one of"):
        build("relative")


@contextmanager
def installed() -> Iterator[None]:
    parallel_state.install(one_process_groups())
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def test_the_door_finds_the_installed_groups_and_the_default_seed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = tiny_config()
    with installed():
        for seed in (1, 2, 1):
            torch.manual_seed(seed)
            spec = get_gpt_layer_with_transformer_engine_spec(config=config)
            model = GPTModel(config, spec, VOCABULARY, LENGTH)
            block = GPTModel(config, get_gpt_decoder_block_spec(config), VOCABULARY, LENGTH)
            weights = [p.detach().clone() for p in model.parameters()]
            assert all(torch.equal(a, b) for a, b in zip(weights, block.parameters(), strict=True))
            if seed == 1:
                first = weights
    assert torch.equal(first[0], weights[0])


def test_a_spec_with_another_number_of_layers_is_refused() -> None:
    config = tiny_config()
    spec = get_gpt_decoder_block_spec(tiny_config(num_layers=5))
    with pytest.raises(ConfigError, match="the spec describes 5 layers, --num-layers is 2"):
        GPTModel(config, spec, VOCABULARY, LENGTH, pg_collection=one_process_groups())
