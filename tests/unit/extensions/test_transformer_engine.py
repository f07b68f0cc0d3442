"""What Transformer Engine's modules are told, and where our own layers take their place."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core import device
from megatron.core.config.errors import ConfigError, MissingDependency
from megatron.core.enums import AttnBackend, AttnMaskType
from megatron.core.extensions import transformer_engine as te
from megatron.core.extensions.transformer_engine import attention, engine
from megatron.core.models.gpt.gpt_layer_specs import (
    LOCAL,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    transformer_engine_parts,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.params.param_info import info_of, name_parameters
from megatron.core.params.param_init import initialize_parameters
from megatron.core.peft.lora import LoraConfig, attach_adapters
from megatron.core.tensor_parallel.random import get_rng_tracker, model_parallel_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from tests.support import tolerances
from tests.support.fake_transformer_engine import installed
from tests.support.one_process import one_process_groups, one_rank, tiny_config
from tests.support.ranks import run_ranks

S, B, N, G, D = 8, 2, 4, 2, 8


def qkv(dtype: torch.dtype = torch.float64, b: int = B) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(S, b, heads, D, generator=generator, dtype=dtype).requires_grad_()
        for heads in (N, G, G)
    ]


def cores(**changes: Any) -> tuple[Any, Any]:
    """The package's core and ours, with the same sinks."""
    config = tiny_config(num_query_groups=G, params_dtype=torch.float64, **changes)
    both = [kind(config, 2) for kind in (te.TEDotProductAttention, DotProductAttention)]
    for core in both:
        if core.softmax_offset is not None:
            nn.init.constant_(core.softmax_offset, 0.5)
    return both[0], both[1]


def values_and_gradients(core: Any, inputs: list[Tensor], **more: Any) -> list[Tensor]:
    out = core(*inputs, **more)
    parameters = list(core.parameters())
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), [*inputs, *parameters])]


def packed() -> PackedSeqParams:
    ends = torch.tensor([0, 3, S], dtype=torch.int32)
    return PackedSeqParams(cu_seqlens_q=ends, cu_seqlens_kv=ends)


KINDS = {
    "causal": ({}, {}, {"mask": "causal"}),
    "window": ({"window_size": (2, 0)}, {}, {"window": (2, 0)}),
    "bidirectional": ({}, {"attn_mask_type": AttnMaskType.padding}, {"mask": "no_mask"}),
    "packed": ({}, {"packed_seq_params": packed()}, {"mask": "padding_causal", "format": "thd"}),
    "sink": ({"softmax_type": "learnable"}, {}, {"mask": "causal"}),
    "zero sink": ({"softmax_type": "off-by-one"}, {}, {"mask": "causal"}),
}


@pytest.mark.parametrize(("changes", "call", "told"), KINDS.values(), ids=KINDS)
def test_attention_is_the_formula(changes, call, told):
    with installed() as calls:
        mine, ours = cores(**changes)
        inputs = qkv(b=1 if "packed_seq_params" in call else B)
        found = values_and_gradients(mine, inputs, **call)
        expected = values_and_gradients(ours, inputs, **call)
    for have, want in zip(found, expected, strict=True):
        torch.testing.assert_close(have, want, **tolerances.of(torch.float64))
    assert len(calls) == 1
    assert told.items() <= calls[0].items()


@pytest.mark.parametrize(
    ("changes", "call"),
    [
        ({}, {"attention_bias": torch.zeros(1, N, S, S, dtype=torch.float64)}),
        ({}, {"attention_mask": torch.zeros(B, 1, S, S, dtype=torch.bool)}),
        ({"attn_logit_softcapping": 5.0}, {}),
        ({"apply_query_key_layer_scaling": True}, {}),
        ({"attention_backend": AttnBackend.unfused}, {}),
    ],
)
def test_what_its_kernels_do_not_do_goes_our_way(changes, call):
    with installed() as calls:
        mine, ours = cores(**changes)
        assert torch.equal(mine(*qkv(), **call), ours(*qkv(), **call))
    assert not calls


def test_dropout_draws_from_the_stream_of_this_rank():
    with installed():
        mine, _ = cores(attention_dropout=0.5)
        model_parallel_seed(1, tp_rank=0)
        try:
            before = torch.get_rng_state()
            dropped = mine(*qkv())
            assert torch.equal(torch.get_rng_state(), before)
            assert not torch.equal(mine(*qkv()), dropped)
            mine.eval()
            assert torch.equal(mine(*qkv()), mine(*qkv()))
        finally:
            get_rng_tracker().reset()


