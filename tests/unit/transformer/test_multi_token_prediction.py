"""Multi-token prediction against a plain form of it: losses, the shift, the mask, gradients."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.core.config.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.mamba import MambaModel
from megatron.core.models.mamba.mamba_layer_specs import (
    get_mamba_mtp_block_spec,
    get_mamba_stack_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.params.param_info import info_of
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import tokens_ahead
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config

LENGTH, VOCABULARY, DEPTHS, FACTOR = 7, 11, 2, 0.3


def build(position: str = "rope", untied: bool = False, **changes: Any) -> GPTModel:
    config = tiny_config(
        hidden_size=8,
        num_attention_heads=2,
        params_dtype=torch.float64,
        init_method_std=0.5,
        normalization="RMSNorm",
        **{"mtp_num_layers": DEPTHS, "mtp_loss_scaling_factor": FACTOR, **changes},
    )
    is_hybrid = config.mtp_hybrid_override_pattern is not None
    if is_hybrid:
        spec = get_mamba_stack_spec(config)
        ahead = get_mamba_mtp_block_spec(config, spec)
    else:
        spec = get_gpt_layer_local_spec(config.num_moe_experts, config=config)
        ahead = get_gpt_mtp_block_spec(config, spec)
    torch.manual_seed(3)
    model = (partial(MambaModel, hybrid_override_pattern="M*") if is_hybrid else GPTModel)(
        config,
        spec,
        VOCABULARY,
        LENGTH,
        share_embeddings_and_output_weights=not untied,
        position_embedding_type=position,
        mtp_block_spec=ahead,
        pg_collection=one_process_groups(),
    )
    for param in model.parameters():  # norms of which each channel counts
        param.data += 0.1 * torch.randn_like(param)
    return model


def batch(rows: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and a loss mask with holes and a weight that is neither 0 nor 1."""
    text = torch.randint(0, VOCABULARY, (rows, LENGTH + 1))
    mask = torch.ones(rows, LENGTH, dtype=torch.float64)
    mask[0, 2] = mask[-1, 5] = 0.0
    mask[0, 4] = 0.5
    return text[:, :-1], text[:, 1:], mask


def hidden_states(model: GPTModel, tokens: Tensor, packed: Any) -> tuple[Tensor, dict[str, Any]]:
    shared = {
        "rotary_pos_emb": model.rotary_table(LENGTH, packed),
        "packed_seq_params": packed,
    }
    return model.decoder(model.embedding(tokens, None), None, **shared), shared


def rms(x: Tensor, norm: Any) -> Tensor:
    return x / (x.square().mean() + norm.eps).sqrt() * norm.weight


def plain_losses(model: GPTModel, tokens: Tensor, labels: Tensor, mask: Tensor, packed: Any) -> Any:
    """Of each depth: the sum of the losses and the number of tokens, token by token."""
    hidden, shared = hidden_states(model, tokens, packed)
    words = model.embedding.word_embeddings.weight
    output = model.output_layer.weight if model.output_layer.weight is not None else words
    if model.config.mtp_detach_heads:
        hidden, words, output = hidden.detach(), words.detach(), output.detach()
    ends = [LENGTH] * LENGTH if packed is None else [3] * 3 + [LENGTH] * 4
    results = []
    layers = [*model.mtp.layers]
    for k, depth in enumerate(layers if len(layers) == DEPTHS else layers * DEPTHS, start=1):
        joined = torch.zeros_like(hidden)
        for b in range(len(tokens)):
            for p in range(LENGTH):
                there = p + k < ends[p]
                word = words[tokens[b, p + k] if there else 0]
                both = torch.cat([rms(word, depth.enorm), rms(hidden[p, b], depth.hnorm)])
                joined[p, b] = depth.eh_proj.weight @ both
        out = joined
        is_hybrid = hasattr(depth, "mtp_model_layer")
        for inner in depth.mtp_model_layer.layers if is_hybrid else [depth.transformer_layer]:
            out, _ = inner(out, None, **shared)
        rows = [[rms(out[p, b], depth.final_layernorm) for b in range(len(tokens))]
                for p in range(LENGTH)]  # fmt: skip
        hidden = torch.stack([torch.stack(row) for row in rows])
        total, count = torch.zeros((), dtype=torch.float64), 0.0
        for b in range(len(tokens)):
            for p in range(LENGTH):
                if p + k < ends[p]:
                    scores = torch.log_softmax(output @ hidden[p, b], 0)
                    total = total - mask[b, p + k] * scores[labels[b, p + k]]
                    count += float(mask[b, p + k])
        results.append((total, count))
    return results


_MAMBA = {"mamba_head_dim": 4, "mamba_state_dim": 3, "mamba_num_groups": 2}
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "tied": ({}, False),
    "untied": ({"untied": True}, False),
    "per-token": ({"calculate_per_token_loss": True}, False),
    "recomputed": (
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        False,
    ),
    "packed": ({}, True),
    "repeated": ({"mtp_use_repeated_layer": True}, False),
    "detached, tied": ({"mtp_detach_heads": True}, False),
    "detached, untied": ({"mtp_detach_heads": True, "untied": True}, False),
    "hybrid": (
        {**_MAMBA, "mtp_hybrid_override_pattern": "*M-", "calculate_per_token_loss": True},
        False,
    ),
    "hybrid, packed": (
        {**_MAMBA, "mtp_hybrid_override_pattern": "M*", "mtp_use_repeated_layer": True},
        True,
    ),
}


