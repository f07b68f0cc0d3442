"""The rerun state machine in complete runs: layouts, restarts, formats, injected errors.

The runs use dropout, so a step that is computed again has the same losses only if the random states
are restored.
"""

from __future__ import annotations

import contextlib
import io
import json
import platform
import re
from pathlib import Path

import pytest

from tests.support import host_gpu, selection
from tests.support.ranks import run_ranks
from tests.support.runs import SIX_STEPS, train_gpt

DROPOUT = [*SIX_STEPS, "--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall"
)
LAYOUTS = {
    "alone": (1, ""),
    "tensor": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "interleaved": (
        2,
        "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1",
    ),
    "zero-bubble": (
        2,
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --num-layers 4 "
        "--pipeline-model-parallel-layout Et|t|t|tL",
    ),
    "context": (2, "--context-parallel-size 2"),
    "experts": (2, f"--expert-model-parallel-size 2 {EXPERTS}"),
    "zero": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "fsdp": (2, "--use-torch-fsdp2 --no-gradient-accumulation-fusion"),
    "fp8": (1, "--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4"),
}
not_emulated = pytest.mark.skipif(
    host_gpu.is_asked(),
    reason="these formats recognize the random state of a GPU by its size, and this one has the "
    "host's",
)
# Lines that scripts search for in the log, in Megatron-LM's spelling.
WARNING = "WARNING:megatron.core.rerun_state_machine:"
ERROR = "ERROR:megatron.core.rerun_state_machine:"
INJECTED = {
    "correct_result": "Expected result",
    "transient_error": "Transient error",
    "persistent_error": "Persistent error",
}
DIAGNOSES = {
    "correct_result": "Correct result (but possible Application error)",
    "transient_error": "Possible transient error!",
    "persistent_error": "Possible persistent error!",
}
MEASURED = ("lm loss", "load_balancing_loss", "z_loss", "grad-norm")


def _end(rank: int, world_size: int, argv: list[str]) -> tuple[int, str]:
    """Train; return the exit code and the output of this rank."""
    said = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            train_gpt(rank, world_size, argv)
        except SystemExit as end:
            code = int(end.code or 0)
    return code, said.getvalue()


def train(
    folder: Path, *flags: str, world_size: int = 1, faults: str = ""
) -> tuple[set[int], str, dict[int, list[float]]]:
    """Return the exit codes of the ranks, their output, and the values of each step."""
    folder.mkdir(parents=True, exist_ok=True)
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULTS", faults)
        argv = [*DROPOUT, "--metrics-file", str(metrics), *flags]
        ends = run_ranks(_end, world_size, argv)
    lines = map(json.loads, metrics.read_text().splitlines()) if metrics.exists() else ()
    values = {
        line["iteration"]: [line[name] for name in MEASURED if name in line]
        for line in lines
        if "lm loss" in line
    }
    return {code for code, _ in ends}, "\n".join(text for _, text in ends), values


DEFAULT = (
    "alone",
    "tensor",
    "experts",
    "zero",
)  # of `make test`


@pytest.mark.feature("Reruns: a transient error leaves no trace in the losses, in every layout")
@pytest.mark.parametrize("layout", selection.only(DEFAULT, LAYOUTS))
def test_a_transient_error_leaves_the_losses_of_the_undisturbed_run(
    tmp_path: Path, layout: str
) -> None:
    world_size, flags = LAYOUTS[layout]
    undisturbed = train(tmp_path / "a", *flags.split(), world_size=world_size)
    fault = f"step.gradient:nan:step3:times1:rank{world_size - 1}"
    if layout == "zero-bubble":  # the first pipeline rank has the loss
        fault = fault.replace("rank1", "rank0")
    codes, said, values = train(tmp_path / "b", *flags.split(), world_size=world_size, faults=fault)
    assert "Possible transient error!" in said
    assert codes == {0}
    assert values == undisturbed[2]
    assert len(values) == 6


