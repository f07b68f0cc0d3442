"""The Mamba-2 mixer against that of `transformers`, its initial values, and its sizes."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
from megatron.core.params.param_info import name_parameters
from megatron.core.params.param_init import initialize_parameters
from megatron.core.ssm.mamba_hybrid_layer_allocation import mixer_shape
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer.spec_utils import build_module
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config

transformers = pytest.importorskip("transformers")
from transformers.models.mamba2 import modeling_mamba2  # noqa: E402

SIZES = {"mamba_state_dim": 6, "mamba_head_dim": 8, "mamba_num_groups": 1}


def our_mixer(**changes: object) -> MambaMixer:
    config = tiny_config(**{**SIZES, **changes})
    spec = mamba_stack_spec.submodules.mamba_layer.submodules.mixer
    mixer: MambaMixer = build_module(
        spec, config=config, d_model=32, offered={"pg_collection": one_process_groups()}
    )
    name_parameters(mixer)
    initialize_parameters(mixer, 3)
    return mixer


@pytest.mark.feature("Mamba: outputs and gradients of the mixer of transformers' Mamba-2")
def test_the_mixer_is_that_of_transformers() -> None:
    config = transformers.Mamba2Config(
        hidden_size=32, state_size=6, head_dim=8, num_heads=8, n_groups=1, chunk_size=4, expand=2
    )
    theirs, ours = modeling_mamba2.Mamba2Mixer(config, 0), our_mixer()
    missing, surplus = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert not missing
    assert not surplus
    x = torch.randn(2, 19, 32, generator=torch.Generator().manual_seed(1))
    weights = torch.linspace(0.5, 1.5, x.numel()).view(x.shape)
    results = []
    for mixer in (theirs, ours):
        given = x.clone().requires_grad_()
        y = theirs(given) if mixer is theirs else ours(given.transpose(0, 1))[0].transpose(0, 1)
        (y * weights).sum().backward()
        grads = {name: p.grad for name, p in mixer.named_parameters()}
        results.append((y.detach(), {**grads, "x": given.grad}))
    torch.testing.assert_close(results[1][0], results[0][0], **tolerances.LOGITS)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-4, atol=1e-5)


def test_initial_values_are_those_of_the_paper() -> None:
    mixer = our_mixer(mamba_num_heads=2000, mamba_head_dim=1)
    rates = mixer.A_log.exp()
    assert 1 <= rates.min() < 1.1
    assert 15.9 < rates.max() <= 16
    assert abs(rates.mean() - 8.5) < 0.5
    steps = torch.nn.functional.softplus(mixer.dt_bias).log10()
    assert -3.001 < steps.min() < -2.95
    assert -1.05 < steps.max() < -0.999
    assert abs(steps.mean() + 2) < 0.05
    assert 0.45 < mixer.conv1d.weight.abs().max() <= 0.5
    assert mixer.conv1d.bias.abs().max() <= 0.5
    assert torch.equal(mixer.D, torch.ones(2000))
    assert abs(mixer.in_proj.weight.std() - 0.02) < 0.001


def test_the_shape_counts_parameters_and_work() -> None:
    mixer = our_mixer(mamba_num_groups=2)
    shape = mixer_shape(mixer.config)
    assert shape.num_parameters == sum(p.numel() for p in mixer.parameters())
    matrices = sum(p.numel() for p in mixer.parameters() if p.dim() == 2)
    recurrence = 6 * 8 * 8 * 6  # heads x width x state: decay and add, then multiply with C
    assert shape.flops_per_token == 2 * matrices + 2 * 4 * (64 + 2 * 2 * 6) + recurrence


def test_a_hybrid_starts_its_outputs_for_one_part_a_layer() -> None:
    usual, hybrid = tiny_config(), tiny_config(is_hybrid_model=True)
    ratio = hybrid.output_layer_init_method.std / usual.output_layer_init_method.std
    assert math.isclose(ratio, math.sqrt(2))
