"""Experiment trackers with their real clients, offline: a run is killed and goes on in its own.

The clients are no packages of the tests: ``pip install "megatron-train[log,trackers]"``.
"""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.training.callbacks.trackers import TRACKERS
from tests.support.runs import run_gpt

Values = list[tuple[int, float]]
TAGS = ("lm loss", "lm loss validation", "lm loss test", "learning-rate")
INSTALLED = [name for name, (package, _) in TRACKERS.items() if importlib.util.find_spec(package)]
KILLED_AT = 6
SAVED_AT = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run on one rank that was killed in step 6, and resumed on two from step 4."""
    if not INSTALLED:
        pytest.skip("no client of a tracker is installed")
    folder = tmp_path_factory.mktemp("trackers")
    places = {
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "TRACKIO_DIR": f"{folder}/trackio",
        "COMET_START_ONLINE": "0",
        "COMET_OFFLINE_DIRECTORY": f"{folder}/comet",
        "CLEARML_OFFLINE_MODE": "1",
        "CLEARML_CACHE_DIR": f"{folder}/clearml",
    }
    flags = ["--save", str(folder), "--load", str(folder), "--save-interval", "2"]
    flags += ["--train-iters", "8", "--eval-interval", "4", "--eval-iters", "1"]
    flags += ["--wandb-project", "p", "--wandb-exp-name", "e"] if "wandb" in INSTALLED else []
    others = [name for name in INSTALLED if name != "wandb"]
    flags += ["--tracker", *others, "--tracker-project", "p", "--tracker-run", "e"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in places.items():
            patch.setenv(name, value)
        faults = (
            "step.before:slow:step{0}:4s,step.gradient:kill:step{0}"  # clients send each second
        )
        patch.setenv("FAULTS", faults.format(KILLED_AT))
        with pytest.raises(AssertionError, match="SIGKILL"):
            run_gpt(folder, *flags, timeout_s=240)
        patch.delenv("FAULTS")
        (folder / "ids.json").write_text((folder / "trackers.json").read_text())
        layout = "--tensor-model-parallel-size", "2"
        run_gpt(folder, *flags, *layout, world_size=2, timeout_s=240)
        yield folder


def truth(folder: Path) -> dict[str, Values]:
    """Return tag -> [(step, value)] of the metrics file."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {tag: [(line["iteration"], line[tag]) for line in lines if tag in line] for tag in TAGS}


def of_mlflow(folder: Path, run_id: str) -> tuple[dict[str, Values], dict[str, Any]]:
    import mlflow

    client = mlflow.MlflowClient()
    history = {tag: client.get_metric_history(run_id, tag) for tag in TAGS}
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "e"
    return {tag: [(m.step, m.value) for m in v] for tag, v in history.items()}, run.data.params


def of_trackio(folder: Path, run_id: str) -> tuple[dict[str, Values], dict[str, Any]]:
    """Ask in a process of its own: the folder is read when the package is imported."""
    pytest.importorskip("trackio")
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as s; "
        "print(json.dumps([s.get_logs('p', 'e'), s.get_run_config('p', 'e')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    logs, config = json.loads(done.stdout.splitlines()[-1])
    return {tag: [(log["step"], log[tag]) for log in logs if tag in log] for tag in TAGS}, config


def of_comet(folder: Path, run_id: str) -> tuple[dict[str, Values], dict[str, Any]]:
    """Read the archives that ``comet upload`` sends; that of a killed process was not written."""
    values: dict[str, Values] = {tag: [] for tag in TAGS}
    for path in sorted((folder / "comet").glob(f"{run_id}*.zip")):
        with zipfile.ZipFile(path) as file:
            for line in file.read("messages.json").splitlines():
                message = json.loads(line)
                metric = message["payload"].get("metric", {})
                if message["type"] == "metric_msg" and metric["metricName"] in TAGS:
                    values[metric["metricName"]].append((metric["step"], metric["metricValue"]))
    return values, {}


def of_clearml(folder: Path, run_id: str) -> tuple[dict[str, Values], dict[str, Any]]:
    session = folder / "clearml/offline" / run_id
    lines = (session / "metrics.jsonl").read_text().splitlines()
    events = [event for line in lines for event in json.loads(line)]
    values = {tag: {e["iter"]: e["value"] for e in events if e["metric"] == tag} for tag in TAGS}
    task = json.loads((session / "task.json").read_text())
    found = task["hyperparams"]["General"]
    return {tag: sorted(v.items()) for tag, v in values.items()}, {
        name: entry["value"] for name, entry in found.items()
    }


def of_wandb(folder: Path, run_id: str) -> tuple[dict[str, Values], dict[str, Any]]:
    from wandb.proto.wandb_internal_pb2 import Record

    values: dict[str, dict[int, float]] = {tag: {} for tag in TAGS}
    config: dict[str, Any] = {}
    for path in sorted((folder / "wandb/wandb").glob("offline-run-*/*.wandb")):
        assert path.name == f"run-{run_id}.wandb"
        for data in records_of_log(path.read_bytes()):
            record = Record.FromString(data)
            config |= {u.key: json.loads(u.value_json) for u in record.run.config.update}
            items = {(i.key or i.nested_key[0]): i.value_json for i in record.history.item}
            for tag in items.keys() & {*TAGS}:  # steps that exist are dropped by the server
                values[tag].setdefault(json.loads(items["_step"]), json.loads(items[tag]))
    return {tag: sorted(v.items()) for tag, v in values.items()}, config


def records_of_log(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, after W&B's header of 7 bytes."""
    block = 1 << 15
    at = 7
    record = b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0:
            return
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # complete, or the last part
            yield record
            record = b""


READERS: dict[str, Callable[[Path, str], tuple[dict[str, Values], dict[str, Any]]]] = {
    "wandb": of_wandb,
    "mlflow": of_mlflow,
    "trackio": of_trackio,
    "comet": of_comet,
    "clearml": of_clearml,
}


@pytest.mark.feature("Logging: W&B, MLflow, Trackio, Comet and ClearML; resumed runs go on")
@pytest.mark.parametrize("name", TRACKERS)
def test_a_killed_run_goes_on_in_its_tracker_with_the_values_of_the_metrics_file(
    folder: Path, name: str
) -> None:
    pytest.importorskip(TRACKERS[name][0])
    ids = json.loads((folder / "trackers.json").read_text())
    assert ids == json.loads((folder / "ids.json").read_text())
    expected = truth(folder)
    assert [step for step, _ in expected["lm loss"]] == [*range(1, 9)]
    found, config = READERS[name](folder, ids[name].partition("/")[0])
    if name in ("wandb", "comet"):  # offline they lose what a killed process has not yet written
        found, expected = after_the_checkpoint(found), after_the_checkpoint(expected)
    for tag, values in expected.items():
        assert [s for s, _ in found[tag]] == [s for s, _ in values], tag
        assert [v for _, v in found[tag]] == pytest.approx([v for _, v in values], rel=1e-5), tag
    if config:
        assert int(config["num_layers"]) == 2
        assert int(config["world_size"]) in (1, 2)


def after_the_checkpoint(values: dict[str, Values]) -> dict[str, Values]:
    return {tag: [(s, v) for s, v in pairs if s > SAVED_AT] for tag, pairs in values.items()}


def test_every_tracker_has_a_reader() -> None:
    assert READERS.keys() == TRACKERS.keys()
