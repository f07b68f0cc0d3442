"""RetroModel: a plain reference, what an edited neighbor changes, the gate, recomputation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.retro import RetroConfig, RetroModel
from megatron.core.models.retro.attention import get_retro_decoder_block_spec
from megatron.core.params.param_info import info_of
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config

VOCABULARY, SEQUENCES, CHUNKS, M, K, R, HEADS = 61, 2, 3, 4, 2, 8, 4
ATTENDING, ENCODER_LAYERS = (6, 9), 4


def build(gate: float = 1.0, **changes: Any) -> RetroModel:
    settings: dict[str, Any] = {"num_layers": 9, "init_method_std": 0.2, **changes}
    base = tiny_config(**settings)
    config = RetroConfig.unchecked(
        **{name: getattr(base, name) for name in base.__dataclass_fields__},
        retro_chunk_length=M,
        retro_num_neighbors=K,
        retro_encoder_num_layers=ENCODER_LAYERS,
        retro_encoder_hidden_dropout=0.0,
        retro_encoder_attention_dropout=0.0,
        retro_attention_gate=gate,
    )
    spec = get_retro_decoder_block_spec(config, use_transformer_engine=False)
    return RetroModel(config, spec, VOCABULARY, 16, pg_collection=one_process_groups())


def batch() -> tuple[Tensor, Tensor]:
    """Tokens [b, s] and neighbors [b, n, k, r]."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (SEQUENCES, CHUNKS * M), generator=generator)
    return tokens, torch.randint(VOCABULARY, (SEQUENCES, CHUNKS, K, R), generator=generator)


def logits_of(model: GPTModel, tokens: Tensor, neighbors: Tensor | None = None) -> Tensor:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    context = {} if neighbors is None else {"context_input_ids": neighbors.flatten(0, 2)}
    logits: Tensor = model(tokens, positions, None, **context)
    return logits


