"""Metrics, optimizers, tokenizers and datasets of user code: what is called, what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.optimizer import State, StateChunk, UpdateRule, register_optimizer
from megatron.core.optimizer.optimizer_config import OPTIMIZERS
from megatron.core.optimizer.param_groups import ParamGroup
from megatron.core.optimizer.update_rules import update_rule
from megatron.training.arguments.parser import parse_args
from megatron.training.callbacks import register_metric
from megatron.training.callbacks import user as user_metrics
from megatron.training.config.data import DATASETS
from megatron.training.config.tokenizer import TOKENIZER_TYPES
from megatron.training.data import register_dataset
from megatron.training.data.datasets import build_user_datasets
from megatron.training.tokenizer import TokenizerSpec, create_tokenizer, register_tokenizer
from megatron.training.tokenizer.base import _NullTokenizer
from megatron.training.tokenizer.fingerprint import Fingerprint
from tests.support.callback_calls import fake_run, step_result
from tests.support.command_lines import argv, problems_of

REGISTRIES = (OPTIMIZERS, TOKENIZER_TYPES, DATASETS, user_metrics._METRICS)


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten afterwards."""
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "_values", {})


class Descent(UpdateRule):
    def new_state(self, param: nn.Parameter) -> State:
        return {}

    def update(self, chunk: StateChunk, group: ParamGroup, grad_scale: Tensor | None) -> None:
        for value, grad in zip(chunk.values, chunk.grads, strict=True):
            value.add_(grad, alpha=-group["lr"])


class OfRows(Descent):
    is_element_wise = False


class Numbers(Dataset[Mapping[str, Tensor]]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        return {"tokens": torch.tensor([index])}


def test_values_of_all_metrics_are_joined() -> None:
    register_metric("a", lambda run, result: {"one": 1.0})
    register_metric("b", lambda run, result: {"norm": result.grad_norm or 0.0})
    found = user_metrics.user_values(fake_run(), step_result(grad_norm=0.5), ["lm loss"])
    assert found == {"one": 1.0, "norm": 0.5}


def test_a_metric_cannot_take_the_name_of_another_value() -> None:
    register_metric("mine", lambda run, result: {"grad-norm": 1.0})
    with pytest.raises(ConfigError, match="metric mine returns 'grad-norm', which is logged"):
        user_metrics.user_values(fake_run(), step_result(), ["grad-norm"])
    with pytest.raises(ConfigError, match="the metric mine is registered already"):
        register_metric("mine", lambda run, result: {})


def test_a_registered_optimizer_is_a_choice_and_others_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    register_optimizer("descent", Descent)
    assert update_rule("descent") is Descent
    assert problems_of("--optimizer descent --use-distributed-optimizer --adam-beta1 0.8") == []
    with pytest.raises(SystemExit):
        parse_args(argv=argv("--optimizer ascent"))
    assert "not one of adam, sgd, lion, muon, dist_muon, soap, descent" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no class of UpdateRule"):
        register_optimizer("broken", Descent([], None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "ranks", "named"),
    [
        ("--use-distributed-optimizer", 1, "--use-distributed-optimizer with"),
        ("--use-torch-fsdp2", 2, "fully sharded parameters (FSDP) with"),
        ("--tensor-model-parallel-size 2", 2, "--tensor-model-parallel-size 2 with"),
        ("--bf16", 1, "--bf16 or --fp16 with"),
        ("--optimizer-cpu-offload", 1, "--optimizer-cpu-offload with"),
    ],
)
def test_an_update_that_is_not_element_wise_is_refused_where_parameters_are_incomplete(
    flags: str, ranks: int, named: str
) -> None:
    register_optimizer("rows", OfRows)
    assert problems_of("--optimizer rows", 2) == []
    (problem,) = problems_of(f"--optimizer rows {flags}", ranks)
    assert problem.startswith(f"{named} --optimizer rows: its update is not element-wise")


def test_a_registered_tokenizer_is_built_and_has_a_fingerprint() -> None:
    class Mine(_NullTokenizer):
        pass

    register_tokenizer("Mine", lambda spec: Mine(spec.need("vocab_size")))
    tokenizer = create_tokenizer(TokenizerSpec(tokenizer_type="Mine", vocab_size=7))
    assert isinstance(tokenizer, Mine)
    assert Fingerprint.of(tokenizer).fits(tokenizer)
    with pytest.raises(ConfigError, match="needs --vocab-size"):
        create_tokenizer(TokenizerSpec(tokenizer_type="Mine"))
    assert parse_args(argv=argv("--tokenizer-type Mine")).tokenizer_type == "Mine"


def test_a_tokenizer_that_is_none_or_unknown_is_refused() -> None:
    register_tokenizer("Words", lambda spec: "words")  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match="'words', which is no MegatronTokenizer"):
        create_tokenizer(TokenizerSpec(tokenizer_type="Words"))
    with pytest.raises(ConfigError, match=r"Other is unknown; give one of .*, Words"):
        create_tokenizer(TokenizerSpec(tokenizer_type="Other"))


def sets_of(flags: str, sizes: Sequence[int | None], *, reads: bool = True) -> tuple[Any, ...]:
    return build_user_datasets(fake_run(flags), "numbers", sizes, reads=reads)


def test_a_dataset_is_built_for_each_split_where_it_is_read() -> None:
    asked: list[tuple[str, int | None]] = []

    def build(run: Any, split: str, count: int | None) -> Numbers | None:
        asked.append((split, count))
        return None if split == "test" else Numbers(8)

    register_dataset("numbers", build)
    train, valid, test = sets_of("", (8, 4, None))
    assert asked == [("train", 8), ("valid", 4), ("test", None)]
    assert (len(train), len(valid), test) == (8, 8, None)
    assert sets_of("", (8, 4, 0), reads=False) == (None, None, None)


def test_too_few_samples_are_refused_unless_they_are_read_again() -> None:
    register_dataset("numbers", lambda run, split, count: Numbers(8))
    with pytest.raises(DataError, match="train set has 8 samples and the run reads 9: use --data"):
        sets_of("", (9, 4, 0))
    assert len(sets_of("--dataloader-type cyclic", (9, 4, 0))) == 3


@pytest.mark.parametrize(
    ("samples", "reason"),
    [(None, "no samples to train on"), (SimpleNamespace(), "its train set has no length")],
)
def test_what_is_no_dataset_is_refused(samples: Any, reason: str) -> None:
    register_dataset("numbers", lambda run, split, count: samples)
    with pytest.raises(DataError, match=reason):
        sets_of("", (1, 1, 1))


def test_a_dataset_is_one_source_of_data_among_others(capsys: pytest.CaptureFixture[str]) -> None:
    register_dataset("numbers", lambda run, split, count: Numbers(8))
    (problem,) = problems_of("--dataset-type numbers")
    assert problem.startswith("--mock-data and --dataset-type each set the training data")
    with pytest.raises(SystemExit):
        parse_args(argv=argv("--dataset-type other"))
    assert "--dataset-type other: not one of numbers" in capsys.readouterr().err


@pytest.mark.parametrize("register", [register_tokenizer, register_dataset])
def test_what_is_no_function_is_refused(register: Any) -> None:
    with pytest.raises(ConfigError, match="is no function"):
        register("broken", 7)


def test_the_names_of_this_project_lead_to_what_they_name() -> None:
    values = [value for registry in REGISTRIES for value in registry.values()]
    assert values
    assert all(map(callable, values))