def test_kernels_are_chosen_by_its_own_variables():
    with mock.patch.dict(os.environ), installed():
        cores(attention_backend=AttnBackend.fused)
        assert (os.environ["NVTE_FLASH_ATTN"], os.environ["NVTE_FUSED_ATTN"]) == ("0", "1")
        with pytest.raises(ConfigError, match="--attention-backend flash and NVTE_FLASH_ATTN=0"):
            cores(attention_backend=AttnBackend.flash)


CP_KINDS = {"p2p": "p2p", "a2a": "a2a", "allgather": "all_gather", "a2a+p2p": "a2a+p2p"}


def what_cp_ranks_tell(rank: int, world_size: int, size: int) -> list[tuple[Any, ...]]:
    told = []
    for kind in CP_KINDS:
        levels = (2, 2) if kind == "a2a+p2p" else None
        if (levels is None) != (size == 2):
            continue
        groups = create_process_groups(*make_grids(size, cp=size), context_levels=levels)
        config = tiny_config(num_query_groups=G, cp_comm_type=(kind,), context_parallel_size=size)
        with installed() as calls:
            core = te.TEDotProductAttention(config, 1, pg_collection=groups)
            core(*qkv(torch.float32))
            (call,) = calls
            if kind == "a2a":  # one head of keys is none for each rank
                query, key, value = qkv(torch.float32)
                core(query, key[:, :, :1], value[:, :, :1])
                assert len(calls) == 1
        cp = call["cp"]
        sizes = [g.size() for g in cp] if isinstance(cp, list) else cp.size()
        told.append((kind, call["cp_type"], sizes, call["cp_ranks"]))
    return told


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_share_a_sequence_are_told_of_each_other(size):
    for told in run_ranks(what_cp_ranks_tell, size, size):
        sizes: Any = [2, 2] if size == 4 else 2
        kinds = [kind for kind in CP_KINDS if (kind == "a2a+p2p") == (size == 4)]
        assert told == [(kind, CP_KINDS[kind], sizes, list(range(size))) for kind in kinds]


