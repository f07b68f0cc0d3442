"""tools/plot_run.py: the same values from every kind of file, in a picture and in a page."""

from __future__ import annotations

import json
import os
from pathlib import Path
from xml.etree import ElementTree

import pytest
from torch.utils.tensorboard import SummaryWriter

from megatron.training.callbacks.sinks import (
    EvalRecord,
    MetricsFileSink,
    StepRecord,
    TensorBoardSink,
)
from tests.support.callback_calls import run_config
from tools import plot_run
from tools.lib.run_values import NoValues, read_run

LOG = """
 [2026-11-28 17:35:24] iteration        2/       4 | consumed samples:  16 | elapsed time per \
iteration (ms): 500.0 | learning rate: 1.000000E-03 | global batch size:     8 | lm loss: \
2.500000E+00 | loss scale: 1.0 | grad norm: 0.500 |
[rank3]: validation loss at iteration 2 | lm loss value: 2.250000E+00 | lm loss PPL: 9.487736E+00 |
 iteration        4/       4 | consumed samples:  32 | elapsed time per iteration (ms): 250.0 | \
learning rate: 5.000000E-04 | global batch size:     8 | lm loss: 2.000000E+00 | grad norm: 0.250 |
 iteration        4/       4 | elapsed time per iteration (ms): 250.0 | global batch size:     8 | \
lm loss: 1.750000E+00 | grad norm: nan |
 validation loss at iteration 4 on test set | lm loss value: 1.500000E+00 | lm loss PPL: 4.5E+00 |
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run as log, metrics file and TensorBoard folder."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "run.log").write_text(LOG)
    config = run_config(f"--tensorboard-dir {folder}/tb --log-timers-to-tensorboard").logging
    sinks = MetricsFileSink(f"{folder}/json/metrics.jsonl", 0), TensorBoardSink(config, {}, 0)
    losses = {2: 2.5, 4: 1.75}
    norms = {2: 0.5, 4: float("nan")}
    rates = {2: 1e-3, 4: 5e-4}
    for step, loss in losses.items():
        ms = 1000.0 / step
        record = StepRecord(
            iteration=step,
            train_iters=4,
            consumed_samples=8 * step,
            losses={"lm loss": loss},
            values={
                "learning-rate": rates[step],
                "grad-norm": norms[step],
                "batch-size": 8,
                "iteration-time": ms / 1000,
                "moe/load_layer_0": 1.5,
                "moe/load_layer_1": 2.0,
            },
            interval={"elapsed time per iteration (ms)": ms, "lm loss": 9.0},
        )
        for sink in sinks:
            sink.write_step(record)
    for step, loss, split in ((2, 2.25, "validation"), (4, 1.5, "test")):
        evaluation = EvalRecord(
            iteration=step,
            consumed_samples=8 * step,
            losses={"lm loss": loss},
            split="test" if split == "test" else "validation",
            suffix="",
            is_final=False,
        )
        for sink in sinks:
            sink.write_eval(evaluation)
    for sink in sinks:
        sink.close()
    with (folder / "json/metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "itera')  # killed
    return folder


@pytest.mark.parametrize("name", ["run.log", "json", "tb"])
def test_every_kind_of_file_gives_the_same_curves(runs: Path, name: str) -> None:
    curves = read_run(runs / name)
    assert curves["lm loss"] == {2: 2.5, 4: 1.75}, "the later value of a step counts"
    assert curves["lm loss validation"] == {2: 2.25}
    assert curves["lm loss test"] == {4: 1.5}
    assert curves["grad-norm"][2] == 0.5
    assert curves["grad-norm"][4] != curves["grad-norm"][4]
    assert curves["samples/s"] == pytest.approx({2: 16.0, 4: 32.0})
    assert curves["learning-rate"][2] == pytest.approx(1e-3)
    assert not any("samples" in tag for tag in curves if tag != "samples/s")


def test_a_path_without_values_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("nothing\n")
    for path, text in {
        tmp_path: "has neither metrics.jsonl nor TensorBoard's event files",
        tmp_path / "a.txt": "has no line of a training step",
        tmp_path / "b": "does not exist",
    }.items():
        with pytest.raises(NoValues, match=text):
            read_run(path)


def test_names_are_the_parts_of_the_paths_that_differ() -> None:
    paths = [Path("runs/a/metrics.jsonl"), Path("runs/b/log.txt"), Path("other/b/tensorboard")]
    assert plot_run.short_names(paths) == ["runs/a", "runs/b", "other/b"]
    assert plot_run.short_names(paths[:2]) == ["a", "b"]
    assert plot_run.short_names([paths[0], paths[0]]) == ["runs/a", "runs/a"]


def test_a_moving_mean_leaves_out_nan() -> None:
    assert plot_run.moving_mean([1.0, float("nan"), 3.0, 5.0], 1) == [1.0, 2.0, 4.0, 4.0]


@pytest.mark.feature("Logging: tools/plot_run.py draws runs as PNG or as one HTML page")
def test_a_picture_and_a_page_show_the_runs(runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = [str(runs / "json"), f"second={runs}/run.log"]
    assert plot_run.main([*words, "--output", str(tmp_path / "deep/a.png")]) == 0
    assert (tmp_path / "deep/a.png").read_bytes().startswith(b"\x89PNG")
    assert plot_run.main([*words, "--output", str(tmp_path / "a.html")]) == 0
    text = (tmp_path / "a.html").read_text()
    assert not any(word in text for word in ("<script", "<link", "src=", "@import"))
    picture = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    assert picture.tag.endswith("svg")
    assert "<td>1.75</td><td>2.25</td><td>1.5</td>" in text
    assert "second" in text


@pytest.mark.feature("Logging: tools/plot_run.py draws runs as PNG or as one HTML page")
def test_what_no_run_has_is_named_with_its_flag(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    found = plot_run.load([str(runs / "run.log")], from_step=3)
    assert found[0].curves["lm loss"] == {4: 1.75}
    figure, missing = plot_run.draw(pyplot, found)
    assert [ax.get_title(loc="left") for ax in figure.axes if ax.get_title(loc="left")] == [
        *("loss", "samples/s", "gradient norm", "learning rate")
    ]
    assert any("--log-memory-to-tensorboard" in cure for cure in missing.values())
    assert any("--moe-per-layer-logging" in cure for cure in missing.values())
    with pytest.raises(SystemExit):
        plot_run.main([str(runs / "run.log"), "--output", str(tmp_path / "a.gif")])
    assert "its suffix must be one of .png, .svg, .pdf, .html" in capsys.readouterr().err


def test_the_reader_and_the_writer_of_tensorboard_agree_on_restarts(tmp_path: Path) -> None:
    for start, values in enumerate(({1: 1.0, 2: 2.0}, {2: 3.0, 3: 4.0})):
        with SummaryWriter(str(tmp_path)) as writer:
            for step, value in values.items():
                writer.add_scalar("lm loss", value, step)
        # Files are read by name: second, host, process, number of the writer.  Within a second the
        # tenth writer of a process would be read before the ninth.
        (file,) = tmp_path.glob(f"*.{os.getpid()}.*")
        file.rename(tmp_path / f"events.out.tfevents.{start:010}.host.1.0")
    assert json.dumps(read_run(tmp_path)) == '{"lm loss": {"1": 1.0, "2": 3.0, "3": 4.0}}'
