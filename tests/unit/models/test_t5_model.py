"""T5Model: the numbers of transformers, masks, positions, recomputation, caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core import device
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.inference.paged_engine.engine import Engine, EngineOptions
from megatron.core.inference.paged_engine.request import Request
from megatron.core.inference.paged_engine.runner import GenerationModel
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.models.T5 import T5Model
from megatron.core.params.param_info import info_of
from tests.support import tolerances
from tests.support.conversion_names import in_our_names
from tests.support.t5_models import VOCABULARY, Shape, build_t5, build_transformers

SHAPES = {"original": Shape(), "v1.1": Shape(is_v11=True)}


def with_same_weights(shape: Shape, times: float = 1.0) -> tuple[T5Model, Any]:
    pytest.importorskip("transformers")
    theirs, ours = build_transformers(shape), build_t5(shape)
    for name, param in theirs.named_parameters():
        param.data.mul_(1.0 if "norm" in name or "shared" in name else times)
    copied = in_our_names(theirs, dict(theirs.state_dict()))
    names = {info_of(p).name: p for p in ours.parameters()}
    assert names.keys() == copied.keys()
    with torch.no_grad():
        for name, param in names.items():
            param.zero_()[: len(copied[name])] = copied[name]
    return ours, theirs


def batch(sources: int = 11, targets: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Source and target ids, labels, and which source tokens are padding."""
    generator = torch.Generator().manual_seed(3)
    source = torch.randint(2, VOCABULARY, (3, sources), generator=generator)
    labels = torch.randint(2, VOCABULARY, (3, targets), generator=generator)
    target = torch.cat([torch.zeros(3, 1, dtype=torch.int64), labels[:, :-1]], 1)
    padding = torch.arange(sources) >= torch.tensor([[sources], [sources - 4], [sources - 1]])
    return source, target, labels, padding


@pytest.mark.feature("Model: T5, original and v1.1, gives the logits and gradients of transformers")
@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_gradients_are_those_of_transformers(name: str) -> None:
    shape = SHAPES[name]
    ours, theirs = with_same_weights(shape)
    source, target, labels, padding = batch()
    wanted = theirs(input_ids=source, attention_mask=(~padding).long(), labels=labels)
    logits = ours(source, target, padding, None, padding)
    torch.testing.assert_close(logits, wanted.logits, **tolerances.LOGITS)
    loss = ours(source, target, padding, None, padding, lm_labels=labels).mean()
    torch.testing.assert_close(loss, wanted.loss, **tolerances.LOGITS)
    loss.backward()
    wanted.loss.backward()
    gradients = in_our_names(theirs, {n: p.grad for n, p in theirs.named_parameters()})
    for param in ours.parameters():
        found = gradients[info_of(param).name]
        grad = param.grad[: len(found)]
        torch.testing.assert_close(
            grad, found, **tolerances.GRADIENT, msg=lambda m, p=param: f"{info_of(p).name}: {m}"
        )


@pytest.mark.parametrize("name", SHAPES)
def test_a_cache_gives_the_logits_of_the_whole_sequence(name: str) -> None:
    model = build_t5(SHAPES[name]).eval()
    source, target, _, padding = batch()
    with torch.no_grad():
        whole = model(source, target, padding, None, padding)
        encoded = model(source, None, padding, output_encoder_hidden_only=True)
        cache = StaticInferenceContext(3, 16)
        for start, stop in ((0, 3), (3, 4), (4, 7)):
            new = model(
                None, target[:, start:stop], None, None, padding, encoder_hidden_states=encoded,
                inference_context=cache,
            )  # fmt: skip
            cache.increment_sequence_len_offset(stop - start)
            torch.testing.assert_close(new[:, -1], whole[:, stop - 1], **tolerances.LOGITS)


@pytest.mark.parametrize("position", ["learned_absolute", "rope", "relative", "none"])
def test_padding_and_later_tokens_have_no_influence(position: str) -> None:
    model = build_t5(position=position).eval()
    source, target, _, padding = batch()
    edited = torch.where(padding, (source + 7) % VOCABULARY, source)
    later = target.clone()
    later[:, 4:] = (later[:, 4:] + 5) % VOCABULARY
    with torch.no_grad():
        before = model(source, target, padding, None, padding)
        torch.testing.assert_close(model(edited, target, padding, None, padding), before)
        after = model(source, later, padding, None, padding)
        torch.testing.assert_close(after[:, :4], before[:, :4])
        assert not torch.equal(after[:, 4:], before[:, 4:])
        assert not torch.equal(model(edited, target), model(source, target))
        moved = model(source.flip(1), target)
        same = torch.allclose(moved, model(source, target), atol=1e-5)
        assert same == (position == "none")


