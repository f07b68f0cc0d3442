"""Use half an hour on a machine with one GPU: tests and measurements, in stages.

    python tools/dev/gpu_lease.py smoke     build, kernels, one training and one generation run
    python tools/dev/gpu_lease.py losses    losses and gradients of flag sets against a CPU's
    python tools/dev/gpu_lease.py speed     training speed against peers
    python tools/dev/gpu_lease.py profile   kernels of training steps
    python tools/dev/gpu_lease.py rest      generation speed, kernels against plain torch
    python tools/dev/gpu_lease.py sanitize  kernels under compute-sanitizer
    python tools/dev/gpu_lease.py pair      losses of layouts of two GPUs, connected by NCCL

Several stages in one command share less than ten minutes.  The four commands of half an hour, and
the minutes that they should take (docs/performance.md says what this assumes):

    python3 tools/dev/gpu_lease.py smoke losses           4
    python3 tools/dev/gpu_lease.py speed                  9
    python3 tools/dev/gpu_lease.py profile rest           5
    python3 tools/dev/gpu_lease.py losses --only NAME     what failed and has been repaired; or
                                                          speed --shapes moe,llama-8b

Each command has a time limit, and one that no time is left for is skipped.  A row is printed when
its command ends.  The tables are printed last and written to the folder --output, with the output
of the commands.  The exit code is 1 if a command failed.

    python tools/dev/gpu_lease.py losses --write-reference  compute them on this CPU
    python tools/dev/gpu_lease.py losses --stand-in         try the script without a GPU
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import resource
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.dev.lib.gpu_lease_losses import (
    FLAG_SETS,
    GPT,
    STEPS,
    TINY,
    FlagSet,
    Training,
    found_in,
    judge,
    known_trainings,
    losses_in,
    store,
)
from tools.dev.lib.timed_commands import Command, Row, run_stage, table_of

_STAGE_S = {"smoke": 300.0, "losses": 300.0, "speed": 545.0, "profile": 300.0, "rest": 300.0}
_STAGE_S |= {"sanitize": 400.0, "pair": 300.0}
_UNTIMED = ("smoke", "losses", "sanitize")  # several commands at a time share the GPU
_CONTENDER_S = 140  # of one contender at one shape
_CALL_S = 560.0  # of all stages: a lent machine ends a command after ten minutes
_TRIAL_S = 7200.0  # with --stand-in
_ON_GPU = "--device cuda".split()
_ON_CPU = "--device cpu".split()


def main() -> int:
    """Run one stage; return the exit code."""
    asked = _arguments()
    asked.output.mkdir(parents=True, exist_ok=True)
    _prepare_environment()
    if asked.write_reference:
        return _write_reference(asked)
    ends_s = time.monotonic() + (_TRIAL_S if asked.stand_in else _CALL_S)
    tables = []
    status = 0
    if asked.stand_in:  # its compilation belongs to no command
        build = [sys.executable, "-m", "tests.support.host_gpu", os.devnull]
        run_stage([Command("fake device", build, _TRIAL_S)], Path(os.devnull), _TRIAL_S)
    for stage in asked.stages:
        # Most runs measure no time, and spend most of theirs on imports and compilation.
        cores = os.cpu_count() or 1
        workers = max(1, min(8, cores // 2)) if stage in _UNTIMED else 1
        limit_s = _TRIAL_S if asked.stand_in else _STAGE_S[stage]
        limit_s = min(limit_s, ends_s - time.monotonic())
        rows = run_stage(STAGES[stage](asked), asked.output / f"{stage}.log", limit_s, workers)
        tables.append("\n".join(table_of(rows)))
        (asked.output / f"{stage}.md").write_text(tables[-1] + "\n")
        lines = (json.dumps(vars(row)) for row in rows)
        (asked.output / f"{stage}.jsonl").write_text("\n".join(lines) + "\n")
        status |= _status(rows)
    print("\n\n".join(tables), flush=True)
    return status


def _status(rows: Sequence[Row]) -> int:
    return int(not all(row.result.startswith("ok") for row in rows))


def _prepare_environment() -> None:
    """Set the environment of all commands."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would have the GPU's mappings
    folder = Path(tempfile.gettempdir()) / "gpu_lease"  # a home folder may be read-only
    defaults = {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "4",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stages", choices=STAGES, nargs="+", metavar="STAGE")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(os.environ.get("OUT") or "gpu_lease"),
        help="Folder of the results; default: the environment variable OUT, or gpu_lease.",
    )
    parser.add_argument(
        "--stand-in", action="store_true", help="Run on the device of tests.support.host_gpu."
    )
    parser.add_argument(
        "--write-reference",
        action="store_true",
        help="Compute what stage losses compares with on this CPU, and write it.",
    )
    parser.add_argument("--only", default="", help="Run the commands whose name has this text.")
    parser.add_argument(
        "--shapes",
        default="124m,1.3b,llama-8b-stack",
        help="Shapes of stage speed (benchmarks/gpu_contenders.py); default: %(default)s.",
    )
    return parser.parse_args()


