"""Mamba and hybrid models: their names, recurrent generation, recomputation, packed sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.inference.paged_engine.engine import Engine, EngineOptions
from megatron.core.inference.paged_engine.request import Request
from megatron.core.inference.paged_engine.runner import GenerationModel
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.models.mamba import MambaModel
from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.params.param_info import info_of
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config

VOCABULARY, LENGTH = 50, 24


def build(pattern: str, position: str = "none", **changes: Any) -> MambaModel:
    sizes = {"mamba_state_dim": 6, "mamba_head_dim": 8, "mamba_num_groups": 2}
    config = tiny_config(
        params_dtype=torch.float64, num_layers=len(pattern), init_method_std=0.1, **sizes, **changes
    )
    torch.manual_seed(5)
    return MambaModel(
        config,
        mamba_stack_spec,
        VOCABULARY,
        LENGTH,
        hybrid_override_pattern=pattern,
        position_embedding_type=position,
        pg_collection=one_process_groups(),
    )


def tokens(length: int = LENGTH) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(2))
    return ids, torch.arange(length).expand(2, length)


def test_parameters_have_the_names_of_the_reference() -> None:
    names = {info_of(p).name for p in build("M*-").parameters()}
    mixer = ("in_proj.weight", "conv1d.weight", "conv1d.bias", "A_log", "D", "dt_bias")
    expected = {f"decoder.layers.0.mixer.{n}" for n in (*mixer, "norm.weight", "out_proj.weight")}
    assert expected <= names
    assert {"decoder.layers.0.norm.weight", "decoder.final_norm.weight"} <= names
    assert "decoder.layers.1.self_attention.linear_qkv.weight" in names
    assert "decoder.layers.1.input_layernorm.weight" in names
    assert "decoder.layers.2.pre_mlp_layernorm.weight" in names
    assert not any(n.startswith("decoder.layers.1.mlp") for n in names)


@pytest.mark.feature("Mamba: generation by recurrent state, hybrids with keys and values beside it")
@pytest.mark.parametrize(("pattern", "position"), [("MM", "none"), ("M*-M", "rope")])
def test_token_by_token_gives_the_logits_of_the_whole(pattern: str, position: str) -> None:
    model = build(pattern, position).eval()
    ids, places = tokens()
    cache, found = StaticInferenceContext(2, LENGTH), []
    with torch.no_grad():
        whole = model(ids, places, None)
        for start, stop in ((0, 7), (7, 12), *((i, i + 1) for i in range(12, LENGTH))):
            part = slice(start, stop)
            found.append(model(ids[:, part], places[:, part], None, inference_context=cache))
            cache.increment_sequence_len_offset(stop - start)
    expected = whole[:, [6, 11, *range(12, LENGTH)]]
    torch.testing.assert_close(torch.cat(found, 1), expected, **tolerances.of(torch.float64))


def test_greedy_generation_takes_the_most_likely_token_of_each_full_pass() -> None:
    model = build("M*M").eval()
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
    ids = tokens(5)[0][0].tolist()
    params = SamplingParams(num_tokens_to_generate=10, top_k=1)
    written = [t.token for t in engine.generate([Request("one", list(ids), params)])["one"]]
    for token in written:
        with torch.no_grad():
            logits = model(torch.tensor([ids]), torch.arange(len(ids))[None], None)
        assert token == int(logits[0, -1].argmax())
        ids = [*ids, token]
    assert len(set(written)) > 1


def gradients(model: MambaModel, **kwargs: Any) -> dict[str, Tensor]:
    ids, places = tokens()
    losses = model(ids, places, None, labels=ids.roll(-1, 1), **kwargs)
    (losses * torch.linspace(0.5, 1.5, losses.numel()).view(losses.shape)).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"losses": losses.detach(), **{n: g for n, g in grads.items() if g is not None}}


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform"},
        {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "mlp")},
    ],
)
def test_recomputation_changes_no_gradient(changes: dict[str, Any]) -> None:
    expected, found = gradients(build("M*-M")), gradients(build("M*-M", **changes))
    torch.testing.assert_close(found, expected, **tolerances.of(torch.float64))
    assert all(g.abs().max() > 0 for g in expected.values())


def test_packed_sequences_have_the_losses_they_have_alone() -> None:
    model, lengths = build("M*M"), (5, 11, 8)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends)
    whole = gradients(model, packed_seq_params=packed)["losses"]
    ids, labels = tokens()[0], tokens()[0].roll(-1, 1)
    for start, stop in zip(ends.tolist(), ends.tolist()[1:], strict=False):
        part = slice(start, stop)
        alone = model(ids[:, part], tokens(stop - start)[1], None, labels=labels[:, part])
        torch.testing.assert_close(whole[:, part], alone, **tolerances.of(torch.float64))