@pytest.mark.feature(
    "Model: T5 takes its masks as rows of padding or as squares of queries and keys"
)
def test_every_form_of_a_mask_says_the_same() -> None:
    model = build_t5().eval()
    source, target, _, padding = batch()
    own = torch.arange(7) >= torch.tensor([[7], [5], [6]])
    later = torch.ones(7, 7).triu(1).bool()
    with torch.no_grad():
        rows = model(source, target, padding, own, padding)
        squares = model(
            source,
            target,
            padding[:, None, :] | padding[:, :, None],
            (own[:, None, :] | own[:, :, None] | later)[:, None],
            padding[:, None, None, :] | own[:, None, :, None],
        )
        seen = ~own
        torch.testing.assert_close(squares[seen], rows[seen], **tolerances.LOGITS)
        assert squares.isfinite().all()


RECOMPUTED: dict[str, dict[str, Any]] = {
    "core": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "parts": {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]},
    "full": {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2,
    },
    "block": {
        "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("position", ["relative", "rope"])
@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputation_changes_no_gradient(name: str, position: str) -> None:
    gradients = []
    source, target, labels, padding = batch()
    for changes in ({}, RECOMPUTED[name]):
        model = build_t5(position=position, params_dtype=torch.float64, **changes)
        model(source, target, padding, None, padding, lm_labels=labels).mean().backward()
        gradients.append({info_of(p).name: p.grad for p in model.parameters()})
    torch.testing.assert_close(*gradients, **tolerances.of(torch.float64))
    if position == "relative":
        for half in ("encoder", "decoder"):
            assert gradients[0][f"{half}_relative_pos_emb.relative_attention_bias.weight"].any()


def test_linear_biases_bring_one_for_a_tied_vocabulary() -> None:
    names = {info_of(p).name for p in build_t5(add_bias_linear=True).parameters()}
    assert "lm_head.output_layer.bias" in names
    assert "lm_head.output_layer.weight" not in names
    model = build_t5(add_bias_linear=True)
    source, target, labels, padding = batch()
    losses = model(source, target, padding, None, padding, lm_labels=labels)
    logits = model(source, target, padding, None, padding)
    wanted = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(losses, wanted, **tolerances.LOGITS)
    losses.sum().backward()
    assert model.output_layer.bias.grad.any()


@pytest.mark.feature("Model: T5 writes greedily with caches what transformers writes")
@pytest.mark.parametrize("name", SHAPES)
def test_greedy_generation_is_that_of_transformers_and_of_whole_passes(name: str) -> None:
    ours, theirs = with_same_weights(SHAPES[name], times=3.0)  # else it repeats one word
    ours.eval()
    source = batch()[0][2:]
    engine = Engine(
        GenerationModel(
            module=ours, config=ours.config, groups=ours.pg_collection, device=device.current(),
            vocab_size=VOCABULARY, max_sequence_length=32, eod=1, decoder_start=0,
        ),
        EngineOptions(page_size=4),
    )  # fmt: skip
    params = SamplingParams(temperature=0, num_tokens_to_generate=12)
    request = Request("one", [0], params, source=source[0].tolist())
    found = [item.token for item in engine.generate([request])["one"]]
    # Their cache has as many layers as the encoder.
    options = {"do_sample": False, "num_beams": 1, "use_cache": False}
    wanted = theirs.generate(source, max_new_tokens=12, **options)
    assert found == wanted[0, 1:].tolist()
    target = torch.tensor([[0, *found[:-1]]])
    with torch.no_grad():
        assert ours(source, target).argmax(-1)[0].tolist() == found
    assert len(set(found)) > 2


def test_padding_in_a_window_of_padding_is_no_nan() -> None:
    config = {"window_size": (2, 0), "attn_logit_softcapping": 30.0}
    model = build_t5(Shape(), **config)
    source, target, labels, padding = batch()
    loss = model(source, target, padding, None, padding, lm_labels=labels)
    assert loss.isfinite().all()
    edited = torch.where(padding, (source + 7) % VOCABULARY, source)
    torch.testing.assert_close(
        model(edited, target, padding, None, padding, lm_labels=labels), loss
    )
