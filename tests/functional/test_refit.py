"""Generate between training steps: the engine has the weights of the step, in another layout."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core import device
from megatron.core.config.errors import CheckpointError
from megatron.core.inference.paged_engine.engine import Engine
from megatron.core.inference.paged_engine.request import Request
from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference.engine_flags import GenerationLayout
from megatron.inference.generation import TrainingEngine, Writer, open_engine, open_writer
from megatron.training.runtime.context import StepResult
from megatron.training.step.run import Callback, TrainingRun
from tests.support import selection
from tests.support.ranks import run_ranks
from tests.support.runs import losses, run_gpt

EVERY = 2  # steps
PROMPTS = [[(5 * i + 3 * j) % 90 + 1 for j in range(2 + 5 * i)] for i in range(5)]
Answers = list[tuple[list[int], list[float], list[float]]]  # tokens, their log-probs, the prompt's


def answers(engine: Engine, writer: Writer) -> Answers:
    """Generate, sampled with seeds, on rank 0."""
    out: dict[str, tuple[list[int], list[float], list[float]]] = {}
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            num_tokens_to_generate=8,
            seed=i,
            ignore_eos=True,
            return_log_probs=True,
            return_prompt_log_probs=True,
        )
        engine.add(Request(str(i), prompt, params))
        out[str(i)] = ([], [], [])
    while engine.has_unfinished:
        for output in engine.step():
            tokens, log_probs, of_prompt = out[output.request_id]
            tokens += [t.token for t in output.new]
            log_probs += [t.log_prob for t in output.new]
            of_prompt += [t.log_prob for t in output.prompt_scores]
    engine.close()
    return list(out.values())


class Generates(Callback):
    """After every `EVERY` steps, rank 0 adds a line to the file GENERATED."""

    engine: TrainingEngine

    def on_train_start(self, run: TrainingRun) -> None:
        asked: dict[str, Any] = json.loads(os.environ["ENGINE"])
        self.engine = open_engine(run, layout=GenerationLayout(**asked.pop("layout")), **asked)

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        if run.state.iteration % EVERY:
            return
        self.engine.update()
        of_training = [training_log_probs(run, prompt) for prompt in PROMPTS]
        writer = self.engine.writer
        if run.is_rank_0:
            found = answers(writer.engine, writer)
            with open(os.environ["GENERATED"], "a") as file:
                print(json.dumps([run.state.iteration, found, of_training]), file=file)
        else:
            writer.engine.follow()


@torch.no_grad()
def training_log_probs(run: TrainingRun, prompt: list[int]) -> list[float]:
    """Return the log-probabilities that the forward pass of training gives a prompt's tokens."""
    (model,) = run.model_chunks
    even = [*prompt, 0] if len(prompt) % 2 else prompt  # for sequence parallelism
    where = device.current()
    tokens = torch.tensor([even], device=where)
    labels = torch.tensor([[*even[1:], 0]], device=where)
    model.eval()
    losses = model(tokens, torch.arange(len(even), device=where)[None], None, labels=labels)
    model.train()
    return [-x for x in losses[0, : len(prompt) - 1].tolist()]


def from_checkpoint(rank: int, world_size: int, load: str) -> list[Answers]:
    """Open the first checkpoint, and go on with the weights of the second."""
    writer = open_writer(load, step=EVERY, device_kind="cpu")
    first = answers(writer.engine, writer)
    assert writer.engine.update_weights(load) == 1
    return [first, answers(writer.engine, writer)]


def must_be_equal(found: Answers, wanted: Answers) -> None:
    for (tokens, log_probs, of_prompt), (others, *more) in zip(found, wanted, strict=True):
        assert tokens == others
        assert log_probs == pytest.approx(more[0], abs=1e-5)
        assert of_prompt == pytest.approx(more[1], abs=1e-5)


CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "tp2 dp2 to pp2": (
        ["--tensor-model-parallel-size", "2", "--use-distributed-optimizer"],
        {"layout": {"tensor": 1, "pipeline": 2}},
    ),
    "tp2 dp2 to 4 replicas": (
        ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
        + ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
        {"layout": {"tensor": 1}},
    ),
    "shared memory": (
        ["--tensor-model-parallel-size", "2"],
        {"layout": {"tensor": 2}, "share_memory": True},
    ),
}