@pytest.mark.feature("Reruns: a restart tells a fault of the hardware from a correct result")
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, "--use-distributed-optimizer"),
        pytest.param(2, "--tensor-model-parallel-size 2 --ckpt-format torch", marks=not_emulated),
        (2, "--pipeline-model-parallel-size 2"),
        pytest.param(1, "", marks=pytest.mark.slow),
        pytest.param(
            2,
            "--pipeline-model-parallel-size 2 --ckpt-format torch_dist",
            marks=[not_emulated, pytest.mark.slow],
        ),
    ],
)
def test_a_persistent_error_is_blamed_and_the_run_goes_on_after_it(
    tmp_path: Path, world_size: int, layout: str
) -> None:
    save = ["--save", str(tmp_path / "c"), "--load", str(tmp_path / "c"), *layout.split()]
    undisturbed = train(tmp_path / "a", *layout.split(), world_size=world_size)
    bad = world_size - 1
    fault = f"step.gradient:nan:step3:rank{bad}"
    codes, said, values = train(tmp_path / "b", *save, world_size=world_size, faults=fault)
    assert codes == {16}
    assert "the step was computed twice with this result" in said
    assert list(values) == [1, 2]
    codes, said, values = train(tmp_path / "b", *save, world_size=world_size)
    assert codes == {17}
    assert re.search(rf"a persistent error of the hardware of .*rank {bad} on node", said)
    assert not values
    codes, said, values = train(tmp_path / "b", *save, world_size=world_size)
    assert codes == {0}, "resumes from exit code 17"
    assert values == {step: undisturbed[2][step] for step in (3, 4, 5, 6)}


def test_a_correct_result_ends_every_start_until_its_step_is_skipped(tmp_path: Path) -> None:
    tracker = str(tmp_path / "tracker")
    save = ["--save", str(tmp_path / "c"), "--load", str(tmp_path / "c")]
    flags = [*save, "--result-rejected-tracker-filename", tracker]
    fault = "step.gradient:nan:step3"
    assert train(tmp_path, *flags, faults=fault)[0] == {16}
    codes, said, _ = train(tmp_path, *save, faults=fault)
    assert codes == {17}
    assert "it is no fault of the hardware" in said
    assert train(tmp_path, *flags, faults=fault)[0] == {17}
    codes, _, values = train(tmp_path, *flags, faults=fault)
    assert codes == {0}
    assert list(values) == [4, 5, 6], "step 3 is skipped"


def test_another_start_on_the_same_devices_is_asked_for_once(tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "c"), "--load", str(tmp_path / "c")]
    codes = [
        train(tmp_path, *save, world_size=2, faults="step.gradient:nan:step3")[0] for _ in range(4)
    ]
    assert codes == [{16}, {16}, {17}, {17}]


def test_another_layout_ignores_the_step_that_was_to_be_judged(tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "c"), "--load", str(tmp_path / "c")]
    assert train(tmp_path, *save, world_size=2, faults="step.gradient:nan:step3")[0] == {16}
    codes, said, values = train(tmp_path, *save, "--tensor-model-parallel-size", "2", world_size=2)
    assert "the state of a step that would be computed again, are not restored" in said
    assert f"{WARNING}Job sharding has changed: Rerun state will be ignored" in said.splitlines()
    assert codes == {0}
    assert list(values) == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("kind", "expected"), [("correct_result", 17), ("transient_error", 0), ("persistent_error", 17)]
)
def test_an_injected_error_of_each_type_is_diagnosed(
    tmp_path: Path, kind: str, expected: int
) -> None:
    flags = ["--save", str(tmp_path / "c"), "--load", str(tmp_path / "c")]
    flags += ["--error-injection-rate", "25", "--error-injection-type", kind]
    codes, said, _ = train(tmp_path, *flags)
    lines = said.splitlines()
    assert "Setting rerun_state_machine.current_iteration to 0..." in lines
    assert f"{WARNING}Result validation enabled" in lines
    assert f"{WARNING}Injecting error type {INJECTED[kind]}" in lines
    is_same = "is" if expected else "is not"
    assert f"{WARNING}First rerun: unexpected result {is_same} reproducible within the" in said
    if expected:
        assert codes == {16}
        assert (
            f"{WARNING}Saving a checkpoint and exiting now. Please resume the job from the "
            "checkpoint to rerun the last iteration and establish a diagnostic"
        ) in lines
        codes, said, _ = train(tmp_path, *flags)
        assert "successfully loaded checkpoint" in said
    diagnosis = DIAGNOSES[kind]
    assert f"{ERROR}Rank 0, node {platform.node()}, device 0: {diagnosis}!" in said.splitlines()
    assert codes == {expected}


def test_statistics_of_determinism_are_logged(tmp_path: Path) -> None:
    undisturbed = train(tmp_path / "a")
    codes, said, values = train(tmp_path / "b", "--rerun-mode", "report_stats")
    assert codes == {0}
    assert values == undisturbed[2]
    assert re.search(r"determinism of 'found NaN .* in 6 iterations: 24/24 identical", said)
