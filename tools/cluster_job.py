"""Print the job of a training run for Slurm, Kubernetes, SkyPilot or plain ssh.

    tools/cluster_job.py slurm job.yaml >slurm.sh            # sbatch slurm.sh
    tools/cluster_job.py kubernetes job.yaml >job-kube.yaml  # kubectl apply -f job-kube.yaml
    tools/cluster_job.py skypilot job.yaml >sky.yaml         # sky jobs launch sky.yaml
    tools/cluster_job.py ssh job.yaml >ssh.sh                # bash ssh.sh

examples/clusters/job.yaml has and explains all parameters.  Each node starts tools/launch.py, which
restarts the run after failures (docs/fault_tolerance.md).
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # installed or not

from megatron.core.config.errors import ConfigError, MissingDependency
from megatron.core.optional import require

PORT = 29400
SAVE_S = 240  # for the last save after a signal
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
USER_ERRORS = [2, 65]  # exit codes that no restart cures: flags, damaged data


@dataclass(frozen=True, kw_only=True)
class Job:
    """The parameters; the example explains them."""

    name: str
    command: str
    checkpoints: str
    folder: str
    nodes: str = "1"
    spare_nodes: int = 0
    gpus_per_node: int = 8
    hours: int = 24
    image: str = "megatron-train:latest"
    shared: str = "/shared"
    claim: str = "shared"
    gpu: str = "H100"
    bucket: str = ""
    hosts: Sequence[str] = ()
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def all_nodes(self) -> int:
        """Number of nodes to ask for, spare ones included."""
        return int(self.nodes.split(":")[-1]) + self.spare_nodes

    @property
    def launch(self) -> str:
        """The command of a node, for bash; ENDPOINT, RUN_ID and NODE_NAME are in its environment.

        It becomes the process, so that signals reach the supervisor.
        """
        lines = [
            "exec python tools/launch.py",
            f"--nnodes {self.nodes} --nproc-per-node {self.gpus_per_node} --rdzv-backend c10d",
            '--rdzv-endpoint "$ENDPOINT" --rdzv-id "$RUN_ID" --node-name "$NODE_NAME" --check-node',
            f"--exit-report-dir {shlex.quote(self.reports)} --shutdown-timeout {SAVE_S}",
            *_flags(shlex.split(self.command)),
        ]
        return " \\\n    ".join(lines)

    @property
    def reports(self) -> str:
        return f"{self.checkpoints}/reports"

    @property
    def exports(self) -> str:
        return "".join(f"export {k}={shlex.quote(str(v))}\n" for k, v in self.environment.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Print a job; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cluster", choices=sorted(PRINTERS), help="what runs the job")
    parser.add_argument("parameters", type=Path, metavar="job.yaml", help="file of parameters")
    options = parser.parse_args(argv)
    try:
        print(PRINTERS[options.cluster](read_job(options.parameters)), end="")
    except (ConfigError, MissingDependency) as error:
        parser.error(str(error))
    return 0


def read_job(path: Path) -> Job:
    """Read a file of parameters.  Raise ConfigError."""
    yaml = require("yaml", str(path))
    try:
        values = yaml.load(path.read_text(), yaml.BaseLoader)  # 3:4 is a time for others
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    known = {f.name: f for f in fields(Job)}
    needed = {n for n, f in known.items() if f.default is f.default_factory is MISSING}
    if not isinstance(values, dict) or not needed <= values.keys() <= known.keys():
        unknown = sorted(values.keys() - known.keys()) if isinstance(values, dict) else [values]
        raise ConfigError(
            f"{path} needs {', '.join(sorted(needed))} and may have "
            f"{', '.join(sorted(known.keys() - needed))}; unknown: {unknown or 'nothing'}"
        )
    try:
        for name in [name for name in values if known[name].type == "int"]:
            values[name] = int(values[name])
        job = Job(**values)
        low, high = int(job.nodes.split(":")[0]), int(job.nodes.split(":")[-1])
        words = shlex.split(job.command)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} has a wrong value: {error}") from error
    if not 1 <= low <= high:
        raise ConfigError(f"{path}: nodes {job.nodes} must be N or MIN:MAX, at least 1")
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{,61}[a-z0-9])?", job.name):  # Kubernetes' rule
        raise ConfigError(f"{path}: name {job.name!r} must have only a-z, 0-9 and - between them")
    if job.hours < 1 or job.spare_nodes < 0 or job.gpus_per_node < 1:
        raise ConfigError(f"{path}: hours and gpus_per_node must be 1 or more, spare_nodes 0")
    if not isinstance(job.environment, dict) or not all(map(_VARIABLE.fullmatch, job.environment)):
        raise ConfigError(f"{path}: environment must have names of variables with their values")
    saves = words[words.index("--save") + 1] if "--save" in words[:-1] else None
    if saves != job.checkpoints:
        raise ConfigError(
            f"{path}: checkpoints {job.checkpoints} must be --save of command: {saves}"
        )
    return job


def slurm(job: Job) -> str:
    """Return a script for sbatch, which is queued again until the run is done."""
    return f"""#!/usr/bin/env bash
# {job.all_nodes} nodes, of which {job.spare_nodes} spare.  Before the time limit, and when the job
# is preempted, the ranks save; the job is queued again until exit.json says that the run is done
# or cannot go on.
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.all_nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={job.gpus_per_node}
#SBATCH --exclusive
#SBATCH --time={job.hours}:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={job.name}-%j.log
#SBATCH --signal=B:USR1@{SAVE_S + 60}
set -euo pipefail
cd {shlex.quote(job.folder)}
{job.exports}
train() {{
    NODE_NAME=$(hostname)
    {_indented(job.launch)}
}}
export -f train
export RUN_ID="$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}"
ENDPOINT="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):{PORT}"
export ENDPOINT