@pytest.mark.feature("Generation: an engine on the ranks of a run generates between its steps")
@pytest.mark.parametrize("name", selection.only(["tp2 dp2 to pp2", "shared memory"], CASES))
def test_an_engine_in_training_writes_what_one_of_the_checkpoint_writes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, engine = CASES[name]
    monkeypatch.setenv("ENGINE", json.dumps(engine))
    monkeypatch.setenv("GENERATED", str(tmp_path / "generated"))
    save = ["--save", str(tmp_path / "saved"), "--save-interval", str(EVERY)]
    argv = [*flags, "--train-iters", str(2 * EVERY)]
    callback = ["--callback", "tests.functional.test_refit:Generates"]
    with_engine = run_gpt(tmp_path / "a", *argv, *callback, *save, world_size=4)
    alone = run_gpt(tmp_path / "b", *argv, world_size=4)
    assert losses(with_engine) == losses(alone), "the engine has changed training"

    lines = [json.loads(line) for line in (tmp_path / "generated").read_text().splitlines()]
    assert [iteration for iteration, _, _ in lines] == [EVERY, 2 * EVERY]
    (wanted,) = run_ranks(from_checkpoint, 1, str(tmp_path / "saved"))
    for (_, found, of_training), answer in zip(lines, wanted, strict=True):
        for (_, _, of_prompt), of_forward in zip(found, of_training, strict=True):
            assert of_prompt == pytest.approx(of_forward, abs=1e-5)
        must_be_equal(found, answer)
    assert lines[0][1] != lines[1][1], "training has changed nothing"


def with_bad_updates(
    rank: int, world_size: int, load: str, bad: dict[str, str], pipeline: int
) -> tuple[list[Answers], dict[str, str], int]:
    """Return the answers before and after bad updates and after a good one, and the errors."""
    layout = GenerationLayout(tensor=1, pipeline=pipeline)
    engine = (writer := open_writer(load, step=EVERY, device_kind="cpu", layout=layout)).engine
    if rank:
        engine.follow()  # until the first answers are there
        engine.follow()
        engine.follow()
        return [], {}, 0
    found = [answers(engine, writer)]
    errors = {}
    for name, path in bad.items():
        with pytest.raises(CheckpointError) as error:
            engine.update_weights(path)
        errors[name] = str(error.value)
    assert engine.weight_version == 0
    found.append(answers(engine, writer))
    version = engine.update_weights(load)
    found.append(answers(engine, writer))
    return found, errors, version


@pytest.mark.feature("Generation: a damaged checkpoint in an update leaves the old weights")
@pytest.mark.parametrize("pipeline", [1, 2])
def test_a_bad_checkpoint_leaves_the_old_weights(pipeline: int, tmp_path: Path) -> None:
    good, damaged, other = (tmp_path / name for name in ("good", "damaged", "other"))
    save = ["--save-interval", str(EVERY), "--train-iters", str(2 * EVERY)]
    run_gpt(tmp_path / "a", "--save", str(good), *save)
    run_gpt(tmp_path / "b", "--save", str(other), *save, "--num-layers", "3")
    shutil.copytree(good, damaged)
    data = max((damaged / f"iter_{2 * EVERY:07}").glob("*.safetensors"))
    content = bytearray(data.read_bytes())
    for i in range(8 + int.from_bytes(content[:8], "little"), len(content), 50):
        content[i] ^= 1
    data.write_bytes(content)
    bad = {"damaged": str(damaged), "other": str(other), "missing": str(tmp_path / "missing")}
    found, errors, version = run_ranks(with_bad_updates, 2, str(good), bad, pipeline)[0]
    before, after_errors, after = found
    assert before == after_errors
    assert before != after
    assert version == 1
    assert "does not fit its checksum" in errors["damaged"]
    assert "num_layers" in errors["other"] or "--num-layers" in errors["other"]
    assert "holds no checkpoint" in errors["missing"]
