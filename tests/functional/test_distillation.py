"""Distillation with the real command line: layouts, resuming, what a checkpoint contains."""

from __future__ import annotations

import contextlib
import io
import json
import math
import runpy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import pretrain_gpt
from megatron.core.config.errors import ConfigError
from megatron.core.dist_checkpointing.formats import open_reader
from megatron.core.enums import ModelType
from megatron.core.transformer.module import frozen_models
from megatron.post_training.distillation.objective import LayerPair, check_pairs
from megatron.training.initialize import initialize_megatron
from megatron.training.planning.rank import cost_of_rank
from megatron.training.step.run import Callback, TrainingRun
from megatron.training.training import get_model, pretrain
from tests.functional.test_pretrain_gpt import steps
from tests.support import selection, tolerances
from tests.support.command_lines import run_of
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, losses, refusal, run_gpt

TEACHER = (
    "--num-layers 3 --hidden-size 64 --swiglu --group-query-attention --num-query-groups 2 "
    "--normalization RMSNorm --position-embedding-type rope"
).split()
KEYS = ("lm loss", "total loss", "logits distillation loss")
INTERMEDIATE = "intermediate distillation loss"


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with teachers: a larger model, and one of the student's shape."""
    folder = tmp_path_factory.mktemp("teachers")
    short = ["--train-iters", "2", "--eval-iters", "0", "--lr", "0.05"]
    run_gpt(folder / "a", *TEACHER, *short, "--save", str(folder / "large"), "--seed", "5")
    run_gpt(folder / "b", *short, "--save", str(folder / "alike"), "--seed", "6")
    return folder


