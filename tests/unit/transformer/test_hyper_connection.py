"""Hyper-connections against transformers' DeepSeek-V4, and against themselves when recomputed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.models.gpt.gpt_layer_specs import LOCAL, decoder_block_of
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.hyper_connection import HyperConnection
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config

STREAMS, HIDDEN = 3, 32


def config_of(**changes: Any) -> Any:
    return tiny_config(
        **{"enable_mhc_connections": True, "mhc_num_residual_streams": STREAMS},
        **{"mhc_sinkhorn_iterations": 5, "layernorm_epsilon": 1e-4, "init_method_std": 0.4},
        **changes,
    )


@pytest.mark.parametrize("only_reads", [False, True], ids=["of a sublayer", "at the end"])
def test_values_and_gradients_are_those_of_transformers(only_reads: bool) -> None:
    theirs = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    shape = theirs.DeepseekV4Config(
        **{"hidden_size": HIDDEN, "hc_mult": STREAMS, "hc_sinkhorn_iters": 5},
        **{"rms_norm_eps": 1e-4, "num_hidden_layers": 1},
    )
    kind = theirs.DeepseekV4HyperHead if only_reads else theirs.DeepseekV4HyperConnection
    judge = kind(shape)
    ours = HyperConnection(config_of(), only_reads=only_reads)
    torch.manual_seed(1)
    names = [("weight", "fn"), ("bias", "base"), ("scale", "scale")]
    pairs = [(getattr(ours, a), getattr(judge, f"hc_{b}" if only_reads else b)) for a, b in names]
    for mine, its in pairs:
        mine.data.normal_()
        its.data.copy_(mine.data)
    x = torch.randn(7, 2, STREAMS, HIDDEN)
    output, slope = torch.randn(7, 2, HIDDEN), torch.randn(7, 2, STREAMS, HIDDEN)

    def run(streams: Tensor, of_judge: bool) -> Tensor:
        if only_reads:
            read = judge(streams) if of_judge else ours(streams.flatten(-2))[0]
            return read.unsqueeze(-2) * slope
        if not of_judge:
            hidden, write = ours.read(streams.flatten(-2))
            return write(output * hidden).unflatten(-1, (STREAMS, -1)) * slope
        post, comb, hidden = judge(streams)
        added = post.unsqueeze(-1) * (output * hidden).unsqueeze(-2)
        return (added + comb.transpose(-1, -2) @ streams) * slope

    found = []
    for of_judge in (False, True):
        streams = x.clone().requires_grad_()
        out = run(streams, of_judge)
        out.sum().backward()
        found.append([out.detach(), streams.grad, *(pair[of_judge].grad for pair in pairs)])
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its, rtol=2e-5, atol=2e-5)


def outcome(**changes: Any) -> tuple[Tensor, list[Tensor], int]:
    """Loss, gradients, and values that a pass of a model of four layers saves."""
    config = config_of(num_layers=4, params_dtype=torch.float64, **changes)
    torch.manual_seed(5)
    block = decoder_block_of(LOCAL, config)
    model = GPTModel(config, block, 32, 8, pg_collection=one_process_groups())
    with torch.no_grad():
        for param in model.parameters():
            param += 0.1 * torch.randn_like(param)
    tokens = torch.arange(16).view(2, 8)
    saved: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model(tokens, torch.arange(8).expand(2, 8), None, labels=tokens).mean()
    num_saved = sum(x.untyped_storage().nbytes() for x in saved.values())
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None], num_saved


@pytest.mark.feature("Hyper-connections (mHC): streams recomputed in backward change no gradient")
@pytest.mark.parametrize("size", [1, 3, 4])
def test_recomputed_streams_give_the_same_gradients_with_less_memory(size: int) -> None:
    loss, gradients, num_saved = outcome()
    again, found, fewer = outcome(mhc_recompute_layer_num=size)
    assert torch.equal(again, loss)
    assert len(found) == len(gradients)
    for mine, expected in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine, expected, **tolerances.of(torch.float64))
    assert fewer < 0.8 * num_saved