# ---- stages ------------------------------------------------------------------------------------


def _script(asked: argparse.Namespace, script: str, *words: str, ranks: int = 1) -> list[str]:
    """Return the command line of a script, on the fake device if that is asked for."""
    start = [sys.executable]
    if ranks > 1:
        # By default torchrun uses the name of the host, which nobody resolves without a network.
        start += ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        start.append(f"--nproc-per-node={ranks}")
    if asked.stand_in:
        start += ["-m", "tests.support.host_gpu"]
    return [*start, script, *words]


def _selected(asked: argparse.Namespace, commands: Sequence[Command]) -> list[Command]:
    return [command for command in commands if asked.only in command.name]


def smoke(asked: argparse.Namespace) -> list[Command]:
    """Return what shows that anything works."""
    python = [sys.executable]
    is_fake = asked.stand_in
    saved = tempfile.mkdtemp()  # not in --output, which has few files
    train = _script(asked, GPT, *TINY.split(), "--bf16", *_ON_GPU, "--save", saved)
    words = ["--load", saved, "--prompt", "5 7 9", "--num-tokens", "20", *_ON_GPU]
    text = _script(asked, "tools/text_generation_cli.py", *words)
    both = ["sh", "-c", f"{shlex.join(train)} && {shlex.join(text)}"]
    commands = [
        # Torch comes from a cold disk.
        Command("device", [*python, "-c", _DESCRIBE], 120, _last_line if is_fake else _gpu),
        *(
            []
            if is_fake
            else [Command("facts", [*python, "-m", "benchmarks.gpu_facts"], 120, _last_line)]
        ),
        Command("training and text", both, 240, _trained),
        Command("compiled kernels", ["sh", "-c", _build()], 240, _last_line),
    ]
    if not is_fake:  # these kernels have an interpreter of their own for a CPU
        facts = [*python, "-m", "benchmarks.gpu_facts"]
        commands.insert(1, Command("facts", facts, 120, _last_line))
        pytest = ["-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider"]
        if importlib.util.find_spec("xdist") is not None:  # compilation takes most of the time
            pytest += ["-n", str(min(10, os.cpu_count() or 1))]
        if importlib.util.find_spec("pytest_timeout") is not None:
            pytest.append("--timeout=150")
        commands.append(
            Command("kernels in Triton", [*python, *pytest, "tests/gpu"], 300, _some_passed)
        )
    return _selected(asked, commands)


def _build() -> str:
    """Return the shell command that builds the kernels if it can, and imports them."""
    python = shlex.quote(sys.executable)
    imported = f"{python} -c 'import megatron.core.kernels_cpp as m; print(m.__file__)'"
    if importlib.util.find_spec("pybind11") is None:
        return imported
    # A build without a compiler ends well too, without kernels.
    return f"{python} setup.py -q build_ext --inplace && {imported}"


