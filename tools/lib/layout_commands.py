"""Command lines of training in several layouts, for compare_layouts.py."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import lcm, prod
from pathlib import Path

from megatron.core.config.errors import ConfigError
from megatron_commands import command_line

ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "vpp": "--num-virtual-stages-per-pipeline-rank",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "mb": "--micro-batch-size",
    "dp": "",  # the remaining processes
}
SWITCHES = {
    "sp": "--sequence-parallel",
    "zero1": "--use-distributed-optimizer",
    "fsdp": "--use-torch-fsdp2",
}
# Further flags of a layout, which the others do not keep.
_OF_LAYOUT = """--num-layers-per-virtual-pipeline-stage --pipeline-model-parallel-layout
--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers --pipeline-split
--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --pipeline-schedule
--microbatch-group-size-per-virtual-pipeline-stage --defer-embedding-wgrad-compute
--cp-comm-type --hierarchical-context-parallel-sizes --overlap-param-gather --tp-comm-overlap
--overlap-param-gather-with-optimizer-step --num-distributed-optimizer-instances
--use-megatron-fsdp --data-parallel-sharding-strategy --overlap-p2p-communication-warmup-flush
--use-tp-pp-dp-mapping --encoder-pipeline-model-parallel-size --virtual-ranks
--overlap-moe-expert-parallel-comm --delay-wgrad-compute""".split()
_LAYOUT_FLAGS = {*SIZES.values(), *SWITCHES.values(), *_OF_LAYOUT} - {"", SIZES["mb"]}
# Flags that write files, or that only matter to them.
_WRITES = ("--save", "--async-save", "--wandb", "--tensorboard", "--metrics-file", "--log-progress")
_ROUNDS = ("--bf16", "--fp16", "--fp8", "--fp4", "--grad-reduce-in-bf16", "--first-last-layers")
_TRAINS = {"--train-iters", "--train-samples", "--epochs", "--micro-batch-size", "--lr"}
GIVEN = "as given"


@dataclass(frozen=True)
class Layout:
    """``flags`` replace those of the command's layout; None: the command stays as it is."""

    name: str
    flags: tuple[str, ...] | None = ()
    processes: int = 1
    replicas: int = 1  # data-parallel


def layout_of(text: str) -> Layout:
    """Return the layout of words such as ``tp2 sp pp2``; flags may follow them."""
    words = text.replace(",", " ").split() if "--" not in text else shlex.split(text)
    at = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    sizes: dict[str, int] = {}
    flags: list[str] = []
    for word in words[:at]:
        match = re.fullmatch(r"([a-z]+)([1-9]\d*)", word)
        if word in SWITCHES:
            flags.append(SWITCHES[word])
        elif match and match[1] in SIZES:
            sizes[match[1]] = int(match[2])
        elif word != "one":
            raise ConfigError(
                f"--layouts {text!r}: {word!r} is not a part of a layout; use one, "
                f"{', '.join(f'{name}N' for name in SIZES)}, {', '.join(SWITCHES)}, "
                "or flags of the program"
            )
    flags += [w for name, size in sizes.items() if SIZES[name] for w in (SIZES[name], str(size))]
    tp, cp, pp = (sizes.get(name, 1) for name in ("tp", "cp", "pp"))
    experts = sizes.get("ep", 1) * sizes.get("etp", tp)
    least = lcm(tp * cp, experts) // (tp * cp) if "ep" in sizes or "etp" in sizes else 1
    if {"zero1", "fsdp"} & {*words[:at]} and cp == 1:
        least = max(2, least)
    dp = sizes.get("dp", least)
    return Layout(text, (*flags, *words[at:]), prod((tp, cp, pp, dp)), dp)