@pytest.mark.feature("Model: multi-token prediction (--mtp-num-layers), from DeepSeek-V3")
@pytest.mark.feature(
    "Model: multi-token prediction with one repeated layer, with detached heads, and in hybrids"
)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_plain_form(case: str) -> None:
    changes, is_packed = CASES[case]
    model = build(**changes)
    tokens, labels, mask = batch(1 if is_packed else 2)
    lengths = torch.tensor([0, 3, LENGTH], dtype=torch.int32)
    packed = PackedSeqParams(cu_seqlens_q=lengths, cu_seqlens_kv=lengths) if is_packed else None
    per_token = "calculate_per_token_loss" in changes
    found = model(
        tokens, None, None, labels=labels, loss_mask=mask, packed_seq_params=packed
    )  # fmt: skip
    divisor = 1.0 if per_token else mask.sum()
    ((found * mask).sum() / divisor).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    values = model.mtp.aux_losses.take()

    model.zero_grad()
    expected = plain_losses(model, tokens, labels, mask, packed)
    model.mtp, mtp = None, model.mtp
    alone = model(tokens, None, None, labels=labels, packed_seq_params=packed)
    model.mtp = mtp
    torch.testing.assert_close(found, alone, **tolerances.BITWISE)
    ahead = sum(total / (1.0 if per_token else count) for total, count in expected)
    ((alone * mask).sum() / divisor + FACTOR / DEPTHS * ahead).backward()
    exactly = tolerances.of(torch.float64)
    for k, (total, count) in enumerate(expected, start=1):
        pair = torch.stack([total.detach(), torch.tensor(count, dtype=torch.float64)])
        torch.testing.assert_close(values[f"mtp_{k} loss"], pair, **exactly)
    for name, param in model.named_parameters():
        torch.testing.assert_close(gradients[name], param.grad, **exactly, msg=name)


def test_the_decoder_answers_as_without_it_and_evaluation_leaves_it_out() -> None:
    model, plain = build(), build(mtp_num_layers=None)
    assert plain.mtp is None
    values = dict(model.named_parameters())
    plain.load_state_dict({name: values[name] for name, _ in plain.named_parameters()})
    tokens, labels, mask = batch()
    for is_training in (True, False):
        model.train(is_training)
        plain.train(is_training)
        for given in ({}, {"labels": labels}):
            found = model(tokens, None, None, **given, loss_mask=mask)
            torch.testing.assert_close(
                found, plain(tokens, None, None, **given), **tolerances.BITWISE
            )
            reported = model.mtp.aux_losses.take()
            assert bool(reported) == (is_training and bool(given))


_EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 8,
    "add_bias_linear": False,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.1,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


@pytest.mark.parametrize("case", ["tied", "recomputed"])
def test_experts_of_all_depths_leave_out_padding(case: str) -> None:
    """Otherwise their losses and biases would depend on the length to which rows are padded."""
    model = build(**_EXPERTS, **CASES[case][0])
    text = torch.randint(0, VOCABULARY, (1, LENGTH))
    is_padding = torch.arange(LENGTH).unsqueeze(0) >= 4
    text[is_padding] = 0  # as behind the end of a row
    padded = seen_by_routers(model, text, is_padding)
    alone = seen_by_routers(model, text[:, :4], is_padding[:, :4])
    assert len(alone) == model.config.num_layers + DEPTHS
    for (losses, counts), (expected, expected_counts) in zip(padded, alone, strict=True):
        assert losses == pytest.approx(expected)
        assert counts == expected_counts
        assert sum(counts) == 4 * model.config.moe_router_topk


def seen_by_routers(
    model: GPTModel, text: Tensor, is_padding: Tensor
) -> list[tuple[dict[str, float], list[float]]]:
    """Of each router: its auxiliary losses, and the tokens of each expert."""
    masks = {"padding_mask": is_padding}
    model(text, None, None, labels=text, extra_block_kwargs=masks).sum().backward()
    found = []
    for router in (module for module in model.modules() if isinstance(module, TopKRouter)):
        losses = {name: float(value) for name, value in router.aux_losses.take().items()}
        assert router.local_tokens_per_expert is not None
        found.append((losses, router.local_tokens_per_expert.tolist()))
        router.local_tokens_per_expert.zero_()
    return found


def test_names_are_those_of_the_reference() -> None:
    names = {info_of(p).name for p in build(add_bias_linear=False).mtp.parameters()}
    layer = {info_of(p).name for p in build(add_bias_linear=False).decoder.layers[1].parameters()}
    for i in range(DEPTHS):
        own = {f"mtp.layers.{i}.{n}.weight" for n in ("enorm", "hnorm", "eh_proj")}
        own |= {f"mtp.layers.{i}.final_layernorm.weight"}
        own |= {
            name.replace("decoder.layers.1", f"mtp.layers.{i}.transformer_layer") for name in layer
        }
        assert own <= names
        names -= own
    assert names == set()


def test_tokens_ahead_have_no_learned_positions() -> None:
    with pytest.raises(ConfigError, match="--mtp-num-layers does not support"):
        build("learned_absolute")


def test_no_numbers_of_the_host_are_sent_to_the_device() -> None:
    rows = (torch.arange(10, 17).view(1, -1),) * 2 + (torch.ones(1, LENGTH),)
    sent = AssertionError("this waits for the device")
    with mock.patch.object(torch, "tensor", side_effect=sent):
        one, two = tokens_ahead(rows, 2, (4, 3), one_process_groups().cp)
    assert one.tokens.tolist() == [[11, 12, 13, 0, 15, 16, 0]]
    assert two.labels.tolist() == [[12, 13, 0, 0, 16, 0, 0]]