class Reference:
    """RETRO one chunk and one token at a time, by torch's functions and the weights of a model."""

    def __init__(self, model: RetroModel) -> None:
        parameters = {info_of(p).name: p.detach().clone() for p in model.parameters()}
        self.weights = {name: p.requires_grad_() for name, p in parameters.items()}

    def norm(self, x: Tensor, name: str) -> Tensor:
        w = self.weights
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, name: str, causal: bool = False) -> Tensor:
        q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.linear(mixed.transpose(-3, -2).flatten(-2), f"{name}.linear_proj")

    def attend_to_self(self, x: Tensor, name: str, causal: bool) -> Tensor:
        mixed = self.linear(x, f"{name}.linear_qkv").unflatten(-1, (HEADS, 3, -1))
        return self.attend(*mixed.unbind(-2), name, causal)

    def attend_to(self, x: Tensor, other: Tensor, name: str) -> Tensor:
        q = self.linear(x, f"{name}.linear_q").unflatten(-1, (HEADS, -1))
        k, v = self.linear(other, f"{name}.linear_kv").unflatten(-1, (HEADS, 2, -1)).unbind(-2)
        return self.attend(q, k, v, name)

    def mlp(self, x: Tensor, name: str) -> Tensor:
        return self.linear(F.gelu(self.linear(x, f"{name}.linear_fc1")), f"{name}.linear_fc2")

    def embed(self, ids: Tensor) -> Tensor:
        w = self.weights
        positions = w["embedding.position_embeddings.weight"][: ids.shape[-1]]
        return w["embedding.word_embeddings.weight"][ids] + positions

    def encode(self, neighbor: Tensor, chunk: Tensor, name: str) -> Tensor:
        """One neighbor [r] of one chunk [m, h] -> [r, h]."""
        x = self.embed(neighbor)
        for i in range(ENCODER_LAYERS):
            at = f"{name}.layers.{i}"
            normed = self.norm(x, f"{at}.input_layernorm")
            x = x + self.attend_to_self(normed, f"{at}.self_attention", causal=False)
            if i % 3 == 0:
                normed = self.norm(x, f"{at}.pre_cross_attn_layernorm")
                x = x + self.attend_to(normed, chunk, f"{at}.cross_attention.attn")
            x = x + self.mlp(self.norm(x, f"{at}.pre_mlp_layernorm"), f"{at}.mlp")
        return x

    def logits(self, tokens: Tensor, neighbors: Tensor) -> Tensor:
        """One sequence [s] with neighbors [n, k, r] -> [s, v]."""
        x, encoded = self.embed(tokens), {}
        for i in range(9):
            at = f"decoder.layers.{i}"
            normed = self.norm(x, f"{at}.input_layernorm")
            x = x + self.attend_to_self(normed, f"{at}.self_attention", causal=True)
            if i + 1 in ATTENDING:
                cross = f"{at}.cross_attention"
                normed = self.norm(x, f"{at}.pre_cross_attn_layernorm")
                for c in range(CHUNKS) if i + 1 == ATTENDING[0] else ():
                    chunk = normed[c * M : (c + 1) * M]
                    found = [self.encode(each, chunk, f"{cross}.encoder") for each in neighbors[c]]
                    encoded[c] = torch.cat(found)
                rows = list(x)
                for position in range(M - 1, len(rows)):
                    of_chunk = encoded[(position + 1) // M - 1]
                    read = self.attend_to(normed[position, None], of_chunk, f"{cross}.attn")
                    rows[position] = rows[position] + read[0]
                x = torch.stack(rows)
            x = x + self.mlp(self.norm(x, f"{at}.pre_mlp_layernorm"), f"{at}.mlp")
        hidden = self.norm(x, "decoder.final_layernorm")
        return F.linear(hidden, self.weights["output_layer.weight"])


@pytest.mark.feature("Model: RETRO gives the logits and gradients of a plain implementation")
def test_logits_and_gradients_are_those_of_a_plain_reference() -> None:
    model = build()
    reference = Reference(model)
    tokens, neighbors = batch()
    factors = torch.randn(SEQUENCES, CHUNKS * M, VOCABULARY)
    wanted = torch.stack([reference.logits(*pair) for pair in zip(tokens, neighbors, strict=True)])
    logits = logits_of(model, tokens, neighbors)
    torch.testing.assert_close(logits, wanted, **tolerances.LOGITS)
    (logits * factors).mean().backward()
    (wanted * factors).mean().backward()
    for param in model.parameters():
        name = info_of(param).name
        wanted_gradient = reference.weights[name].grad
        assert wanted_gradient is not None, name
        assert wanted_gradient.count_nonzero(), name
        torch.testing.assert_close(
            param.grad, wanted_gradient, **tolerances.GRADIENT, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.feature("Model: RETRO: chunked attention sees only neighbors of earlier chunks")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_an_edited_neighbor_changes_no_logits_before_its_chunk_ends(chunk: int) -> None:
    model = build().eval()
    tokens, neighbors = batch()
    edited = neighbors.clone()
    edited[1, chunk, K - 1, R - 1] += 1
    edited %= VOCABULARY
    with torch.no_grad():
        before, after = (logits_of(model, tokens, x) for x in (neighbors, edited))
    is_equal = (before == after).all(-1)
    first = (chunk + 1) * M - 1
    assert is_equal[0].all()
    assert is_equal[1, :first].all()
    assert not is_equal[1, first:].any()


@pytest.mark.feature("Model: RETRO with --retro-attention-gate 0 equals GPT bitwise")
def test_a_gate_of_zero_gives_the_logits_of_a_gpt_with_the_same_weights() -> None:
    model = build(gate=0.0)
    tokens, neighbors = batch()
    gpt = GPTModel(
        tiny_config(num_layers=9, init_method_std=0.2),
        get_gpt_layer_local_spec(),
        VOCABULARY,
        16,
        pg_collection=one_process_groups(),
    )
    gpt.load_state_dict(model.state_dict(), strict=False)
    wanted = logits_of(gpt, tokens)
    logits = logits_of(model, tokens, neighbors)
    assert torch.equal(logits, wanted)
    logits.mean().backward()
    wanted.mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, param in gpt.named_parameters():
        gradient = gradients.pop(name)
        assert gradient is not None
        assert torch.equal(gradient, param.grad), name
    assert not gradients  # attention to neighbors and their encoder have none
    with_neighbors = build(gate=0.5)
    with_neighbors.load_state_dict(model.state_dict())
    full = build()
    full.load_state_dict(model.state_dict())
    half, whole = (logits_of(x, tokens, neighbors) for x in (with_neighbors, full))
    assert not torch.equal(half, wanted)
    assert not torch.equal(half, whole)


def test_full_recomputation_gives_the_same_gradients() -> None:
    tokens, neighbors = batch()
    models = [build()]
    for method, size in (("uniform", 4), ("block", 7)):
        models.append(
            build(
                recompute_granularity="full",
                recompute_method=method,
                recompute_num_layers=size,
            )
        )
        models[-1].load_state_dict(copy.deepcopy(models[0].state_dict()))
    for model in models:
        logits_of(model, tokens, neighbors).square().mean().backward()
    wanted = dict(models[0].named_parameters())
    for model in models[1:]:
        for name, param in model.named_parameters():
            assert param.grad is not None, name
            torch.testing.assert_close(param.grad, wanted[name].grad, **tolerances.GRADIENT)


def test_a_wrong_number_of_neighbors_is_one_message() -> None:
    model = build()
    tokens, neighbors = batch()
    with pytest.raises(ConfigError, match="12 tokens have 3 complete chunks of 4, whose neighbors"):
        logits_of(model, tokens, neighbors[:, :2])


def test_a_text_without_a_complete_chunk_needs_no_neighbors() -> None:
    model = build().eval()
    tokens, neighbors = batch()
    with torch.no_grad():
        whole = logits_of(model, tokens, neighbors)[:, : M - 1]
        short = logits_of(model, tokens[:, : M - 1])
        longer = logits_of(model, tokens[:, : 2 * M + 2], neighbors[:, :2])
        wanted = logits_of(model, tokens, neighbors)[:, : 2 * M + 2]
    torch.testing.assert_close(short, whole, **tolerances.LOGITS)
    torch.testing.assert_close(longer, wanted, **tolerances.LOGITS)
