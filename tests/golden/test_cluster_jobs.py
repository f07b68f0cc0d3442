"""The jobs of tools/cluster_job.py: what a node starts, signals, lost connections, schemas.

No scheduler runs here: stand-ins record what the scripts call; two "hosts" of ssh are processes of
this machine.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron.core.config.errors import ConfigError
from megatron.training.arguments.parser import parse_args
from megatron.training.arguments.resolve import resolve
from megatron.training.fault_tolerance.launch_flags import parse
from tests.support import forked
from tests.support.runs import ROOT, TINY, defaults_of
from tests.support.supervised import free_port
from tools import cluster_job

yaml = pytest.importorskip("yaml")

FOLDER = ROOT / "examples/clusters"
PRINTED = {"slurm": "slurm.sh", "ssh": "ssh.sh", "kubernetes": "kubernetes.yaml"}
PRINTED |= {"skypilot": "skypilot.yaml"}
LOCAL_SSH = '#!/bin/bash\nfor word; do :; done\nexec bash -c "$word"\n'


def stand_in(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def environment(folder: Path, **more: str) -> dict[str, str]:
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, **more}


def job_of(folder: Path, **changes: Any) -> Path:
    """Write a job of two nodes without GPUs to ``folder``; return its script for ssh."""
    saves = f"{folder}/checkpoints"
    values = {
        "name": "tiny",
        "nodes": "2",
        "gpus_per_node": 1,
        "folder": str(ROOT),
        "checkpoints": saves,
        "hosts": ["a", "b"],
        "command": f"pretrain_gpt.py {shlex.join(TINY)} --save {saves} --load {saves} "
        f"--metrics-file {folder}/metrics.jsonl",
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(values | changes))
    return path


@pytest.mark.parametrize("cluster", PRINTED)
def test_the_examples_are_what_the_tool_prints(
    cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cluster_job.main([cluster, str(FOLDER / "job.yaml")]) == 0
    printed = capsys.readouterr().out
    assert (FOLDER / PRINTED[cluster]).read_text() == printed
    if PRINTED[cluster].endswith(".sh"):
        subprocess.run(["bash", "-n"], input=printed, text=True, check=True)
        if shutil.which("shellcheck"):
            subprocess.run(["shellcheck", str(FOLDER / PRINTED[cluster])], check=True)


def test_the_flags_of_launcher_and_run_are_taken() -> None:
    job = cluster_job.read_job(FOLDER / "job.yaml")
    launch = parse(
        shlex.split(job.launch.replace("\\\n", "").replace("$ENDPOINT", "node0:29400"))[3:]
    )
    assert (launch.config.min_nodes, launch.config.max_nodes) == (3, 4)
    assert launch.script[:2] == ("-u", "pretrain_gpt.py")
    args = parse_args(argv=list(launch.script[2:]), args_defaults=defaults_of("pretrain_gpt.py"))
    for number in range(launch.config.min_nodes, launch.config.max_nodes + 1):
        resolve(args, number * launch.config.nproc_per_node)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": "4:3"}, "nodes 4:3 must be N or MIN:MAX"),
        ({"nodes": "many"}, "wrong value: .*many"),
        ({"gpus_per_node": "x"}, "wrong value"),
        ({"gpus_per_node": 0}, "gpus_per_node must be 1 or more"),
        ({"hours": -1}, "hours and"),
        ({"name": "a\ntouch b"}, "must have only a-z"),
        ({"environment": ["A"]}, "names of variables with"),
        ({"environment": {"A;touch": "b"}}, "names of variables with"),
        ({"command": "train.py 'x"}, "wrong value: No closing quotation"),
        ({"node": 2}, "unknown: .*node"),
        ({"checkpoints": "/other"}, "checkpoints /other must be --save of command"),
    ],
)
def test_wrong_parameters_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        cluster_job.read_job(job_of(tmp_path, **changes))


@pytest.mark.feature(
    "Clusters: one file of parameters gives jobs for Slurm, Kubernetes, SkyPilot, ssh"
)
def test_two_hosts_of_ssh_meet_and_train(tmp_path: Path) -> None:
    """Emulated: ssh runs its command on this machine."""
    path = job_of(tmp_path, hosts=["localhost", "127.0.0.1"])
    script = cluster_job.ssh(cluster_job.read_job(path)).replace(" --check-node", "")
    script = script.replace(str(cluster_job.PORT), str(free_port()))
    stand_in(tmp_path, "ssh", LOCAL_SSH)
    stand_in(tmp_path, "python", f'#!/bin/bash\nexec {forked.python()} "$@"\n')
    done = subprocess.run(
        ["bash", "-c", script], env=environment(tmp_path), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if line["kind"] == "step"]
    assert [line["iteration"] for line in steps] == [1, 2, 3, 4]
    report = json.loads((tmp_path / "checkpoints/reports/exit.json").read_text())
    assert report["kind"] == "done"


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
    script = cluster_job.slurm(cluster_job.read_job(job_of(tmp_path)))
    environ = environment(
        tmp_path,
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="node[0-16]",
    )
    with subprocess.Popen(
        ["bash", "-c", script], env=environ, cwd=ROOT, stdout=subprocess.PIPE, text=True
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
    grace_s = re.search(r"--shutdown-timeout (\d+)", text)
    assert grace_s is not None
    assert int(grace_s[1]) < early_s


def test_ssh_starts_each_host_again_only_if_the_connection_was_lost(tmp_path: Path) -> None:
    body = 'echo "$3" >>"$RECORD"; [ "$(grep -c "$3" "$RECORD")" -gt 1 ] && exit 3; exit 255\n'
    stand_in(tmp_path, "ssh", f"#!/bin/bash\n{body}")
    stand_in(tmp_path, "sleep", "#!/bin/bash\n")
    environ = environment(tmp_path, RECORD=str(tmp_path / "hosts"))
    script = cluster_job.ssh(cluster_job.read_job(job_of(tmp_path)))
    done = subprocess.run(["bash", "-c", script], env=environ, cwd=ROOT)
    assert done.returncode == 3
    assert sorted((tmp_path / "hosts").read_text().split()) == ["a", "a", "b", "b"]


def test_the_manifest_names_its_pods_and_ends_with_the_exit_codes_of_the_supervisor() -> None:
    service, job = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    pod: dict[str, Any] = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    rule = job["spec"]["podFailurePolicy"]["rules"][0]
    assert rule["onExitCodes"]["values"] == [2, 65]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert service["metadata"]["name"] == pod["subdomain"]
    values = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert {*re.findall(r"\$(\w+)", container["command"][-1])} <= values.keys()
    host, port = values["ENDPOINT"].split(":")
    assert host == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert int(port) == service["spec"]["ports"][0]["port"]
    assert job["spec"]["parallelism"] == job["spec"]["completions"] == 5


def test_kubernetes_accepts_its_objects() -> None:
    """Ask their own validators, where they are installed."""
    validate = pytest.importorskip("kubernetes_validate")
    for document in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()):
        validate.validate(document, "1.31", strict=True)


def test_skypilot_reads_its_task() -> None:
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml(str(FOLDER / "skypilot.yaml"))
    assert task.num_nodes == 5
    assert "tools/launch.py" in task.run


def test_the_dockerfile_has_known_instructions_and_extras() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    known = {"FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN", "CMD"}
    assert {line.split()[0] for line in lines} == known
    assert lines[0].startswith("FROM ")
    project = (ROOT / "pyproject.toml").read_text()
    command = json.loads(next(line for line in lines if line.startswith("CMD"))[4:])
    assert f"\n{command[0]} = " in project
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)
    assert all(re.search(rf"^{extra} = ", project, re.MULTILINE) for extra in extras.split(","))
