"""Draft heads on one rank: initial values, losses and gradients against plain operations."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.params.param_info import info_of
from megatron.core.params.param_init import initialize_parameters
from megatron.core.peft.draft_heads import attach_draft_heads, aux_layers, begin_heads
from megatron.training.runtime.setup import _frequent_tokens
from tests.support import tolerances
from tests.unit.models.test_gpt_model import LENGTH, VOCABULARY, build, tokens

MEDUSA = {"export_num_medusa_heads": 2}
EAGLE = {"has_eagle": True, "export_eagle_ffn_hidden_size": 24}
FEW = EAGLE | {"export_draft_vocab_size": VOCABULARY // 2}
DECAY = 0.8


def with_heads(settings: dict[str, Any], drafted: Tensor | None = None, **changes: Any) -> GPTModel:
    """Return a model in training mode whose heads have begun from its weights."""
    none = {"has_eagle": False, "export_freeze_mtp": ()} | dict.fromkeys(
        ("export_num_medusa_heads", "export_draft_vocab_size", "export_eagle_ffn_hidden_size")
    )
    model = build(model={"share_embeddings_and_output_weights": False}, **changes)
    attach_draft_heads(model, SimpleNamespace(**(none | settings)), drafted)
    initialize_parameters(model, 7)
    begin_heads([model])
    return model.train()


def gradients(model: GPTModel) -> tuple[dict[str, Tensor], list[float]]:
    """Return the gradients by name, and the loss of each head."""
    ids, positions = tokens()
    model(ids, positions, None, labels=ids.roll(-1, 1)).mean().backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found, [float(v[0] / v[1]) for v in model.draft.aux_losses.take().values()]


def final_states(model: GPTModel, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the outputs of the layers and of the decoder: [s, b, h]."""
    read: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _m, _i, out: read.append(out[0].detach()))
        for layer in model.decoder.layers
    ]
    final: list[Tensor] = []
    model.loss_runner = lambda hidden, labels: final.append(hidden) or hidden
    with torch.no_grad():
        model.eval()(ids, torch.arange(LENGTH).expand_as(ids), None, labels=ids)
    model.train()
    model.loss_runner = None
    for hook in hooks:
        hook.remove()
    return read, final[0]


