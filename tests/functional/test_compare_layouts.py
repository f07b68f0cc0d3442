"""tools/compare_layouts.py: equal layouts, thirteen planted errors, and what it prints."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.core.config.errors import ConfigError
from tests.support import forked
from tests.support.planted_errors import ERRORS, NAME
from tests.support.ranks import run_ranks
from tests.support.runs import train_gpt
from tools.compare_layouts import main
from tools.lib.layout_cases import CASES, Case
from tools.lib.layout_commands import layout_of, program_of, settings
from tools.lib.layout_traces import PRECISIONS, Difference, Trace, compare, read_folder

PLANT = ["--callback", "tests.support.planted_errors:Planted"]
# Runs that show the errors: case whose model and layouts it has -> an error for each step, in
# steps that change no weight.  The bias of experts changes in the last one.
RUNS = {
    "sinks": "- sinks norm-copies norm-gradients",
    "tied-embedding": "- tied-embedding",
    "expert-norm": "- expert-norm expert-gradients expert-bias",
    "z-loss": "- balance-counts z-loss",
    "replicated-weights": "- replicated-weights",
    "mtp-tokens": "- mtp-tokens token-counts",
    "padding-mask": "padding-mask -",
}
_LAYER = "decoder.layers.0"
# Error -> the first value that differs.
SHOWN = {
    "mtp-tokens": "mtp_1 loss",
    "token-counts": "gradient of embedding.word_embeddings.weight",
    "padding-mask": "lm loss",
    "sinks": "grad norm",
    "norm-copies": "grad norm",
    "norm-gradients": f"gradient of {_LAYER}.input_layernorm.weight",
    "replicated-weights": f"gradient of {_LAYER}.self_attention.linear_q_down_proj.weight",
    "expert-norm": "grad norm",
    "expert-gradients": f"gradient of {_LAYER}.mlp.experts.local_experts.3.linear_fc1.weight",
    "balance-counts": "load_balancing_loss",
    "expert-bias": f"buffer of {_LAYER}.mlp.router.expert_bias",
    "z-loss": "z_loss",
    "tied-embedding": "gradient of embedding.word_embeddings.weight",
}


def test_every_case_has_an_error_and_a_run() -> None:
    planted = {name for names in RUNS.values() for name in names.split()} - {"-"}
    assert planted == ERRORS.keys() == CASES.keys() == SHOWN.keys()
    assert len(CASES) == 13
    for name, errors in RUNS.items():
        for error in set(errors.split()) - {"-"}:
            same = CASES[name], CASES[error]
            assert len({(case.flags, case.layouts, case.script) for case in same}) == 1


@pytest.mark.feature("Layouts: a tool names the first step and value that differ between layouts")
@pytest.mark.parametrize("name", RUNS)
def test_a_planted_error_is_the_first_difference_of_its_step(name: str, tmp_path: Path) -> None:
    planted = RUNS[name].split()
    first, other = (
        trace(CASES[name], layout, planted, tmp_path / layout) for layout in CASES[name].layouts
    )
    found: dict[int, Difference] = {}
    for difference in compare("other", first, other, PRECISIONS["fp32"]).differences:
        found.setdefault(difference.step, difference)
    shown = {step: difference.name for step, difference in found.items()}
    assert shown == {i: SHOWN[error] for i, error in enumerate(planted, 1) if error != "-"}


def trace(case: Case, layout: str, planted: Sequence[str], folder: Path) -> Trace:
    """Train in ``layout`` with an error in each step."""
    folder.mkdir()
    program = program_of(case.command())
    program.flags += ["--lr", "0", "--global-batch-size", "4"]
    flags = settings(program, [layout_of(layout)], len(planted), fp32=False)
    flags += ["--train-iters", str(len(planted)), "--metrics-file", str(folder / "metrics.jsonl")]
    flags += [*PLANT, "tools.lib.tensor_recorder:RecordTensors"]
    words = program.in_layout(layout_of(layout), flags)
    argv = words[words.index(program.script) + 1 :]
    kind = Path(program.script).stem.removeprefix("pretrain_")
    argv += [] if kind == "gpt" else ["--model-kind", kind]
    environ = {NAME: " ".join(planted), "COMPARE_LAYOUTS_FOLDER": str(folder)}
    run_ranks(train, layout_of(layout).processes, argv, environ)
    return read_folder(folder)


def train(rank: int, world_size: int, argv: Sequence[str], environ: dict[str, str]) -> None:
    os.environ.update(environ)
    with contextlib.redirect_stdout(io.StringIO()):
        train_gpt(rank, world_size, argv)


def test_a_command_in_two_layouts_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    python = forked.python()
    monkeypatch.setenv("PYTHON_EXEC", python)  # of the ranks that torchrun starts
    report = tmp_path / "report.json"
    command = [f"{NAME}=- sinks", python, *CASES["sinks"].command()[1:], "--lr", "0", *PLANT]
    asked = ["--layouts", "one", "tp2 sp", "--steps", "2", "--jobs", "2", "--json", str(report)]
    assert main([*asked, "--keep", str(tmp_path / "runs"), "--", *command]) == 1
    said = capsys.readouterr().out
    assert "tp2 sp differs first at step 2: grad norm: " in said
    assert said.endswith("DIFFERENT: tp2 sp\n")
    (content,) = json.loads(report.read_text())["layouts"]
    found = {(d["step"], d["name"]) for d in content["differences"]}
    assert found == {(2, "grad norm"), (2, "params norm")}  # the same function counts for both
    assert (tmp_path / "runs" / "tp2-sp" / "log.txt").read_text().count("iteration") >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sinks", "expert-norm", "mtp-tokens"])
def test_models_of_the_cases_are_equal_in_the_default_layouts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", forked.python())
    command = [forked.python(), *CASES[name].command()[1:], "--num-layers", "4"]
    assert main(["--processes", "4", "--", *command]) == 0


def test_conflicts_are_reported_before_anything_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = [forked.python(), *CASES["sinks"].command()[1:], "--num-attention-heads", "3"]
    command += ["--hidden-size", "33"]
    assert main(["--layouts", "one", "tp2", "--", *command]) == 2
    out, err = capsys.readouterr()
    assert "tp2 cannot start:\n  - " in out
    assert "--num-attention-heads 3 cannot be split over --tensor-model-parallel-size 2" in out
    assert "not every layout can start" in err


# A program whose initial weights and log are those of Megatron-LM: it prints lines.
_FOREIGN = """
import sys
loss = "4.500001E+00" if "--tensor-model-parallel-size" in sys.argv else "4.500000E+00"
for i in (1, 2):
    print(f" [2026-01-01 00:00:00] iteration {i:8d}/ 9 | consumed samples: 8 | lm loss: {loss} | "
          f"grad norm: {1.25 + 0.25 * i * ('--context-parallel-size' in sys.argv):.3f} | ")
