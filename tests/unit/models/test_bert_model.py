"""BertModel: what `transformers` computes with its weights; padding; the cheap way to losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pretrain_bert
from megatron.core.config.errors import ConfigError
from megatron.core.models.bert import bert_layer_specs
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from tests.support import tolerances
from tests.support.conversion_names import in_our_names
from tests.support.one_process import one_process_groups, tiny_config

LENGTH, VOCABULARY = 24, 96
LENGTHS = (24, 17, 9)  # of the sequences of a batch; the rest is padding


def bert(layer: dict[str, Any] | None = None, **model: Any) -> BertModel:
    torch.manual_seed(5)
    given = {"share_embeddings_and_output_weights": True, "num_tokentypes": 2} | model
    made = BertModel(
        tiny_config(**(layer or {})),
        transformer_layer_spec=bert_layer_local_spec,
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        pg_collection=one_process_groups(),
        **given,
    )
    return made.eval()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, VOCABULARY, (3, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]).long()
    is_hidden = (torch.rand(3, LENGTH, generator=generator) < 0.3) & (mask > 0)
    return {
        "ids": ids,
        "mask": mask,
        "types": (torch.arange(LENGTH) > 7).long().expand(3, LENGTH),
        "labels": torch.where(is_hidden, ids.flip(1), -1),
    }


@pytest.mark.feature("Model: BERT with its published layout: losses and gradients of transformers")
def test_it_computes_what_transformers_computes() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        attn_implementation="eager",
        pad_token_id=None,
    )
    hf = transformers.BertForPreTraining(config).eval()
    with torch.no_grad():
        for param in hf.parameters():
            param.add_(0.1 * torch.randn_like(param))
    post = {"apply_residual_connection_post_layernorm": True, "layernorm_epsilon": 1e-12}
    ours = bert(post)
    ours.load_state_dict(in_our_names(hf, dict(hf.named_parameters())))
    given = batch()
    seen = hf(given["ids"], attention_mask=given["mask"], token_type_ids=given["types"])
    logits, order = ours(given["ids"], given["mask"], given["types"])
    is_token = given["mask"] > 0
    wanted = seen.prediction_logits[is_token]
    torch.testing.assert_close(logits[is_token], wanted, **tolerances.LOGITS)
    torch.testing.assert_close(order, seen.seq_relationship_logits, **tolerances.LOGITS)

    is_random = torch.tensor([0, 1, 1])
    loss = F.cross_entropy(seen.prediction_logits.flatten(0, 1), given["labels"].flatten(),
                           ignore_index=-1)  # fmt: skip
    loss = loss + F.cross_entropy(seen.seq_relationship_logits, is_random)
    loss.backward()
    losses, order = ours(given["ids"], given["mask"], given["types"], lm_labels=given["labels"])
    own_loss = losses.sum() / (given["labels"] >= 0).sum() + F.cross_entropy(order, is_random)
    torch.testing.assert_close(own_loss, loss, **tolerances.LOGITS)
    own_loss.backward()
    wanted_grads = in_our_names(hf, {n: p.grad for n, p in hf.named_parameters()})
    for name, param in ours.named_parameters():
        error = (param.grad - wanted_grads[name]).norm()
        assert error <= tolerances.GRADIENT["rtol"] * wanted_grads[name].norm(), name


MODELS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"share_embeddings_and_output_weights": False, "unpadded_vocab_size": 90},
    "plain": {"add_binary_head": False, "num_tokentypes": 0, "position_embedding_type": "rope"},
}


@pytest.mark.parametrize("kind", MODELS)
def test_losses_of_hidden_tokens_are_those_of_all_tokens(kind: str) -> None:
    model, given = bert(**MODELS[kind]).double(), batch()
    given["ids"], given["labels"] = given["ids"] % 90, given["labels"] % 90 * (given["labels"] >= 0)
    given["labels"] -= (batch()["labels"] < 0).long()
    types = given["types"] if model.add_binary_head else None
    results = []

    def losses_of_all(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model.token_losses(model.lm_head(hidden), labels)

    for way in (model.hidden_token_losses, losses_of_all):
        model.zero_grad()
        model.hidden_token_losses = way  # type: ignore[method-assign]
        losses, order = model(given["ids"], given["mask"], types, lm_labels=given["labels"])
        assert (losses[given["labels"] < 0] == 0).all()
        assert (order is None) == (kind == "plain")
        (losses * torch.linspace(0.5, 1.5, LENGTH)).sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append({"losses": losses, **grads})
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        close = tolerances.of(torch.float64)
        torch.testing.assert_close(
            value, results[1][name], **close, msg=lambda m, n=name: f"{n} {m}"
        )


def test_padding_changes_nothing_of_what_is_before_it() -> None:
    model, given = bert(), batch()
    logits, order = model(given["ids"], given["mask"], given["types"])
    for i, length in enumerate(LENGTHS):
        row = slice(i, i + 1)
        alone, its_order = model(given["ids"][row, :length], None, given["types"][row, :length])
        torch.testing.assert_close(logits[row, :length], alone, **tolerances.LOGITS)
        torch.testing.assert_close(order[row], its_order, **tolerances.LOGITS)


def test_a_mask_is_made_only_where_there_is_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    attend = DotProductAttention.attend

    def noted(self: Any, qkv: tuple[Tensor, Tensor, Tensor], context: Any) -> Tensor:
        seen.append(None if context.hidden is None else tuple(context.hidden.shape))
        return attend(self, qkv, context)

    monkeypatch.setattr(DotProductAttention, "attend", noted)
    model, given = bert(), batch()
    model(given["ids"], given["mask"], given["types"])
    model(given["ids"], torch.ones_like(given["mask"]), given["types"])
    model(given["ids"], None, given["types"])
    assert seen == [(3, 1, 1, LENGTH)] * 2 + [None] * 4


@pytest.mark.feature("BERT: mean-pooled vectors of texts")
def test_embeddings_are_means_over_the_text() -> None:
    given = batch()
    given["mask"][2] = torch.arange(LENGTH) < 2  # [CLS] [SEP] and nothing between
    model = bert(return_embeddings=True)
    hidden: list[Tensor] = []
    model.encoder.register_forward_hook(lambda _m, _i, out: hidden.append(out))
    pooled = model(given["ids"], given["mask"], given["types"])
    states = hidden[0].transpose(0, 1)
    torch.testing.assert_close(pooled[0], states[0, 1:23].mean(0), **tolerances.LOGITS)
    torch.testing.assert_close(pooled[1], states[1, 1:16].mean(0), **tolerances.LOGITS)
    assert (pooled[2] == 0).all()
    assert model(given["ids"], None, given["types"]).shape == (3, 32)


def test_what_it_cannot_be_is_told() -> None:
    with pytest.raises(ConfigError, match="--position-embedding-type alibi"):
        bert(position_embedding_type="alibi")


def test_the_spec_of_transformer_engine_is_made_when_asked_for() -> None:
    spec = bert_layer_specs.bert_layer_with_transformer_engine_spec
    assert spec.submodules.self_attention.params == {
        "attn_mask_type": bert_layer_specs.AttnMaskType.padding
    }
    with pytest.raises(AttributeError):
        bert_layer_specs.no_such_spec  # noqa: B018


def test_the_order_counts_in_samples_with_nothing_hidden_and_not_in_filler() -> None:
    losses, order = torch.zeros(3, 8), torch.randn(3, 2)
    nothing_hidden, is_random = torch.zeros(3, 8), torch.tensor([1, 0, -1])
    loss, num_tokens, told = pretrain_bert.loss_func(nothing_hidden, is_random, (losses, order))
    wanted = F.cross_entropy(order[:2], is_random[:2])
    torch.testing.assert_close(loss / num_tokens, wanted)
    torch.testing.assert_close(told["sop loss"], torch.stack([2 * wanted, torch.tensor(2.0)]))


def test_the_output_scale_is_applied() -> None:
    plain, scaled = bert(), bert({"output_scale": 0.5})
    given = batch()
    arguments = given["ids"], given["mask"], given["types"]
    assert not torch.equal(plain(*arguments)[0], scaled(*arguments)[0])
    told = [m(*arguments, lm_labels=given["labels"])[0] for m in (plain, scaled)]
    assert not torch.equal(*told)
