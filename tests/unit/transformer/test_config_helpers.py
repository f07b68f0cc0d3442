"""Megatron Core's helpers around configs: recipes, experimental code, storage, graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import nn

from megatron.core import __version__
from megatron.core.config import is_experimental_enabled, set_experimental_flag
from megatron.core.energy_monitor import EnergyMonitor
from megatron.core.enums import Fp8Recipe
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.jit import jit_fuser
from megatron.core.msc_utils import MultiStorageClientFeature, open_file
from megatron.core.package_info import __version__ as version_of_package
from megatron.core.quantization.quant_config import GlobMatcher, MatchContext, RecipeConfig
from megatron.core.quantization.utils import get_quant_config_or_none, load_quantization_recipe
from megatron.core.transformer.heterogeneous.heterogeneous_config import (
    HeterogeneousTransformerConfig,
)
from megatron.core.utils import ExperimentalNotEnabledError, experimental_cls, experimental_fn

RECIPE = """
matchers:
  off: {type: glob, pattern: "*", config: other, enabled: false}
  mlp: {type: glob, pattern: "*fc1*", config: narrow, enabled: true}
  rest: {type: glob, pattern: "decoder.*", config: wide, enabled: true}
configs: {narrow: {bits: 4}, wide: {bits: 8}}
"""


def test_the_first_matcher_of_a_recipe_decides(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    recipe = load_quantization_recipe(str(tmp_path / "recipe.yaml"))
    found = get_quant_config_or_none("decoder.layers.12.mlp.linear_fc1", recipe)
    assert found is not None
    assert (found.config, found.config_key) == ({"bits": 4}, "narrow")
    assert found.match_input.layer_number == 12
    found.config["bits"] = 2  # a copy
    assert recipe.match_to_config_key(MatchContext("decoder.layers.0.mlp.linear_fc2", 0)) == "wide"
    assert recipe.configs["narrow"] == {"bits": 4}
    assert get_quant_config_or_none("output_layer", recipe) is None
    assert get_quant_config_or_none("output_layer") is None
    assert RecipeConfig([GlobMatcher("out*", "wide")], {"wide": 1}).match(
        MatchContext("output_layer", None)
    )


def test_experimental_code_runs_if_it_is_allowed() -> None:
    @experimental_fn(introduced_with_version="0.12.0")
    def twice(x: int) -> int:
        return 2 * x

    @experimental_cls(introduced_with_version="0.12.0")
    class Layer(nn.Linear):
        pass

    assert not is_experimental_enabled()
    for call in (lambda: twice(1), lambda: Layer(1, 1)):
        with pytest.raises(ExperimentalNotEnabledError):
            call()
    set_experimental_flag(True)
    try:
        assert (twice(3), Layer(2, 1).in_features) == (6, 2)
    finally:
        set_experimental_flag(False)


def test_helpers_run_without_the_packages_that_they_switch_on(tmp_path: Path) -> None:
    assert __version__ == version_of_package == "0.14.0"
    assert Fp8Recipe.delayed == "delayed"
    with get_fp8_context(None):
        assert jit_fuser(abs)(-1) == 1
    MultiStorageClientFeature.disable()
    with open_file(tmp_path / "file", "w") as file:
        file.write("text")
    with pytest.raises(RuntimeError):
        MultiStorageClientFeature.import_package()
    MultiStorageClientFeature.enable()
    monitor = EnergyMonitor()
    monitor.setup()
    monitor.resume()
    assert monitor.lap() == monitor.get_total() == 0.0
    monitor.shutdown()


def test_the_schedule_in_a_graph_wrapper_runs_as_it_is() -> None:
    calls: list[dict[str, Any]] = []
    wrapped = FullCudaGraphWrapper(lambda **given: calls.append(given) or "losses")
    before = wrapped.curr_iter("training")
    assert wrapped(forward_only=False, num_microbatches=2) == "losses"
    assert calls == [{"forward_only": False, "num_microbatches": 2}]
    assert (wrapped.curr_iter("training"), wrapped.result["training"]) == (before + 1, "losses")


def test_a_heterogeneous_config_reads_its_file_and_has_a_config_per_layer(tmp_path: Path) -> None:
    blocks = [
        {"attention": {"n_heads_in_group": 1}, "ffn": {"ffn_mult": 6}},
        {"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}},
    ]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"block_configs": blocks, "hidden_act": "silu"}))
    config = HeterogeneousTransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        heterogeneous_layers_config_path=str(path),
    )
    path.unlink()
    assert [shape.attention for shape in config.per_block_parameters] == ["full", "no_op"]
    assert config.get_config_for_layer(1).ffn_hidden_size == 256
    assert config.get_config_for_layer(2) is config
    with pytest.raises(ValueError, match="layer number 3"):
        config.get_config_for_layer(3)
