"""The model to write with, from what a checkpoint says of its run."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.config.errors import ConfigError
from megatron.inference import generation
from megatron.inference.generation import GenerationLayout, generation_config
from megatron.training.checkpointing.paths import open_checkpoint
from tests.support.reference_checkpoints import unpack


@pytest.mark.feature("Text generation: from the checkpoints of Megatron-LM too")
@pytest.mark.parametrize("name", ["gpt_torch", "gpt_torch_dist", "gpt_torch_tp2pp2_distopt"])
def test_what_the_reference_has_derived_is_not_taken_for_asked(tmp_path: Path, name: str) -> None:
    load = str(unpack(tmp_path, name))
    config = generation_config(open_checkpoint(load).asked, load, step=None, device_kind="cpu")
    assert config.model.pipeline_model_parallel_size == 1
    assert config.checkpoint.load == load
    assert not config.model.perform_initialization, "the checkpoint replaces all weights"


@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize("axis", ["tensor", "pipeline", "expert"])
def test_a_parallel_size_below_1_is_refused(tmp_path: Path, axis: str, size: int) -> None:
    load = str(unpack(tmp_path, "gpt_torch_dist"))
    asked = open_checkpoint(load).asked
    layout = GenerationLayout(**{axis: size})
    with pytest.raises(ConfigError, match=f"--{axis}-model-parallel-size {size}: at least 1"):
        generation_config(asked, load, step=None, device_kind="cpu", layout=layout)


@pytest.mark.parametrize(
    ("sizes", "tensor"),
    [
        ({}, 4),
        ({"pipeline": 2}, 2),
        ({"expert": 2}, 2),
        ({"expert": 2, "pipeline": 2}, 1),
        ({"expert": 2, "expert_tensor": 1}, 4),
    ],
)
def test_by_default_tensor_parallelism_takes_the_ranks_that_are_left(
    tmp_path: Path, sizes: dict[str, int], tensor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "world_size", lambda: 4)
    monkeypatch.setenv("WORLD_SIZE", "4")
    load = str(unpack(tmp_path, "gpt_torch_dist"))
    asked = {**open_checkpoint(load).asked, "num_experts": 4}
    config = generation_config(
        asked, load, step=None, device_kind="cpu", layout=GenerationLayout(**sizes)
    )
    assert config.model.tensor_model_parallel_size == tensor
