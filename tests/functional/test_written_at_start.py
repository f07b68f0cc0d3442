"""What flags leave on disk or in the weights: --config-logger-dir, --head-lr-mult."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing.formats import open_reader
from tests.support.runs import run_gpt


@pytest.mark.feature("Logging: --config-logger-dir writes every configuration object as JSON")
def test_each_rank_writes_its_configuration_objects(tmp_path: Path) -> None:
    folder = tmp_path / "configs"
    flags = ("--train-iters", "1", "--config-logger-dir", str(folder), "--bf16")
    run_gpt(tmp_path, *flags, world_size=2)
    for rank in range(2):
        model = json.loads((folder / f"TransformerConfig.rank_{rank}.iter0.json").read_text())
        assert model["hidden_size"] == 32
        assert model["params_dtype"] == "torch.bfloat16"
        optimizer = json.loads((folder / f"OptimizerConfig.rank_{rank}.iter0.json").read_text())
        assert optimizer["lr"] == 1e-3
        assert (folder / f"DistributedDataParallelConfig.rank_{rank}.iter0.json").exists()


@pytest.mark.feature("Optimizer: --head-lr-mult, a factor on the output layer's learning rate")
def test_a_head_with_no_learning_rate_stays_as_it_was(tmp_path: Path) -> None:
    """One step of SGD: the update is the gradient times the rate."""

    def weights(steps: int, factor: float) -> dict[str, torch.Tensor]:
        saved = tmp_path / f"{steps}-{factor}"
        run_gpt(
            tmp_path / f"run-{steps}-{factor}",
            *("--untie-embeddings-and-output-weights", "--optimizer", "sgd", "--lr", "0.1"),
            *("--lr-decay-style", "constant", "--weight-decay", "0", "--sgd-momentum", "0"),
            *("--train-iters", str(steps), "--save", str(saved), "--save-interval", "1"),
            *("--head-lr-mult", str(factor), "--clip-grad", "0"),
        )
        with open_reader(saved / "iter_0000001") as reader:
            keys = ("output_layer.weight", "embedding.word_embeddings.weight")
            return {key: reader.read(key) for key in keys}

    still, plain, fast = weights(1, 0.0), weights(1, 1.0), weights(1, 3.0)
    head, embedding = plain.keys()
    assert torch.equal(plain[embedding], still[embedding])
    step = plain[head] - still[head]
    assert step.abs().max() > 0
    torch.testing.assert_close(fast[head] - still[head], 3 * step, rtol=1e-3, atol=1e-6)
