"""DeepSeek Sparse Attention: values, losses, generation, recomputation, packed sequences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.dist_checkpointing.megatron_formats.names import stage_names
from megatron.core.enums import AttnBackend
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.inference.paged_engine.engine import Engine, EngineOptions
from megatron.core.inference.paged_engine.request import Request
from megatron.core.inference.paged_engine.runner import GenerationModel
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.models.gpt.gpt_layer_specs import LOCAL, decoder_block_of
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedBounds, PackedSeqParams
from megatron.core.transformer.context_parallel import AttentionContext
from megatron.core.transformer.lightning_indexer import index_scores, select
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config

VOCABULARY, LENGTH, TOPK = 50, 24, 5
LATENT = {
    **{"multi_latent_attention": True, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_head_dim": 8},
    **{"qk_pos_emb_head_dim": 4, "v_head_dim": 6, "qk_layernorm": True},
    **{"normalization": "RMSNorm", "init_method_std": 0.3},
}
SPARSE = {
    **{"experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 6},
    **{"dsa_indexer_head_dim": 8, "dsa_indexer_topk": TOPK},
}
SHARED = {"dsa_indexer_topk_freq": 2, "dsa_indexer_skip_topk_offset": 1}
_CLOSE = tolerances.of(torch.float64)


def build(*parts: dict[str, Any], **changes: Any) -> GPTModel:
    values = {**LATENT, **{k: v for part in parts or (SPARSE,) for k, v in part.items()}, **changes}
    config = tiny_config(params_dtype=torch.float64, num_layers=4, **values)
    torch.manual_seed(5)
    return GPTModel(
        config,
        decoder_block_of(LOCAL, config),
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


def packed(*lengths: int) -> PackedSeqParams:
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends)


def uses_blocks(model: GPTModel, hidden: Tensor) -> bool:
    core = model.decoder.layers[0].self_attention.core_attention
    return core.trains_by_blocks(hidden.unsqueeze(2)[..., :12], AttentionContext(is_causal=True))


def test_equal_scores_are_decided_for_earlier_keys_in_blocks_of_any_length() -> None:
    scores = torch.tensor([[[0.0, 2.0, 0.0, 1.0, 0.0, 0.0]]])
    visible = torch.tensor([[[True, True, True, True, True, False]]])
    for length in (5, 6):
        mask = select(scores[..., :length], visible[..., :length], 3)
        assert mask.nonzero()[:, 2].tolist() == [0, 1, 3]
    assert select(scores, torch.arange(6) < 2, 3).sum() == 2


def plain_attention(model: GPTModel, hidden: Tensor, use_sparse: bool) -> tuple[Tensor, Tensor]:
    """Return the output of the first layer's attention, and the loss of its indexer."""
    layer = model.decoder.layers[0].self_attention
    table = layer.rotary_pos_emb.table_at(torch.arange(len(hidden)), len(hidden), torch.float64)
    q, k, v, (iq, w, ik) = layer.get_query_key_value_tensors(hidden, rotary=table)
    causal = torch.ones(len(hidden), len(hidden)).triu(1).bool()
    index = torch.relu(torch.einsum("sbhd,tbd->bsht", iq, ik))
    index = torch.einsum("bsht,sbh->bst", index, w).masked_fill(causal, -math.inf)
    best = index.topk(TOPK).indices
    hidden_keys = torch.ones_like(index, dtype=torch.bool).scatter(-1, best, False) | causal
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * layer.softmax_scale
    probs = scores.masked_fill(hidden_keys.unsqueeze(1), -math.inf).softmax(-1)
    out = torch.einsum("bnst,tbnd->sbnd", probs, v[..., : layer.value_width])
    over = hidden_keys if use_sparse else causal.expand_as(hidden_keys)
    target = scores.masked_fill(over.unsqueeze(1), -math.inf).softmax(-1).mean(1).detach()
    logs = index.masked_fill(over, -math.inf).log_softmax(-1)
    kept = (target > 0) & ~over
    terms = (target * (target.log() - logs))[kept]
    return layer.linear_proj(out.flatten(2))[0], terms.sum() / (2 * len(hidden))


@pytest.mark.feature("Sparse attention: DeepSeek's indexer with its dense and sparse loss")
@pytest.mark.parametrize("use_sparse", [False, True])
def test_values_and_gradients_are_those_of_the_formulas(use_sparse: bool) -> None:
    model = build(dsa_indexer_loss_coeff=0.7, dsa_indexer_use_sparse_loss=use_sparse)
    layer = model.decoder.layers[0].self_attention
    hidden = torch.randn(LENGTH, 2, 32, dtype=torch.float64, requires_grad=True)
    found, _ = layer(hidden)
    weight = torch.randn_like(found)
    expected, loss = plain_attention(model, hidden, use_sparse)
    torch.testing.assert_close(found, expected, **_CLOSE)
    torch.testing.assert_close(layer.aux_losses.take()["indexer_loss"], loss, **_CLOSE)
    wanted = [hidden, *layer.parameters()]
    mine = torch.autograd.grad((found * weight).sum(), wanted)
    theirs = torch.autograd.grad((expected * weight).sum() + 0.7 * loss, wanted)
    torch.testing.assert_close(mine, theirs, **_CLOSE)
    assert all(g.abs().max() > 0 for g in mine)