_DESCRIBE = """
import os, platform, shutil
import torch
from megatron.core import optional
p = torch.cuda.is_available() and torch.cuda.get_device_properties(0)
names = ("triton", "numpy", "transformers", "liger_kernel", "transformer_engine", "pybind11")
print("missing:", *[name for name in names if optional.why_missing(name)])
print(p.name if p else "no GPU", p.total_memory >> 30 if p else 0, "GiB, torch",
      torch.__version__, "Python", platform.python_version(), os.cpu_count(), "cores,",
      shutil.disk_usage("/tmp").free >> 30, "GiB of disk")
"""


def _trained(output: str) -> str:
    """Return the losses of a run, and the text that its model generated."""
    found = losses_in(output)
    if len(found) != STEPS or not all(map(math.isfinite, found)):
        return f"failed: losses {found}"
    text = _last_line(output).removeprefix("ok: ")
    return f"ok: losses {', '.join(f'{loss:.4f}' for loss in found)}; text {text}"


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return f"ok: {lines[-1].strip('= ')[:120]}" if lines else "failed: no output"


def _gpu(output: str) -> str:
    found = _last_line(output)
    return found.replace("ok", "failed", 1) if found.startswith("ok: no GPU") else found


def _some_passed(output: str) -> str:
    """Return the last line of pytest; tests that all skip show nothing."""
    found = _last_line(output)
    return found if " passed" in found else found.replace("ok", "failed", 1)


def losses(asked: argparse.Namespace) -> list[Command]:
    """Return a training run for each of `FLAG_SETS`."""
    known = known_trainings()
    names = [name for name, one in FLAG_SETS.items() if one.gpus == 1]
    return _selected(asked, [_compared(asked, name, known.get(name)) for name in names])


def pair(asked: argparse.Namespace) -> list[Command]:
    """Return a training run for each of `FLAG_SETS` that needs two GPUs."""
    known = known_trainings()
    names = [name for name, one in FLAG_SETS.items() if one.gpus == 2]
    return _selected(asked, [_compared(asked, name, known.get(name)) for name in names])


def sanitize(asked: argparse.Namespace) -> list[Command]:
    """Return the tests of kernels under compute-sanitizer, which slows them down many times."""
    tests = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    commands = []
    for tool in ("memcheck", "racecheck"):
        checker = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
        for name in ("mlp", "quantize", "kernels", "adam"):
            words = [*checker, *tests, f"tests/gpu/test_{name}.py"]
            commands.append(Command(f"{tool} {name}", words, 300, _no_error))
    return _selected(asked, commands)


def _no_error(output: str) -> str:
    """Return the summary of compute-sanitizer, and pytest's last line."""
    found = [line.strip("= ") for line in output.splitlines() if "SUMMARY" in line]
    passed = [line.strip("= ") for line in output.splitlines() if " passed" in line]
    text = "; ".join([*passed, *found]) or "no summary"
    return f"ok: {text}" if passed and found else f"failed: {text}"


def _compared(asked: argparse.Namespace, name: str, wanted: Training | None) -> Command:
    one = FLAG_SETS[name]
    folder = Path(tempfile.mkdtemp())
    words = _training(asked, one, folder, _ON_GPU)
    return Command(name, words, 120, lambda output: judge(output, folder, wanted, one.limits))


def _training(
    asked: argparse.Namespace, one: FlagSet, folder: Path, where: Sequence[str]
) -> list[str]:
    """Return the command line of a run that saves to ``folder`` after each step."""
    save = ["--save", str(folder), "--save-interval", "1"]
    command = _script(asked, one.program, *one.words(), *where, *save, ranks=one.ranks)
    return ["env", "NCCL_ALGO=Ring", *command]


def _write_reference(asked: argparse.Namespace) -> int:
    """Run the flag sets on this CPU and write what they found."""
    found: dict[str, Training] = {}

    def reference(name: str) -> Command:
        folder = Path(tempfile.mkdtemp())

        def keep(output: str) -> str:
            found[name] = found_in(output, folder)
            return "ok" if found[name].losses else "failed: no loss"

        return Command(name, _training(asked, FLAG_SETS[name], folder, _ON_CPU), 600, keep)

    asked.stand_in = False
    commands = _selected(asked, [reference(name) for name in FLAG_SETS])
    rows = run_stage(commands, asked.output / "reference.log", stage_s=_TRIAL_S)
    known = known_trainings() | found
    store({name: known[name] for name in FLAG_SETS if name in known})
    print("\n".join(table_of(rows)))
    return _status(rows)