def test_the_rings_of_all_layers_share_their_second_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is freed on a stream serves this stream alone."""
    monkeypatch.setattr(device, "side_stream", object)
    monkeypatch.setattr(device, "current", lambda: torch.device("meta"))
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0])
    comm: Any = SimpleNamespace(heads=None, ring="ring", cp="cp")
    streams = [attention._comm_arguments(comm)["cp_stream"] for _ in range(2)]
    assert streams[0] is streams[1]


def model_of(spec: Any, config: Any) -> GPTModel:
    model = GPTModel(config, spec, 16, 8, pg_collection=one_process_groups())
    name_parameters(model)
    initialize_parameters(model, seed=1)
    return model


MODELS: dict[str, dict[str, Any]] = {
    "dense": {"normalization": "RMSNorm", "qk_layernorm": True, "add_qkv_bias": True},
    "norm by itself": {"fp32_residual_connection": True},
    "1p": {"layernorm_zero_centered_gamma": True},
    "sandwich": {"layer_norm_placement": "sandwich"},
    "latent": {
        "multi_latent_attention": True,
        **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4},
        "v_head_dim": 8,
    },
}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_a_model_has_the_same_parameters_values_and_gradients(changes):
    config = tiny_config(params_dtype=torch.float64, **changes)
    tokens, ids = torch.arange(16).view(2, 8) % 11, torch.arange(8).expand(2, 8)
    found = []
    with installed():
        for make in (get_gpt_layer_with_transformer_engine_spec, get_gpt_layer_local_spec):
            extra = {"position_embedding_type": "rope"} if "q_lora_rank" in changes else {}
            model = GPTModel(
                config, make(config=config), 16, 8, pg_collection=one_process_groups(), **extra
            )
            name_parameters(model)
            initialize_parameters(model, seed=1)
            loss = model(tokens, ids, None, labels=tokens).sum()
            loss.backward()
            named = {info_of(p).name: (info_of(p), p.detach(), p.grad) for p in model.parameters()}
            found.append((loss, named))
    (loss, mine), (expected, ours) = found
    torch.testing.assert_close(loss, expected, **tolerances.of(torch.float64))
    assert mine.keys() == ours.keys()
    for name, (info, value, grad) in ours.items():
        assert mine[name][0] == info
        assert torch.equal(mine[name][1], value)
        torch.testing.assert_close(mine[name][2], grad, **tolerances.of(torch.float64))


def test_without_the_package_a_recipe_says_what_is_missing():
    with pytest.raises(MissingDependency, match="engine: transformer_engine.common.recipe"):
        te.TEDelayedScaling(tiny_config(), "hybrid")


def test_what_cannot_be_had_is_said_once_or_refused(caplog):
    config = tiny_config(fp8="hybrid", fp8_wgrad=False)
    with installed():
        for _ in range(2):
            parts = transformer_engine_parts(config)
        with pytest.raises(MissingDependency, match="-engine for matrices: --no-fp8-wgrad"):
            transformer_engine_parts(config.changed(require_transformer_engine=True))
    assert (parts.norm, parts.column) == (te.TENorm, LOCAL.column)
    (said,) = [r.message for r in caplog.records]
    assert "engine falls back to local for matrices: --no-fp8-wgrad: this program's" in said
    with pytest.raises(MissingDependency, match="--require-transformer-engine: transformer_en"):
        transformer_engine_parts(tiny_config(require_transformer_engine=True))


def test_products_of_fp32_stay_whole():
    with installed():
        assert te.unsupported_matrices_reason(tiny_config()) is None
        with mock.patch.object(engine, "DTYPES", (torch.bfloat16,)):
            assert "in full torch.float32" in str(te.unsupported_matrices_reason(tiny_config()))
            assert te.unsupported_matrices_reason(tiny_config(params_dtype=torch.bfloat16)) is None


@pytest.mark.parametrize(
    ("version", "reason"), [("1.13.0", "version 1.13.0 is older than 2.4"), ("2.4.0+cu128", None)]
)
def test_an_old_version_is_told_from_a_known_one(version, reason):
    with installed(version):
        assert te.unsupported_reason() == reason


def test_a_scripts_own_layers_compute_alone():
    config = tiny_config(params_dtype=torch.float64)
    with installed():
        layer = te.TELinear(8, 4, config=config, init_method=config.init_method, bias=True)
        norm = te.TENorm(config, 8, 1e-5)
        for param in (*layer.parameters(), *norm.parameters()):
            nn.init.normal_(param)
        x = torch.randn(3, 8, dtype=torch.float64)
        want = nn.functional.layer_norm(x, (8,), norm.weight, norm.bias)
        torch.testing.assert_close(norm(x), want)
        want = nn.functional.linear(x, layer.weight, layer.bias)
        torch.testing.assert_close(layer(x)[0], want)
        recipe = te.TEDelayedScaling(config, "hybrid")
    assert (recipe.fp8_format, recipe.amax_history_len) == ("hybrid", config.fp8_amax_history_len)
    assert [len(part) for part in te.SplitAlongDim(x, 1, [3, 5])[0:1]] == [3]


def test_a_spec_with_matrices_that_cannot_quantize_is_refused():
    config = tiny_config(fp8="hybrid", fp8_wgrad=False, params_dtype=torch.bfloat16)
    with installed():
        spec = get_gpt_layer_with_transformer_engine_spec()
        with pytest.raises(ConfigError, match="names matrices of Transformer Engine: --no-fp8-wg"):
            model_of(spec, config)


def test_a_gather_of_codes_without_effect_leaves_matrices_to_the_package() -> None:
    quantized = tiny_config(fp8="e4m3", fp8_param=True, bf16=True, fp8_recipe="tensorwise")
    assert "--fp8-param-gather" in str(quantized.why_own_matrices)
    assert replace(quantized, fp8_recipe="mxfp8").why_own_matrices is None


def test_layers_of_the_package_take_no_adapters() -> None:
    with installed():
        layer = te.TEColumnParallelLinear(
            8,
            8,
            config=tiny_config(),
            init_method=tiny_config().init_method,
            tp_group=one_rank(),
        )
        name_parameters(layer)
        with pytest.raises(ConfigError, match=r"layers of Transformer Engine take no adapters"):
            attach_adapters(layer, LoraConfig(rank=2, alpha=2.0, targets=("all-linear",)))