def default_layouts(program: Program, processes: int) -> list[Layout]:
    """Return layouts to try with up to ``processes``; the program refuses those it cannot run."""
    texts = ["one", "dp2", "dp2 zero1", "tp2", "tp2 sp", "pp2", "pp2 vpp2", "cp2"]
    pairs = ["tp2 sp pp2", "tp2 sp cp2", "pp2 cp2", "tp2 sp pp2 cp2"]
    if program.value("--num-experts") is not None:
        texts.append("ep2")
        pairs[:0] = ["ep2 pp2", "tp2 sp ep2", "tp2 sp etp1 ep2", "ep2 cp2"]
    layouts = [layout_of(text) for text in (*texts, *pairs)]
    if program.processes > 1:
        shared = prod(int(program.value(SIZES[name]) or 1) for name in ("tp", "pp", "cp"))
        replicas = max(1, program.processes // shared)
        layouts.append(Layout(GIVEN, None, program.processes, replicas))
    return [layout for layout in layouts if layout.processes <= processes]


@dataclass
class Program:
    """A command that trains: the launcher's program, the script and its flags."""

    script: str
    flags: list[str]
    python: str
    launcher: list[str]
    processes: int = 1
    environ: dict[str, str] = field(default_factory=dict)
    is_ours: bool = True

    def value(self, flag: str) -> str | None:
        """Return the last value of ``flag``; "" for a switch, None if it is not given."""
        found = None
        for word, *values in _groups(self.flags):
            name, _, joined = word.partition("=")
            if name == flag:
                found = joined or (values[0] if values else "")
        return found

    def without(self, is_left_out: Callable[[str], bool]) -> list[str]:
        """Return the flags without those whose name ``is_left_out``, and without their values."""
        groups = _groups(self.flags)
        return [w for group in groups if not is_left_out(group[0].split("=")[0]) for w in group]

    def in_layout(self, layout: Layout, flags: Sequence[str]) -> list[str]:
        """Return the command in ``layout``, with ``flags`` at its end."""
        kept = self.flags
        if layout.flags is not None:
            kept = [*self.without(_LAYOUT_FLAGS.__contains__), *layout.flags]
        start = [self.python]
        if layout.processes > 1 or not self.is_ours:
            count = ["--standalone", "--nproc-per-node", str(layout.processes)]
            start = [*self.launcher, *count]
        return [*start, self.script, *kept, *flags]

    def check(self, layout: Layout, flags: Sequence[str]) -> list[str]:
        """Return the command that only checks whether ``layout`` can start."""
        alone = Layout(layout.name, layout.flags)
        count = ["--check-only", "--check-world-size", str(layout.processes)]
        return self.in_layout(alone, [*flags, *count])


def settings(program: Program, layouts: Sequence[Layout], steps: int, fp32: bool) -> list[str]:
    """Prepare ``program``; return flags that make runs short, comparable and without files."""
    left_out = (*_WRITES, *(_ROUNDS if fp32 else ()))
    program.flags = program.without(lambda flag: flag.startswith(left_out))
    flags = ["--exit-interval", str(steps), "--log-interval", "1", "--eval-iters", "0"]
    flags += ["--hidden-dropout", "0", "--attention-dropout", "0"]
    flags += ["--log-params-norm", "--log-num-zeros-in-grad"]
    if not any(program.value(f) for f in ("--train-iters", "--train-samples", "--epochs")):
        flags += ["--train-iters", str(steps)]
    if program.value("--global-batch-size") is None:
        replicas = lcm(*(layout.replicas for layout in layouts))
        flags += [
            "--global-batch-size",
            str(int(program.value("--micro-batch-size") or 1) * replicas),
        ]
    if program.value("--load") is not None:
        flags += ["--finetune", "--no-load-optim", "--no-load-rng"]
    elif not program.is_ours:
        raise ConfigError(
            "the command has no --load: initial weights of Megatron-LM depend on the layout; save "
            "a checkpoint (--ckpt-format torch_dist) and give its folder with --load"
        )
    return flags


def program_of(words: Sequence[str], *, log_only: bool = False) -> Program:
    """Return the program that a command line starts.  Raises ConfigError for another command."""
    words = [*words]
    environ: dict[str, str] = {}
    while words and re.match(r"[A-Za-z_]\w*=", words[0]):
        name, _, value = words.pop(0).partition("=")
        environ[name] = value
    first = Path(words[0]).name if words else ""
    if first in ("bash", "sh") or first.endswith(".sh"):
        words = _command_of_script(
            [*words] if not first.endswith(".sh") else ["bash", *words], environ
        )
        first = Path(words[0]).name
    python = sys.executable
    launcher = []
    processes = 1
    if first in ("megatron-train", "megatron-launch"):
        rest = words[1:]
        if first == "megatron-launch":
            processes, rest = _launched(rest)
        words = command_line(rest)
    elif first == "torchrun":
        launcher = words[:1]
        processes, words = _launched(words[1:])
    elif first.startswith("python"):
        python = sys.executable if words[0] == "python" else words[0]
        words = words[1:]
        if words[:2] == ["-m", "torch.distributed.run"]:
            processes, words = _launched(words[2:])
        elif words and words[0].endswith("tools/launch.py"):
            processes, words = _launched(words[1:])
            words = command_line(words)
    if not words or not words[0].endswith(".py"):
        raise ConfigError(
            f"{shlex.join(words)!r} is not a training command: give python SCRIPT.py, torchrun, "
            "megatron-train, megatron-launch, or a bash script that starts one of them"
        )
    launcher = launcher or [python, "-m", "torch.distributed.run"]
    folders = Path(words[0]).resolve().parents
    home = next((folder for folder in folders if (folder / "megatron/core").is_dir()), None)
    is_other = home is not None and not (home / "megatron/training/step/train_step.py").exists()
    is_ours = not (log_only or is_other)
    return Program(words[0], words[1:], python, launcher, processes, environ, is_ours)


def _launched(words: Sequence[str]) -> tuple[int, list[str]]:
    """Return the number of processes of torchrun's flags, and the words after these flags."""
    at = next((i for i, w in enumerate(words) if w.endswith(".py")), None)
    if at is None:  # a name of megatron-train
        at = next((i for i, w in enumerate(words) if command_line([w]) != [w]), len(words))
    joined = " ".join(words[:at]).replace("=", " ").replace("_", "-")
    counts = [re.search(rf"--{name} (\d+)", joined) for name in ("nproc-per-node", "nnodes")]
    return prod(int(count[1]) for count in counts if count), [*words[at:]]


def _command_of_script(words: Sequence[str], environ: dict[str, str]) -> list[str]:
    """Return the training command that a bash script starts, by running it without programs."""
    with tempfile.TemporaryDirectory() as folder:
        calls = Path(folder, "calls")
        recorder = f"#!{sys.executable} -IS\nimport json, os, sys\n"
        recorder += "words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]\n"
        recorder += f"open({str(calls)!r}, 'a').write(json.dumps(words) + '\\n')\n"
        for name in ("python", "python3", "torchrun", "megatron-train", "megatron-launch"):
            Path(folder, name).write_text(recorder)
            Path(folder, name).chmod(0o755)
        path = os.pathsep.join((folder, os.environ.get("PATH", "")))
        done = subprocess.run(
            words,
            env={**os.environ, **environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        found = (
            [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []
        )
    trains = [call for call in found if _TRAINS & {*call}]
    if not trains:
        raise ConfigError(f"{shlex.join(words)} starts no training: {done.stderr[-500:]}")
    return trains[0]


def _groups(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield each flag with its values."""
    group: list[str] = []
    for word in words:
        if word.startswith("--") and group:
            yield group
            group = []
        group.append(word)
    if group:
        yield group