def kd_file(folder: Path, **settings: Any) -> str:
    """Return the path of an --export-kd-cfg file; JSON is YAML."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "kd.json"
    path.write_text(json.dumps(settings))
    return str(path)


def of_step(metrics: list[dict[str, Any]], *more: str) -> torch.Tensor:
    keys = (*KEYS, *more, "grad-norm")
    return torch.tensor([[line[key] for key in keys] for line in metrics if KEYS[0] in line])


@pytest.mark.parametrize(
    "layout",
    selection.first(
        2,
        [
            "--tensor-model-parallel-size 2 --sequence-parallel --loss-chunk-size 20 "
            "--context-parallel-size 2",
            "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --use-distributed-optimizer",
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
            "--num-layers 4",
            "--tensor-model-parallel-size 2 --untie-embeddings-and-output-weights "
            "--context-parallel-size 2 --calculate-per-token-loss",
            "--pipeline-model-parallel-size 2 --mtp-num-layers 1 --position-embedding-type rope",
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        ],
    ),
)
@pytest.mark.feature("Distillation: from a teacher of another size, in any layout")
def test_a_larger_teacher_gives_the_losses_of_one_process_in_any_layout(
    tmp_path: Path, teachers: Path, layout: str
) -> None:
    kd = kd_file(tmp_path, skip_lm_loss=False, kd_loss_scale=2, logit_kl_temperature=1.5)
    flags = ["--num-layers", "4", "--train-iters", "3", "--export-kd-cfg", kd]
    flags += ["--export-kd-teacher-load", str(teachers / "large"), "--log-num-zeros-in-grad"]
    of_layout = ("--tensor", "--pipeline", "--context", "--loss-chunk", "--sequence", "--num-virt")
    words = layout.replace(" --", "\n--").splitlines()
    same = [word for words in words if not words.startswith(of_layout) for word in words.split()]
    alone = run_gpt(tmp_path / "a", *flags, *same)
    found = run_gpt(tmp_path / "b", *flags, *layout.split(), world_size=4)
    torch.testing.assert_close(of_step(found), of_step(alone), **tolerances.LAYOUT_LOSS)


@pytest.mark.parametrize(
    "layout", ["--tensor-model-parallel-size 2 --sequence-parallel", "--context-parallel-size 2"]
)
def test_intermediate_layers_are_compared_in_any_layout(
    tmp_path: Path, teachers: Path, layout: str
) -> None:
    pairs = [
        ["decoder.layers.0", "decoder.layers.1"],
        ["decoder.final_layernorm", "decoder.final_layernorm", "mse"],
    ]
    kd = kd_file(tmp_path, intermediate_layer_pairs=pairs)
    flags = ["--train-iters", "3", "--export-kd-cfg", kd]
    flags += ["--export-kd-teacher-load", str(teachers / "alike")]
    alone = of_step(run_gpt(tmp_path / "a", *flags), INTERMEDIATE)
    found = run_gpt(tmp_path / "b", *flags, *layout.split(), world_size=2)
    torch.testing.assert_close(of_step(found, INTERMEDIATE), alone, **tolerances.LAYOUT_LOSS)
    torch.testing.assert_close(alone[:, 1], 2 * alone[:, 2])


def test_chunks_of_the_loss_change_nothing(tmp_path: Path, teachers: Path) -> None:
    flags = ["--export-kd-teacher-load", str(teachers / "large"), "--train-iters", "3"]
    whole = of_step(run_gpt(tmp_path / "a", *flags))
    chunks = of_step(run_gpt(tmp_path / "b", *flags, "--loss-chunk-size", "10"))
    torch.testing.assert_close(chunks, whole, **tolerances.LAYOUT_LOSS)


def test_a_student_with_the_weights_of_its_teacher_has_nothing_to_learn(
    tmp_path: Path, teachers: Path
) -> None:
    same = str(teachers / "alike")
    flags = ["--load", same, "--finetune", "--export-kd-teacher-load", same, "--train-iters", "1"]
    (first, *_) = run_gpt(tmp_path, *flags, "--seed", "6")
    assert first["logits distillation loss"] < 1e-9
    assert first["grad-norm"] < 1e-5


def test_distillation_brings_the_student_to_the_teacher(tmp_path: Path, teachers: Path) -> None:
    flags = ["--export-kd-teacher-load", str(teachers / "large"), "--train-iters", "30"]
    found = losses(run_gpt(tmp_path, *flags, "--lr", "0.01"), "logits distillation loss")
    assert found[-1] < 0.5 * found[0]


@pytest.mark.parametrize("format_", ["torch", "torch_dist"])
def test_a_teacher_of_megatron_lms_formats_and_of_more_ranks_is_the_same(
    tmp_path: Path, teachers: Path, format_: str
) -> None:
    cut = ["--tensor-model-parallel-size", "2", "--ckpt-format", format_, "--seed", "6"]
    copied = ["--load", str(teachers / "alike"), "--finetune", "--train-iters", "1", "--lr", "0"]
    copied += ["--min-lr", "0"]
    run_gpt(tmp_path / "t", *cut, *copied, "--save", str(tmp_path / "there"), world_size=2)
    flags = ["--train-iters", "2", "--export-kd-teacher-load"]
    wanted = run_gpt(tmp_path / "a", *flags, str(teachers / "alike"))
    kind = ["--export-kd-teacher-ckpt-format", format_]
    found = run_gpt(tmp_path / "b", *flags, str(tmp_path / "there"), *kind)
    assert of_step(found).equal(of_step(wanted))


def test_a_resumed_run_goes_on_exactly_and_its_checkpoint_has_the_student_alone(
    tmp_path: Path, teachers: Path
) -> None:
    flags = ["--export-kd-teacher-load", str(teachers / "large"), "--bf16"]
    straight = steps(run_gpt(tmp_path / "a", *flags))
    saved = ["--save", str(tmp_path / "ck"), "--save-interval", "3"]
    run_gpt(tmp_path / "b", *flags, *saved, "--exit-interval", "3")
    rest = steps(run_gpt(tmp_path / "c", *flags, "--load", str(tmp_path / "ck")))
    assert rest == straight[3:]
    plain = ["--train-iters", "3", "--bf16", "--save", str(tmp_path / "plain")]
    run_gpt(tmp_path / "d", *plain)
    with (
        open_reader(tmp_path / "ck/iter_0000003") as distilled,
        open_reader(tmp_path / "plain/iter_0000003") as usual,
    ):
        assert distilled.tensors.keys() == usual.tensors.keys()


class WatchTeacher(Callback):
    """Compares the teacher's weights after training with those of its checkpoint."""

    def __init__(self) -> None:
        self.before: list[torch.Tensor] = []

    def on_train_start(self, run: TrainingRun) -> None:
        self.before = [p.detach().clone() for p in teacher_parameters(run)]

    def on_train_end(self, run: TrainingRun) -> None:
        after = teacher_parameters(run)
        assert len(after) == len(self.before) > 0
        assert all(a.equal(b) for a, b in zip(after, self.before, strict=True))
        assert not any(p.requires_grad or p.grad is not None for p in after)
        trained = {id(p) for chunk in run.model_chunks for p in chunk.parameters()}
        assert not trained & {id(p) for p in after}


