"""--tp-comm-overlap with Transformer Engine: what its user buffers and layers are asked for.

The package is emulated; test_signatures.py compares the arguments with its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.config.errors import ConfigError
from megatron.core.extensions.transformer_engine import use_user_buffers
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.params.param_info import name_parameters
from megatron.core.params.param_init import initialize_parameters
from tests.support import fake_transformer_engine as fake
from tests.support import tolerances
from tests.support.one_process import tiny_config
from tests.support.ranks import run_ranks

TOKENS = torch.arange(16).view(2, 8) % 11
POSITIONS = torch.arange(8).expand(2, 8)
SETTINGS = "qkv_fprop: {method: ring_exchange, num_sm: 2}\n"


def model_of(config: Any, groups: Any, make: Any = None) -> GPTModel:
    make = make or get_gpt_layer_with_transformer_engine_spec
    model = GPTModel(config, make(config=config), 16, 8, pg_collection=groups)
    name_parameters(model)
    initialize_parameters(model, seed=1)
    return model


def buffers_of(model: GPTModel) -> dict[str, tuple[Any, ...]]:
    """What the layers overlap: name, all-gather, reduce-scatter, dgrad, bulk dgrad and wgrad."""
    engines = {n: getattr(m, "engine", None) for n, m in model.decoder.layers[0].named_modules()}
    return {
        name.rpartition(".")[2]: engine.module.overlaps
        for name, engine in engines.items()
        if engine is not None and hasattr(engine.module, "overlaps")
    }


def overlapped(rank: int, world_size: int, version: str, folder: str) -> dict[str, Any]:
    groups = create_process_groups(*make_grids(world_size, tp=2))
    settings = Path(folder) / "buffers.yaml"
    settings.write_text(SETTINGS)
    config = tiny_config(
        params_dtype=torch.float64, sequence_parallel=True, tp_comm_overlap_cfg=str(settings)
    )
    with fake.installed(version):
        model = model_of(config, groups)
        before = model(TOKENS, POSITIONS, None, labels=TOKENS).sum()
        reason = use_user_buffers([model], config, groups.tp, num_tokens=16)
        assert reason is None
        loss = model(TOKENS, POSITIONS, None, labels=TOKENS).sum()
        loss.backward()
        (buffers,) = fake.BUFFERS
        found = {"buffers": buffers, "layers": buffers_of(model)}
    local = model_of(config, groups, get_gpt_layer_local_spec)
    expected = local(TOKENS, POSITIONS, None, labels=TOKENS).sum()
    for value in (before, loss):
        torch.testing.assert_close(value, expected, **tolerances.of(torch.float64))
    assert all(param.grad is not None for param in model.parameters())
    return found


@pytest.mark.feature("Speed: --tp-comm-overlap uses the user buffers of Transformer Engine")
def test_layers_of_the_package_overlap_in_its_user_buffers(tmp_path: Path) -> None:
    for found in run_ranks(overlapped, 2, "2.20.2", str(tmp_path)):
        assert found["buffers"] == {
            **{"shape": [16, 32], "tp_size": 2, "modes": ["NONE"], "use_fp8": False},
            "settings": {"qkv_fprop": {"method": "ring_exchange", "num_sm": 2}},
            "backend": "nccl",
        }
        column = (True, False, False, True, True)
        row = (True, True, False, False, False)
        assert found["layers"] == {
            "linear_qkv": ("qkv", *column),
            "linear_proj": ("proj", *row),
            "linear_fc1": ("fc1", *column),
            "linear_fc2": ("fc2", *row),
        }


CASES: dict[str, dict[str, Any]] = {
    "gathers": {"tp_comm_overlap_rs": False, "tp_comm_bulk_dgrad": False},
    "scatters": {"tp_comm_split_ag": False, "tp_comm_bulk_wgrad": False},
    "gradients": {"tp_comm_overlap_rs_dgrad": True},
    "fp8": {"fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True},
}
EXPECTED: dict[str, tuple[Any, ...]] = {
    "gathers": ((True, False, False, False, True), (True, False, False, False, False), ["NONE"]),
    "scatters": ((False, False, False, True, False), (False, True, False, False, False), ["NONE"]),
    "gradients": ((True, False, True, True, True), (True, True, False, False, False), ["NONE"]),
    "fp8": (
        (True, False, False, True, True),
        (True, True, False, False, False),
        ["FP8", "NONE"],
    ),
}


def cases(rank: int, world_size: int) -> dict[str, tuple[Any, ...]]:
    groups = create_process_groups(*make_grids(world_size, tp=2))
    found = {}
    for name, changes in CASES.items():
        config = tiny_config(params_dtype=torch.bfloat16, sequence_parallel=True, **changes)
        with fake.installed():
            model = model_of(config, groups)
            assert use_user_buffers([model], config, groups.tp, num_tokens=16) is None
            layers = buffers_of(model)
            modes = fake.BUFFERS[0]["modes"]
            found[name] = (layers["linear_fc1"][1:], layers["linear_fc2"][1:], modes)
    return found


def test_flags_select_the_collectives_that_overlap() -> None:
    for found in run_ranks(cases, 2):
        assert found == EXPECTED


def refusals(rank: int, world_size: int, folder: str) -> list[str | None]:
    groups = create_process_groups(*make_grids(world_size, tp=2))
    reasons = []
    config = tiny_config(params_dtype=torch.bfloat16, sequence_parallel=True)
    with fake.installed():
        local = model_of(config, groups, get_gpt_layer_local_spec)
        reasons.append(use_user_buffers([local], config, groups.tp, num_tokens=16))
        blocks = tiny_config(
            params_dtype=torch.bfloat16,
            sequence_parallel=True,
            fp8="e4m3",
            fp8_recipe="blockwise",
            hidden_size=256,
        )
        model = model_of(blocks, groups)
        reasons.append(use_user_buffers([model], blocks, groups.tp, num_tokens=16))
        model = model_of(config, groups)
        fake.BUFFERS.append({})  # the package refuses a second time
        reasons.append(use_user_buffers([model], config, groups.tp, num_tokens=16))
        fake.BUFFERS.clear()
        assert buffers_of(model)["linear_qkv"] == (None, *[False] * 5)
        text = Path(folder) / f"list{rank}.yaml"
        text.write_text("- qkv_fprop\n")
        for path, message in ((text, "names of buffers"), (text / "none", "no such file")):
            wrong = tiny_config(
                params_dtype=torch.bfloat16, sequence_parallel=True, tp_comm_overlap_cfg=str(path)
            )
            with pytest.raises(ConfigError, match=f"--tp-comm-overlap-cfg {path}: .*{message}"):
                use_user_buffers([model], wrong, groups.tp, num_tokens=16)
    return reasons


def test_what_the_package_has_no_buffers_for_is_a_reason(tmp_path: Path) -> None:
    for local, blocks, refused in run_ranks(refusals, 2, str(tmp_path)):
        assert local == "no layer of Transformer Engine has sequence parallelism"
        assert "--fp8-recipe delayed, tensorwise or mxfp8" in blocks
        assert refused == "Transformer Engine: UB communicators are already initialized."
