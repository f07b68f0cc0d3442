"""The examples of examples/fault_tolerance: scripts, manifests and Dockerfile are checked.

No scheduler runs here: stand-ins record what the scripts call.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron.training.arguments.parser import parse_args
from megatron.training.arguments.resolve import resolve
from megatron.training.fault_tolerance.launch_flags import parse
from tests.support.runs import ROOT, defaults_of

FOLDER = ROOT / "examples/fault_tolerance"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
RECORDER = '#!/bin/bash\nprintf "%s\\n" "$@" >"$RECORD"\n'


def stand_in(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def environment(folder: Path, **more: str) -> dict[str, str]:
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHON": "python", **more}


def words_of(tmp_path: Path, **more: str) -> list[str]:
    stand_in(tmp_path, "python", RECORDER)
    environ = environment(tmp_path, RECORD=str(tmp_path / "words"), **more)
    subprocess.run(["bash", str(FOLDER / "train.sh")], check=True, env=environ, cwd=ROOT)
    return (tmp_path / "words").read_text().splitlines()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_script_is_valid_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(script)], check=True)


@pytest.mark.parametrize("nodes", ["16", "3:4"])
def test_the_flags_of_launcher_and_run_are_taken(tmp_path: Path, nodes: str) -> None:
    program, *words = words_of(tmp_path, NODES=nodes, CHECKPOINTS=str(tmp_path / "c"))
    assert program == "tools/launch.py"
    launch = parse(words)
    assert launch.config.max_nodes == int(nodes.split(":")[-1])
    assert launch.script[:2] == ("-u", "pretrain_gpt.py")
    args = parse_args(argv=list(launch.script[2:]), args_defaults=defaults_of("pretrain_gpt.py"))
    for number in range(launch.config.min_nodes, launch.config.max_nodes + 1):
        if 512 % (number * 4 * 2) == 0:
            resolve(args, number * launch.config.nproc_per_node)


def test_the_slurm_job_forwards_the_signal_and_is_requeued(tmp_path: Path) -> None:
    """The step ends when scancel signals it; the report of the run says that it can resume."""
    reports = tmp_path / "checkpoints/reports"
    reports.mkdir(parents=True)
    (reports / "exit.json").write_text(json.dumps({"kind": "stopped", "resumable": True}, indent=1))
    calls = tmp_path / "calls"
    record = f'echo "$(basename $0) $@" >>"{calls}"\n'
    stand_in(tmp_path, "scontrol", f"#!/bin/bash\n{record}echo node0\n")
    stand_in(tmp_path, "scancel", f'#!/bin/bash\n{record}kill "$(cat {tmp_path}/step)"\n')
    wait = f"echo $$ >{tmp_path}/step; echo started; exec sleep 60\n"
    stand_in(tmp_path, "srun", f"#!/bin/bash\n{record}{wait}")
    environ = environment(
        tmp_path,
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="node[0-16]",
        CHECKPOINTS=str(tmp_path / "checkpoints"),
    )
    with subprocess.Popen(
        ["bash", str(FOLDER / "slurm.sh")], env=environ, cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "started\n"
        job.send_signal(signal.SIGUSR1)
        job.stdout.read()
    called = calls.read_text().splitlines()
    assert "scancel --signal=USR1 7" in called
    assert called[-1] == "scontrol requeue 7"
    assert job.returncode == 128 + signal.SIGTERM, "the exit status of the step"


def test_the_slurm_job_asks_for_requeue_and_an_early_signal() -> None:
    text = (FOLDER / "slurm.sh").read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE))
    assert {"requeue", "open-mode", "signal"} <= set(asked)
    early_s = int(asked["signal"].split("@")[1])
    grace_s = re.search(r"SHUTDOWN_TIMEOUT=(\d+)", text)
    assert grace_s is not None
    assert int(grace_s[1]) < early_s


def test_ssh_starts_each_host_again_only_if_the_connection_was_lost(tmp_path: Path) -> None:
    body = 'echo "$3" >>"$RECORD"; [ "$(grep -c "$3" "$RECORD")" -gt 1 ] && exit 3; exit 255\n'
    stand_in(tmp_path, "ssh", f"#!/bin/bash\n{body}")
    stand_in(tmp_path, "sleep", "#!/bin/bash\n")
    environ = environment(tmp_path, RECORD=str(tmp_path / "hosts"))
    done = subprocess.run(["bash", str(FOLDER / "ssh.sh"), "a", "b"], env=environ, cwd=ROOT)
    assert done.returncode == 3
    assert sorted((tmp_path / "hosts").read_text().split()) == ["a", "a", "b", "b"]


@pytest.mark.skipif(importlib.util.find_spec("yaml") is None, reason="pyyaml is not installed")
def test_the_manifest_starts_the_same_script_with_the_exit_codes_of_the_supervisor() -> None:
    import yaml

    service, job = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    pod: dict[str, Any] = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (ROOT / container["command"][1]).exists()
    used = set(re.findall(r"\$\{(\w+):-", (FOLDER / "train.sh").read_text()))
    assert {entry["name"] for entry in container["env"]} <= used | {"CHECKPOINTS"}
    rule = job["spec"]["podFailurePolicy"]["rules"][0]
    assert rule["onExitCodes"]["values"] == [2, 65]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert service["metadata"]["name"] == pod["subdomain"]
    values = {entry["name"]: entry.get("value") for entry in container["env"]}
    host, port = values["ENDPOINT"].split(":")
    assert host == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert int(port) == service["spec"]["ports"][0]["port"]
    assert int(values["NODES"].split(":")[1]) == job["spec"]["parallelism"]


def test_the_dockerfile_has_known_instructions_and_existing_files() -> None:
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    known = {"FROM", "ENV", "WORKDIR", "COPY", "RUN", "STOPSIGNAL", "ENTRYPOINT", "CMD"}
    assert {line.split()[0] for line in lines} <= known
    assert lines[0].startswith("FROM ")
    command = json.loads(next(line for line in lines if line.startswith("CMD"))[4:])
    assert (ROOT / command[1]).exists()
    extras = re.search(r'"\.\[(.*)\]"', text)
    assert extras is not None
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = ", project, re.MULTILINE) for extra in extras[1].split(","))