def rotated(x: Tensor, position: int) -> Tensor:
    """Rotate heads [b, n, d] to ``position``."""
    half = x.shape[-1] // 2
    angle = position / 10000 ** (torch.arange(half) / half)
    first, second = x.split(half, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def eagle_losses(model: GPTModel, ids: Tensor) -> list[Tensor]:
    """Return the mean loss of each step, token by token."""
    read, final = final_states(model, ids)
    p = {name: value for name, value in model.draft.named_parameters()}
    heads, groups = model.config.num_attention_heads, model.config.num_query_groups
    width = model.config.kv_channels
    low, middle, high = aux_layers(model.config.num_layers)
    state = torch.cat([read[low], read[middle], read[high]], -1) @ p["fc.weight"].t()
    drafted = p["output_layer.weight"].shape[0]
    teacher = F.log_softmax(final @ model.output_layer.weight[:drafted].t(), -1)
    keys: list[list[Tensor]] = []
    values: list[list[Tensor]] = []
    losses = []
    for step in range(model.draft.num_losses):
        shift = step + 1
        later = F.pad(ids[:, shift:], (0, shift))
        embedded = model.embedding.word_embeddings.weight[later].transpose(0, 1)
        x = torch.cat(
            [rms(embedded, p["input_layernorm.weight"]), rms(state, p["hidden_norm.weight"])], -1
        )
        mixed = (x @ p["self_attention.linear_qkv.weight"].t()).unflatten(-1, (groups, -1, width))
        query, key, value = mixed.split([heads // groups, 1, 1], -2)
        query = query.flatten(2, 3)
        rows = range(LENGTH)
        keys.append([rotated(key[t].squeeze(-2), t + step) for t in rows])
        values.append([value[t].squeeze(-2) for t in rows])
        contexts = []
        for t in rows:
            seen = [(0, i) for i in range(t + 1)] + [(i, t) for i in range(1, step + 1)]
            k, v = (
                torch.stack([of[i][j] for i, j in seen]).repeat_interleave(heads // groups, 2)
                for of in (keys, values)
            )
            scores = (rotated(query[t], t + step) * k).sum(-1) / math.sqrt(width)
            contexts.append((scores.softmax(0).unsqueeze(-1) * v).sum(0).flatten(1))
        state = state + torch.stack(contexts) @ p["self_attention.linear_proj.weight"].t()
        inner = rms(state, p["post_attention_layernorm.weight"]) @ p["mlp.linear_fc1.weight"].t()
        gate, up = inner.chunk(2, -1)
        state = state + (F.silu(gate) * up) @ p["mlp.linear_fc2.weight"].t()
        logits = rms(state, p["norm.weight"]) @ p["output_layer.weight"].t()
        found = F.log_softmax(logits[: LENGTH - shift], -1)
        wanted = teacher[shift:]
        losses.append((wanted.exp() * (wanted - found)).sum(-1).mean())
    return losses


def medusa_losses(model: GPTModel, ids: Tensor) -> list[Tensor]:
    _, final = final_states(model, ids)
    losses = []
    for k, head in enumerate(model.draft.heads, start=1):
        x = final + F.silu(F.linear(final, head.linear.weight, head.linear.bias))
        logits = x @ head.output_layer.weight.t()
        labels = ids.roll(-1, 1)[:, k:]
        losses.append(
            F.cross_entropy(logits[: LENGTH - k].transpose(0, 1).flatten(0, 1), labels.flatten())
        )
    return losses


@pytest.mark.feature("Draft heads: Medusa and EAGLE-3 are trained on a frozen model")
@pytest.mark.parametrize(
    ("settings", "losses_of"),
    [(MEDUSA, medusa_losses), (EAGLE, eagle_losses), (FEW, eagle_losses)],
    ids=["medusa", "eagle3", "draft vocabulary"],
)
def test_losses_and_gradients_are_those_of_plain_operations(
    settings: dict[str, Any], losses_of: Any
) -> None:
    model = with_heads(settings)
    with torch.no_grad():  # no part may hide behind its initial value
        for param in model.draft.parameters():
            param.add_(0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(1)))
    found, losses = gradients(model)
    model.zero_grad()
    expected = losses_of(model, tokens()[0])
    torch.testing.assert_close(
        torch.tensor(losses), torch.stack(expected), **tolerances.LAYOUT_LOSS
    )
    sum(loss * DECAY**k for k, loss in enumerate(expected)).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == grads.keys()
    assert all(name.startswith("draft.") for name in found)
    for name, grad in grads.items():
        torch.testing.assert_close(found[name], grad, **tolerances.GRADIENT, msg=name)


@pytest.mark.parametrize("settings", [MEDUSA, FEW], ids=["medusa", "eagle3"])
def test_heads_begin_as_the_output_layer_and_the_model_keeps_its_loss(
    settings: dict[str, Any],
) -> None:
    model = with_heads(settings, hidden_dropout=0.5)
    weight = model.output_layer.weight
    for name, param in model.draft.named_parameters():
        if name.endswith("output_layer.weight"):
            assert torch.equal(param, weight[: len(param)])
        assert info_of(param).is_new
    ids, positions = tokens()
    plain = build(model={"share_embeddings_and_output_weights": False}).eval()
    initialize_parameters(plain, 7)
    expected = plain(ids, positions, None, labels=ids)
    assert torch.equal(model(ids, positions, None, labels=ids), expected)


@pytest.mark.parametrize("settings", [MEDUSA, FEW], ids=["medusa", "eagle3"])
def test_a_step_changes_every_part_of_the_heads_and_no_bit_of_the_model(
    settings: dict[str, Any],
) -> None:
    model = with_heads(settings)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for _ in range(2):
        gradients(model)
        optimizer.step()
    after = model.state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {name for name in after if name.startswith("draft.")} - {"draft.d2t"}


def test_packed_texts_do_not_see_each_other() -> None:
    model = with_heads(EAGLE)
    ids, positions = tokens(batch=1)
    hidden = ~torch.block_diag(*[torch.ones(n, n).tril() for n in (5, LENGTH - 5)]).bool()

    def second(first: Tensor) -> list[Tensor]:
        rows = torch.cat([first, ids[:, 5:]], 1)
        read: list[Tensor] = []
        hook = model.draft.output_layer.register_forward_pre_hook(
            lambda _m, x: read.append(x[0][5:-4])
        )
        model(rows, positions, hidden[None, None], labels=rows)
        hook.remove()
        return read

    for one, other in zip(second(ids[:, :5]), second(ids[:, :5].flip(1)), strict=True):
        torch.testing.assert_close(one, other, **tolerances.BITWISE)


def test_a_draft_vocabulary_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match=rf"vocab-size 999: the vocabulary has {VOCABULARY}"):
        with_heads(EAGLE | {"export_draft_vocab_size": 999})


@pytest.mark.feature("Draft heads: EAGLE-3 drafts the most frequent tokens of token files")
def test_eagle_drafts_the_most_frequent_tokens(tmp_path: Path) -> None:
    prefix = str(tmp_path / "data")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in ([9, 9, 9, 2], [5, 2, 5, 9, 1], [2, 7, 7]):
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")
    flags = {"has_eagle": True, "export_draft_vocab_data": (prefix,), "export_draft_vocab_size": 3}
    run: Any = SimpleNamespace(
        config=SimpleNamespace(adapters=SimpleNamespace(**flags)),
        tokenizer=SimpleNamespace(vocab_size=VOCABULARY),
    )
    drafted = _frequent_tokens(run)
    assert drafted is not None
    assert drafted.tolist() == [2, 5, 9]
    model = with_heads(EAGLE | {"export_draft_vocab_size": 3}, drafted)
    assert torch.equal(model.draft.d2t, drafted)
    rows = model.output_layer.weight[drafted]
    assert torch.equal(model.draft.output_layer.weight, rows)
    run.tokenizer.vocab_size = 9
    with pytest.raises(DataError, match="has the token 9, and the tokenizer 9 tokens"):
        _frequent_tokens(run)
