"""tools/prune.py: dead parts are found and removed without a change, in any layout."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.core.dist_checkpointing.formats import open_reader
from megatron.training.conversion.convert import (
    ConversionRequest,
    convert,
    read_source,
    write_checkpoint,
)
from tests.support import tolerances
from tests.support.ranks import run_ranks
from tests.support.runs import ROOT, run_gpt

LLAMA = (
    "--num-layers 3 --hidden-size 48 --ffn-hidden-size 40 --num-attention-heads 6 --swiglu "
    "--group-query-attention --num-query-groups 3 --kv-channels 8 --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights"
).split()
MOE = [*LLAMA, "--num-experts", "4", "--moe-ffn-hidden-size", "24"]
CALIBRATION = ["--calib-size", "8", "--mock-data", "--device", "cpu", "--micro-batch-size", "2"]
CALIBRATION += ["--num-workers", "0"]


def prune(rank: int, world_size: int, argv: Sequence[str]) -> tuple[str, str, object]:
    """Run the tool on initialized process groups; return stdout, stderr and the exit code."""
    out = io.StringIO()
    err = io.StringIO()
    code: object = 0
    with (
        mock.patch("sys.argv", ["prune.py", *argv]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            runpy.run_path(str(ROOT / "tools/prune.py"), run_name="__main__")
        except SystemExit as end:
            code = end.code
    return out.getvalue(), err.getvalue(), code


def pruned(load: Path, save: Path, *flags: str, world_size: int = 1) -> dict[str, Any]:
    """Prune and return the arguments of the written checkpoint."""
    argv = ["--load", str(load), "--save", str(save), *CALIBRATION, *flags]
    for said, complaint, code in run_ranks(prune, world_size, argv):
        assert code == 0, said + complaint
    with open_reader(save / "release") as reader:
        return dict(reader.common()["args"])


def edited(load: Path, save: Path, edit: Callable[[str, Tensor], Tensor]) -> None:
    """Write a copy of a checkpoint's weights with ``edit`` applied to each."""
    wanted = ConversionRequest(source=load, target=save, format="safetensors_dist")
    source = read_source(wanted)
    tensors = {
        name: replace(t, make=lambda t=t, name=name: edit(name, t.make()))  # type: ignore[misc]
        for name, t in source.tensors.items()
        if not name.startswith("optimizer.")
    }
    common: dict[str, Any] = {"common": {}, "rank_states": {}, "layout": {}}
    write_checkpoint(replace(source, tensors=tensors, **common), wanted, lambda _: None)


def kill_parts(name: str, x: Tensor) -> Tensor:
    """Silence neurons, a head group, one head of the others, and the second layer."""
    x = x.clone()
    if ".linear_fc2.weight" in name:
        x[:, 8:16] = 0
    if ".linear_fc1.weight" in name:
        x[8:16] = x[48:56] = 0
    if ".linear_qkv.weight" in name:  # 3 groups of 2 queries, a key and a value, 8 rows each
        x[32:64][24:] = 0  # the value of group 1: both its heads
    if "layers.1." in name and (".linear_fc2.weight" in name or ".linear_proj.weight" in name):
        x.zero_()
    return x


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    short = ["--train-iters", "3", "--eval-iters", "0", "--lr", "0.02"]
    run_gpt(folder / "a", *LLAMA, *short, "--save", str(folder / "llama"))
    run_gpt(folder / "b", *MOE, *short, "--save", str(folder / "moe"))
    run_gpt(folder / "c", *short, "--save", str(folder / "gpt"))
    edited(folder / "llama", folder / "dead", kill_parts)
    return folder


def loss_of(folder: Path, load: Path, *flags: str) -> torch.Tensor:
    """Return the validation loss of a checkpoint, whose arguments describe the model."""
    base = [
        *"--device cpu --seq-length 32 --micro-batch-size 2 --global-batch-size 8".split(),
        *"--train-iters 1 --lr 0 --min-lr 0 --mock-data --tokenizer-type NullTokenizer".split(),
        *"--vocab-size 100 --eval-iters 2 --eval-interval 1 --num-workers 0".split(),
        *("--use-checkpoint-args", "--load", str(load), "--finetune"),
    ]
    metrics = run_gpt(folder, *flags, base=base)
    return torch.tensor(next(x for x in metrics if "lm loss validation" in x)["lm loss validation"])


@pytest.mark.feature("Pruning: layers, heads, neurons, hidden size and experts by importance")
def test_dead_neurons_heads_and_layers_are_removed_without_a_change(
    tmp_path: Path, models: Path
) -> None:
    sizes = ["--target-num-layers", "2", "--target-ffn-hidden-size", "32"]
    sizes += ["--target-num-attention-heads", "4", "--target-num-query-groups", "2"]
    args = pruned(models / "dead", tmp_path / "small", *sizes)
    found = [args[n] for n in ("num_layers", "ffn_hidden_size", "num_attention_heads")]
    assert found == [2, 32, 4]
    with (
        open_reader(tmp_path / "small/release") as small,
        open_reader(models / "dead/release") as complete,
    ):
        kept = [*range(8), *range(16, 40)]
        last = complete.read("decoder.layers.2.mlp.linear_fc2.weight")
        assert small.read("decoder.layers.1.mlp.linear_fc2.weight").equal(last[:, kept])
    complete_loss = loss_of(tmp_path / "a", models / "dead")
    torch.testing.assert_close(
        loss_of(tmp_path / "b", tmp_path / "small"), complete_loss, **tolerances.LAYOUT_LOSS
    )