def test_an_indexer_without_a_loss_is_frozen() -> None:
    grads = gradients(build())
    assert len(grads) > 10
    assert not any("indexer" in name for name in grads)


@pytest.mark.feature("Sparse attention: as many keys as tokens give dense attention")
def test_enough_keys_give_dense_attention_bit_for_bit() -> None:
    sparse = build(SPARSE, dsa_indexer_topk=LENGTH)
    dense = build({})
    kept = {n: p for n, p in sparse.state_dict().items() if "indexer" not in n}
    dense.load_state_dict(kept)
    ids, places = tokens()
    assert torch.equal(sparse(ids, places, None), dense(ids, places, None))
    assert not torch.equal(build()(ids, places, None), dense(ids, places, None))


def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"dsa_indexer_loss_coeff": 0.5, **SHARED}
    expected = gradients(build(SPARSE, **changes))
    monkeypatch.setattr("megatron.core.transformer.sparse_attention._QUERIES", 7)
    torch.testing.assert_close(gradients(build(SPARSE, **changes)), expected, **_CLOSE)


def test_the_kernel_of_long_sequences_changes_nothing() -> None:
    results = []
    for backend in (AttnBackend.auto, AttnBackend.unfused):
        model = build(SPARSE, dsa_indexer_topk=60, attention_backend=backend)
        layer = model.decoder.layers[0].self_attention
        torch.manual_seed(3)
        hidden = torch.randn(180, 2, 32, dtype=torch.float64, requires_grad=True)
        out, _ = layer(hidden, packed_seq_params=packed(40, 140))
        out.sum().backward()
        results.append((out, hidden.grad, layer.linear_kv_down_proj.weight.grad))
    torch.testing.assert_close(*results, **_CLOSE)
    assert uses_blocks(model, hidden) != uses_blocks(build(), hidden)


def test_scores_without_relu_differ_and_shared_layers_have_no_indexer() -> None:
    model = build(SPARSE, SHARED)
    owners = [n for n, _ in model.named_parameters() if n.endswith("indexer.linear_wk.weight")]
    assert [name.split(".")[2] for name in owners] == ["0", "2"]
    query, weights, key = torch.randn(3, 1, 2, 4), torch.ones(3, 1, 2), torch.randn(5, 1, 4)
    plain, _ = index_scores(query, weights, key, has_relu=False)
    torch.testing.assert_close(plain, torch.einsum("qbnd,kbd->bqk", query, key))
    assert not torch.allclose(index_scores(query, weights, key)[0], plain)


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform"},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mla_up_proj"]},
    ],
)
def test_recomputation_changes_no_gradient(changes: dict[str, Any]) -> None:
    sizes = {**SHARED, "dsa_indexer_loss_coeff": 0.5}
    model = build(SPARSE, sizes)
    expected = gradients(model)
    other = build(SPARSE, sizes, changes)
    torch.testing.assert_close(gradients(other), expected, **_CLOSE)
    values = [m.decoder.layers[0].self_attention.aux_losses.take() for m in (model, other)]
    torch.testing.assert_close(values[0], values[1], **_CLOSE)


@pytest.mark.feature("Sparse attention: packed sequences and documents do not mix")
def test_packed_sequences_have_the_losses_they_have_alone() -> None:
    model, lengths = build(), (5, 11, 8)
    ends = packed(*lengths).ends
    ids, labels = tokens()[0], tokens()[0].roll(-1, 1)
    places = torch.cat([torch.arange(n) for n in lengths]).expand(2, LENGTH)
    whole = model(ids, places, None, labels=labels, packed_seq_params=packed(*lengths))
    documents = PackedBounds.of_rows([PackedBounds(ends, 11)] * 2)
    # Documents rotate by their place in the row, by angles in float32.
    rotated = model(ids, places, documents, labels=labels)
    torch.testing.assert_close(rotated, whole, **tolerances.of(torch.float32))
    for start, stop in zip(ends.tolist(), ends.tolist()[1:], strict=False):
        part = slice(start, stop)
        alone = model(ids[:, part], tokens(stop - start)[1], None, labels=labels[:, part])
        torch.testing.assert_close(whole[:, part], alone, **_CLOSE)


@pytest.mark.feature("Sparse attention: generation from cached latents and index keys")
@pytest.mark.parametrize("changes", [{}, {"cache_mla_latents": True}])
def test_token_by_token_gives_the_logits_of_the_whole(changes: dict[str, Any]) -> None:
    model = build(SPARSE, SHARED, changes).eval()
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


def test_the_engine_takes_the_most_likely_token_of_each_full_pass() -> None:
    model = build(SPARSE, SHARED, cache_mla_latents=True).eval()
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


def test_a_checkpoint_of_format_torch_has_the_parameters_of_the_indexer() -> None:
    names = build().state_dict()
    stored = [name for name in names if ".indexer." in name and ".0." in name]
    arguments = {"experimental_attention_variant": "dsa", "multi_latent_attention": True}
    found = [ours for _, ours in stage_names(stored, arguments, 0, experts=None) if ours in stored]
    assert found == stored
    assert len(found) == 5