# The signals reach this shell: send them to the supervisors, which save and end.
srun --kill-on-bad-exit=0 bash -c train &
STEP=$!
trap 'scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' TERM

while kill -0 "$STEP" 2>/dev/null; do # a trap interrupts wait
    wait "$STEP" || true
done
CODE=0
wait "$STEP" || CODE=$? # its status, not that of an interrupted wait

REPORT={shlex.quote(job.reports)}/exit.json
if grep -q '"kind": "stopped"' "$REPORT" && grep -q '"resumable": true' "$REPORT"; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$CODE"
"""


def ssh(job: Job) -> str:
    """Return a script that starts a supervisor on each host, again after a lost connection."""
    if len(job.hosts) != job.all_nodes:
        raise ConfigError(f"hosts has {len(job.hosts)} names: the job needs {job.all_nodes}")
    return f"""#!/usr/bin/env bash
# One supervisor on each host; the first host has the rendezvous.  A supervisor that cannot be
# reached is started again until the run has ended.
set -euo pipefail
HOSTS=({shlex.join(job.hosts)})
LOST=255 # exit status of ssh when the connection fails

train() {{
    cd {shlex.quote(job.folder)}
    {_indented(job.exports + job.launch)}
}}

start() {{
    local host=$1 code script
    script="$(printf 'ENDPOINT=%q RUN_ID=%q NODE_NAME=%q' "${{HOSTS[0]}}:{PORT}" "$RUN_ID" "$host")"
    script="$script; $(declare -f train); train"
    while true; do
        code=0
        ssh -o ServerAliveInterval=15 "$host" "bash -c $(printf %q "$script")" || code=$?
        [ "$code" -eq "$LOST" ] || return "$code"
        sleep 10
    done
}}

RUN_ID="{job.name}-$(date +%s)"
PIDS=()
for host in "${{HOSTS[@]}}"; do
    start "$host" &
    PIDS+=($!)
done
CODE=0
for pid in "${{PIDS[@]}}"; do
    wait "$pid" || CODE=$?
done
exit "$CODE"
"""


def kubernetes(job: Job) -> str:
    """Return an indexed Job and the service that names its pods."""
    environment = {"ENDPOINT": f"{job.name}-0.{job.name}:{PORT}", "RUN_ID": job.name}
    env: list[dict[str, Any]] = [
        {"name": name, "value": str(value)}
        for name, value in {**environment, **job.environment}.items()
    ]
    env.append({"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}})
    container = {
        "name": "train",
        "image": job.image,
        "workingDir": job.folder,
        "command": ["bash", "-c", job.launch],
        "env": env,
        "resources": {"limits": {"nvidia.com/gpu": job.gpus_per_node}},
        "volumeMounts": [
            {"name": "shared", "mountPath": job.shared},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    rules = [
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": "train", "operator": "In", "values": USER_ERRORS},
        },
        {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
    ]
    pod = {
        "restartPolicy": "Never",
        "subdomain": job.name,
        "terminationGracePeriodSeconds": SAVE_S + 60,
        "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": job.claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    spec = {
        "completions": job.all_nodes,
        "parallelism": job.all_nodes,
        "completionMode": "Indexed",
        "backoffLimit": 100,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": pod},
    }
    service = {
        "clusterIP": "None",  # pods are found by their names
        "selector": {"job-name": job.name},
        "ports": [{"name": "rendezvous", "port": PORT}],
    }

    head = {"metadata": {"name": job.name}}
    return (
        f"# {job.all_nodes} pods.  One that is lost is created again and joins the run.\n"
        "# Exit status 2 (error of the user) and 65 (damaged data) fail the job at once.\n"
        + _yaml(
            {"apiVersion": "v1", "kind": "Service", **head, "spec": service},
            {"apiVersion": "batch/v1", "kind": "Job", **head, "spec": spec},
        )
    )


def skypilot(job: Job) -> str:
    """Return a task of SkyPilot."""
    start = [
        f'export ENDPOINT="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{PORT}"',
        'export RUN_ID="$SKYPILOT_TASK_ID" NODE_NAME="node$SKYPILOT_NODE_RANK"',
        f"cd {shlex.quote(job.folder)}",
        job.launch,
    ]
    task: dict[str, Any] = {
        "name": job.name,
        "num_nodes": job.all_nodes,
        "resources": {
            "accelerators": f"{job.gpu}:{job.gpus_per_node}",
            "image_id": f"docker:{job.image}",
        },
        "envs": {name: str(value) for name, value in job.environment.items()},
        "run": "\n".join(start) + "\n",
    }
    if job.bucket:
        task["file_mounts"] = {job.shared: {"source": job.bucket, "mode": "MOUNT"}}
    return _yaml(task)


PRINTERS = {"slurm": slurm, "kubernetes": kubernetes, "skypilot": skypilot, "ssh": ssh}


def _flags(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, each flag with its values, quoted for bash."""
    lines: list[str] = []
    for word in words:
        if lines and not word.startswith("--"):
            lines[-1] += f" {shlex.quote(word)}"
        else:
            lines.append(shlex.quote(word))
    return lines


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")


def _yaml(*documents: Any) -> str:
    """Return YAML in which texts of several lines are blocks."""
    yaml = require("yaml", "tools/cluster_job.py")

    class Dumper(yaml.SafeDumper):  # type: ignore[name-defined,misc]
        pass

    def text(dumper: Any, value: str) -> Any:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    options = {"Dumper": Dumper, "sort_keys": False, "width": 100}
    return "---\n".join(yaml.dump(document, **options) for document in documents)


if __name__ == "__main__":
    sys.exit(main())
