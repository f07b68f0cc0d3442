"""Which kind of layer stands where in a hybrid."""

from __future__ import annotations

import pytest

from megatron.core.config.errors import ConfigError
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from megatron.core.ssm.mamba_hybrid_layer_allocation import layer_pattern
from tests.support.command_lines import run_of
from tests.support.one_process import one_process_groups, tiny_config


def test_ratios_without_a_pattern() -> None:
    assert layer_pattern(5) == "MMMMM"
    assert layer_pattern(3, 1.0) == "***"
    assert layer_pattern(3, 0.0, 1.0) == "---"
    assert layer_pattern(9, 0.34) == "MM*M*MM*M"
    assert layer_pattern(8, 0.0, 0.5) == "M-M-M-M-"


@pytest.mark.feature("Mamba: hybrid stacks by ratios spread evenly, or a letter for each layer")
@pytest.mark.parametrize("num_layers", [12, 29, 56])
@pytest.mark.parametrize(("attention", "mlp"), [(0.08, 0.5), (0.25, 0.25), (0.3, 0.0)])
def test_kinds_are_spread_evenly(num_layers: int, attention: float, mlp: float) -> None:
    pattern = layer_pattern(num_layers, attention, mlp)
    assert pattern.count("*") == round(num_layers * attention)
    assert pattern.count("-") == round(num_layers * mlp)
    stretches = [len(stretch) for stretch in pattern.split("*")]
    assert max(stretches) - min(stretches) <= 1
    runs = [len(run) for run in pattern.replace("*", "").split("-")][:-1]
    assert not mlp or max(runs) - min(runs) <= 1


@pytest.mark.parametrize("pattern", ["M*", "M?M", "MMMM"])
def test_a_pattern_that_does_not_fit_is_named(pattern: str) -> None:
    with pytest.raises(ConfigError, match="--hybrid-override-pattern"):
        layer_pattern(3, override=pattern)


def test_a_kind_without_a_layer_is_named() -> None:
    spec = MambaStackSubmodules()
    with pytest.raises(ConfigError, match="asks for experts layers, E"):
        MambaStack(
            tiny_config(num_layers=1),
            spec,
            hybrid_override_pattern="E",
            pg_collection=one_process_groups(),
        )


def test_the_pattern_says_how_many_layers_and_which_have_experts() -> None:
    words = "--model-kind mamba --mamba-num-groups 2 --hybrid-layer-pattern M*ME- --num-experts 4"
    run = run_of(words, without=("--num-layers",))
    assert run.model.num_layers == 5
    assert run.model.moe_layer_freq == (0, 0, 0, 1, 0)