def teacher_parameters(run: TrainingRun) -> list[torch.nn.Parameter]:
    return [p for model in frozen_models(run.model_chunks) for p in model.parameters()]


def train_and_watch(rank: int, world_size: int, argv: list[str]) -> None:
    with mock.patch("sys.argv", ["pretrain_gpt.py", *argv]):
        pretrain(
            pretrain_gpt.train_valid_test_datasets_provider,
            pretrain_gpt.model_provider,
            ModelType.encoder_or_decoder,
            pretrain_gpt.forward_step,
            args_defaults={"model_kind": "gpt"},
            callbacks=[WatchTeacher()],
        )


@pytest.mark.parametrize("precision", [[], ["--bf16"]])
def test_no_bit_of_the_teacher_changes(teachers: Path, precision: list[str]) -> None:
    flags = ["--export-kd-teacher-load", str(teachers / "large"), "--eval-interval", "2"]
    dropout = ["--hidden-dropout", "0.1", "--use-distributed-optimizer"]
    run_ranks(train_and_watch, 2, [*TINY, *flags, *dropout, *precision])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--export-kd-teacher-load NO", "--export-kd-teacher-load NO: NO holds no checkpoint"),
        ("--vocab-size 90 --export-kd-teacher-load ALIKE", "embedding.word_embeddings.weight"),
        (
            "--export-kd-teacher-load ALIKE --export-kd-teacher-ckpt-format torch",
            "is of format safetensors_dist, --export-kd-teacher-ckpt-format is torch",
        ),
        (
            "--export-kd-teacher-load LARGE --export-kd-cfg KD",
            "hidden states of width 32 of the student and 64 of the teacher",
        ),
        (
            "--export-kd-teacher-load ALIKE --export-kd-cfg KD --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 1",
            "--recompute-granularity full does not keep the outputs of layers",
        ),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(
    tmp_path: Path, teachers: Path, flags: str, message: str
) -> None:
    kd = kd_file(tmp_path, intermediate_layer_pairs=[["decoder.layers.1", "decoder.layers.1"]])
    names = {"ALIKE": str(teachers / "alike"), "LARGE": str(teachers / "large"), "KD": kd}
    argv = [*TINY, *(names.get(word, word) for word in flags.split())]
    (said,) = run_ranks(refusal, 1, argv)
    assert message in said
    assert len(said.splitlines()) <= 3, said


def test_layers_of_another_stage_are_refused() -> None:
    run = run_of("--pipeline-model-parallel-size 2", 2)
    check_pairs([LayerPair(2, 3), LayerPair(None, 2)], run, run)
    with pytest.raises(ConfigError, match="decoder.layers.1 of the teacher is not on the last"):
        check_pairs([LayerPair(2, 1)], run, run)