"""


def test_log_lines_of_another_program_are_compared_by_their_digits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", forked.python())
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(_FOREIGN)
    command = [forked.python(), str(script), "--micro-batch-size", "1"]
    asked = ["--layouts", "one", "tp2", "cp2", "--"]
    assert main([*asked, *command]) == 2
    assert "give its folder with --load" in capsys.readouterr().err
    assert main([*asked, *command, "--load", "checkpoint"]) == 1
    said = capsys.readouterr().out
    assert "cp2 differs first at step 1: grad norm: 1.5, in the first layout 1.25" in said
    assert said.endswith("DIFFERENT: cp2\n")


def test_programs_are_found_in_command_lines(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        "set -e\npython tools/preprocess_data.py --input x\n"
        "torchrun --nproc_per_node=${GPUS:-8} pretrain_gpt.py --lr 1 "
        "--tensor-model-parallel-size 4 --sequence-parallel --cp-comm-type p2p a2a --bf16 "
        "--save x --train-iters 5"
    )
    program = program_of(["GPUS=4", "bash", str(script)])
    assert (program.script, program.processes, program.environ) == (
        "pretrain_gpt.py",
        4,
        {"GPUS": "4"},
    )
    flags = settings(program, [layout_of("one"), layout_of("dp2")], 3, fp32=True)
    words = program.in_layout(layout_of("pp2 dp2 --cp-comm-type a2a"), flags)
    assert words[:4] == ["torchrun", "--standalone", "--nproc-per-node", "4"]
    kept = words[words.index("pretrain_gpt.py") + 1 : words.index("--exit-interval")]
    assert kept == (
        "--lr 1 --train-iters 5 --pipeline-model-parallel-size 2 --cp-comm-type a2a".split()
    )
    assert words[-2:] == ["--global-batch-size", "2"]
    assert program_of(["megatron-train", "sft", "--lr", "1"]).flags == ["--sft", "--lr", "1"]
    launched = program_of("megatron-launch --nproc-per-node 8 --nnodes 2 gpt --lr 1".split())
    assert (launched.processes, launched.flags) == (16, ["--lr", "1"])
    assert program_of("python tools/launch.py --nproc-per-node 2 t5 --lr 1".split()).processes == 2
    assert program_of(["python", "a.py"]).python == sys.executable
    with pytest.raises(ConfigError, match="is not a training command"):
        program_of(["ls", "-l"])
    with pytest.raises(ConfigError, match="'tp0' is not a part of a layout"):
        layout_of("tp0")
    assert [layout_of(text).processes for text in ("ep2 cp2", "ep4 tp2", "tp2 ep2 etp1")] == [
        2,
        8,
        2,
    ]