def test_heads_alone_are_removed_from_every_group(tmp_path: Path, models: Path) -> None:
    def kill(name: str, x: Tensor) -> Tensor:
        x = x.clone()
        if ".linear_proj.weight" in name:  # the second head of each group
            x[:, 8:16] = x[:, 24:32] = x[:, 40:48] = 0
        return x

    edited(models / "llama", tmp_path / "dead", kill)
    scores = tmp_path / "scores.json"
    text = {f"layers.{i}.heads": [2.0, 1.0] * 3 for i in range(3)}
    scores.write_text(json.dumps(text | {f"layers.{i}.layer": [1.0] for i in range(3)}))
    flags = ["--target-num-attention-heads", "3", "--pruning-scores-path", str(scores)]
    args = pruned(tmp_path / "dead", tmp_path / "small", *flags)
    assert (args["num_attention_heads"], args["num_query_groups"], args["kv_channels"]) == (3, 3, 8)
    losses = [loss_of(tmp_path / n, tmp_path / n) for n in ("dead", "small")]
    torch.testing.assert_close(*losses, **tolerances.LAYOUT_LOSS)


@pytest.mark.parametrize(
    "layout",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 2 --pipeline-split auto",
        "--context-parallel-size 2",
        "",
    ],
)
def test_scores_do_not_depend_on_the_layout(tmp_path: Path, models: Path, layout: str) -> None:
    found = []
    sizes = ["--target-hidden-size", "32", "--target-num-layers", "2"]
    name = "gpt" if "tensor" in layout else "llama"
    for number, (flags, ranks) in enumerate((("", 1), (layout, 2))):
        path = tmp_path / f"{number}.json"
        own = ["--pruning-scores-path", str(path), *flags.split()]
        pruned(models / name, tmp_path / str(number), *sizes, *own, world_size=ranks)
        found.append(json.loads(path.read_text()))
    one, two = found
    assert one.keys() == two.keys()
    for key, values in one.items():
        torch.testing.assert_close(
            torch.tensor(two[key]), torch.tensor(values), rtol=1e-5, atol=1e-5
        )


def test_a_pruned_model_is_a_student_and_a_model_of_hugging_face(
    tmp_path: Path, models: Path
) -> None:
    pytest.importorskip("transformers")
    sizes = ["--target-hidden-size", "32", "--target-ffn-hidden-size", "24"]
    sizes += ["--target-num-layers", "2", "--target-num-attention-heads", "4"]
    sizes += ["--target-num-query-groups", "2"]
    args = pruned(models / "llama", tmp_path / "small", *sizes)
    assert args["hidden_size"] == 32
    said: list[str] = []
    hf = ConversionRequest(source=tmp_path / "small", target=tmp_path / "hf", format="hf")
    convert(hf, said.append)
    assert any("logits" in line for line in said)
    teach = ["--export-kd-teacher-load", str(models / "llama")]
    after = loss_of(tmp_path / "kd", tmp_path / "small", *teach)
    assert after.isfinite()


def test_experts_that_are_routed_to_least_are_dropped(tmp_path: Path, models: Path) -> None:
    scores = tmp_path / "scores.json"
    flags = ["--target-num-moe-experts", "2", "--target-hidden-size", "40"]
    flags += ["--pruning-scores-path", str(scores)]
    args = pruned(models / "moe", tmp_path / "small", *flags)
    assert args["num_experts"] == 2
    found = json.loads(scores.read_text())
    order = torch.tensor(found["layers.1.experts"]).argsort(descending=True)[:2].sort().values
    channels = torch.tensor(found["hidden"]).argsort(descending=True)[:40].sort().values
    with (
        open_reader(tmp_path / "small/release") as small,
        open_reader(models / "moe/iter_0000003") as complete,
    ):
        name = "decoder.layers.1.mlp.experts.local_experts.{}.linear_fc1.weight"
        for new, old in enumerate(order.tolist()):
            wanted = complete.read(name.format(old))[:, channels]
            assert small.read(name.format(new)).equal(wanted)
    assert loss_of(tmp_path / "a", tmp_path / "small").isfinite()


def test_layers_may_be_named(tmp_path: Path, models: Path) -> None:
    args = pruned(models / "gpt", tmp_path / "small", "--layers-to-drop", "1")
    assert args["num_layers"] == 1
    with (
        open_reader(tmp_path / "small/release") as small,
        open_reader(models / "gpt/iter_0000003") as complete,
    ):
        found = small.read("decoder.layers.0.mlp.linear_fc1.weight")
        assert found.equal(complete.read("decoder.layers.1.mlp.linear_fc1.weight"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "no size is given: use --target-num-layers"),
        ("--target-num-layers 9", "--target-num-layers 9: the model has 3"),
        ("--target-num-moe-experts 2", "--target-num-moe-experts 2: the model has none"),
        ("--target-num-attention-heads 4", "4 heads in 3 groups: a group of the model has 2"),
        ("--layers-to-drop 4", "--layers-to-drop [4]: layers are 1 to 3"),
        ("--target-hidden-size 32 --calib-size 1", "--calib-size 1: a step has 2 samples"),
    ],
)
def test_a_size_that_the_model_cannot_have_is_one_message(
    tmp_path: Path, models: Path, flags: str, message: str
) -> None:
    load = ["--load", str(models / "llama"), "--save", str(tmp_path / "no")]
    ((_, complaint, code),) = run_ranks(prune, 1, [*load, *CALIBRATION, *flags.split()])
    assert message in complaint
    assert code == 2
    assert not (tmp_path / "no").exists()