def test_the_plan_counts_the_weights_of_the_teacher(teachers: Path) -> None:
    folder = teachers / "large"
    with open_reader(folder / "iter_0000002") as reader:
        keys = [key for key in reader.tensors if not key.startswith("optimizer.")]
        sizes = [math.prod(reader.tensors[key].shape) for key in keys]
    seq = "--seq-length 32 --vocab-size 100 --position-embedding-type rope"
    plain = run_of(seq)
    taught = run_of(f"{seq} --export-kd-teacher-load {folder}")
    padding = (128 - 101) * 64  # rows of the vocabulary that no checkpoint has
    parameters = [cost_of_rank(run, 0, 128).state.parameters for run in (plain, taught)]
    assert parameters[1] - parameters[0] == 4 * (sum(sizes) + padding)


def test_a_script_that_builds_its_own_model_is_told(teachers: Path, tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "support" / "user_pretrain.py"
    for flags in (
        ["--export-kd-teacher-load", str(teachers / "alike")],
        ["--logits-save-dir", str(tmp_path)],
    ):
        (complaint,) = run_ranks(complaint_of_script, 1, str(script), [*TINY, *flags])
        assert f"{flags[0]} has no effect on this program" in complaint


def complaint_of_script(rank: int, world_size: int, script: str, argv: list[str]) -> str:
    with (
        mock.patch("sys.argv", [script, *argv]),
        contextlib.redirect_stderr(io.StringIO()) as complaint,
        contextlib.suppress(SystemExit),
    ):
        runpy.run_path(script, run_name="__main__")
    return complaint.getvalue()


def untaught(rank: int, world_size: int, argv: list[str]) -> str:
    """Run a model that get_model() has built; return the error message."""
    with mock.patch("sys.argv", ["own_loop.py", *argv]):
        initialize_megatron(args_defaults={"model_kind": "gpt"})
    (model,) = get_model(pretrain_gpt.model_provider, ModelType.encoder_or_decoder)
    ids = torch.zeros(2, 32, dtype=torch.int64)
    with pytest.raises(ConfigError) as caught:
        model(ids, ids, None, labels=ids)
    return str(caught.value)


def test_a_teacher_without_its_weights_never_teaches(teachers: Path) -> None:
    argv = [*TINY, "--export-kd-teacher-load", str(teachers / "alike")]
    (complaint,) = run_ranks(untaught, 1, argv)
    assert "this program has not loaded the teacher" in complaint


def test_adapters_learn_from_a_teacher(tmp_path: Path, teachers: Path) -> None:
    flags = ["--load", str(teachers / "alike"), "--lora-rank", "4", "--lr", "0.05"]
    flags += ["--export-kd-teacher-load", str(teachers / "large"), "--train-iters", "6"]
    alone = run_gpt(tmp_path / "a", *flags, "--save", str(tmp_path / "ck"))
    cut = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    found = run_gpt(tmp_path / "b", *flags, *cut, world_size=2)
    torch.testing.assert_close(of_step(found), of_step(alone), **tolerances.LAYOUT_LOSS)
    divergence = losses(alone, "logits distillation loss")
    assert divergence[-1] < divergence[0]
    with open_reader(tmp_path / "ck/iter_0000006") as reader:
        assert all("lora" in key for key in reader.tensors)


def test_a_teacher_with_experts_teaches_a_dense_student(tmp_path: Path, teachers: Path) -> None:
    experts = [*TEACHER, "--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear"]
    short = ["--train-iters", "2", "--eval-iters", "0", "--save", str(tmp_path / "moe")]
    run_gpt(tmp_path / "t", *experts, *short, "--lr", "0.05")
    flags = ["--export-kd-teacher-load", str(tmp_path / "moe"), "--train-iters", "3"]
    alone = of_step(run_gpt(tmp_path / "a", *flags))
    cut = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    found = of_step(run_gpt(tmp_path / "b", *flags, *cut, world_size=2))
    torch.testing.assert_close(found, alone, **tolerances.LAYOUT_LOSS)
    same = ["--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear"]
    both = of_step(run_gpt(tmp_path / "c", *flags, *same))
    cut = ["--expert-model-parallel-size", "2"]
    found = of_step(run_gpt(tmp_path / "d", *flags, *same, *cut, world_size=2))
    torch.testing.assert_close(found, both, **tolerances.LAYOUT_LOSS)