def speed(asked: argparse.Namespace) -> list[Command]:
    """Return the benchmark of training: ours at each shape, then each peer at each shape."""
    shapes = "tiny,tiny-llama" if asked.stand_in else asked.shapes
    limit_s = _STAGE_S["speed"] - 15  # the benchmark prints its tables in time
    words = [sys.executable, "-m", "benchmarks.train_gpu", "--rounds", "2", "--steps", "2"]
    words += ["--shape", shapes, "--limit-s", str(_CONTENDER_S), "--total-s", str(limit_s)]
    words += ["--output", str(asked.output.resolve() / "speed_rows.jsonl")]
    if asked.stand_in:  # peers do not know that device
        words += [*_ON_CPU, "--contenders", "ours"]
    return [Command("training", words, _STAGE_S["speed"], _rates, has_tables=True)]


def _rates(output: str) -> str:
    """Return how many contenders were measured, or which were not."""
    table = [[cell.strip() for cell in line.split("|")] for line in output.splitlines()]
    rows = [row for row in table if len(row) == 10 and row[1].strip("-") not in ("contender", "")]
    rows = [row for row in rows if row[0]]  # printed when it was found, after the name of its shape
    failed = [f"{row[0]} {row[1]}: {row[2]}" for row in rows if not row[3]]
    failed += [f"{row[0]} {row[1]}: loss gap {row[8]}" for row in rows if "VOID" in row[8]]
    if failed or not rows:
        return f"failed: {', '.join(failed) or 'no row of a contender'}"
    return f"ok: {len(rows)} rows"


def profile(asked: argparse.Namespace) -> list[Command]:
    """Return the benchmark that lists kernels, one command for each shape."""
    shapes = ("tiny", "tiny-moe") if asked.stand_in else ("124m", "1.3b", "llama-8b-stack", "moe")
    words = ["-m", "benchmarks.profile_gpu", *(_ON_CPU if asked.stand_in else _ON_GPU)]
    words += ["--steps", "2"]  # a step has eight micro-batches
    return _selected(
        asked,
        [Command(s, [sys.executable, *words, "--shape", s], 125, _last_line) for s in shapes],
    )


def rest(asked: argparse.Namespace) -> list[Command]:
    """Return the benchmarks of generation and of single kernels."""
    saved = tempfile.mkdtemp()
    size = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --train-iters 1"
    size = "--train-iters 1" if asked.stand_in else size
    train = [*TINY.split(), *size.split(), "--bf16", *_ON_GPU, "--save", saved]
    commands = [Command("a model to generate with", _script(asked, GPT, *train), 120)]
    for requests in (1, 8) if asked.stand_in else (1, 8, 128):
        words = f"--num-input-tokens 16 --num-tokens-to-generate 32 --device cuda --load {saved} "
        words += f"--inference-max-requests {requests}"
        tool = "tools/run_inference_performance_test.py"
        generate = _script(asked, tool, *words.split())
        commands.append(Command(f"generation, {requests} requests", generate, 120, _last_line))
    if not asked.stand_in:  # that device has no kernels of its own
        kernels = [sys.executable, "-m", "benchmarks.kernels", *_ON_GPU]
        commands.append(Command("kernels", kernels, 240, _last_line, has_tables=True))
    return _selected(asked, commands)


STAGES: dict[str, Callable[[argparse.Namespace], list[Command]]] = {
    "smoke": smoke,
    "losses": losses,
    "speed": speed,
    "profile": profile,
    "rest": rest,
    "sanitize": sanitize,
    "pair": pair,
}

if __name__ == "__main__":
    sys.exit(main())
