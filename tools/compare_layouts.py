"""Run a training command in several layouts, and report the first value that differs.

    tools/compare_layouts.py -- python pretrain_gpt.py --num-layers 4 ...
    tools/compare_layouts.py --layouts one "tp2 sp" "pp2 vpp2" -- torchrun ... pretrain_gpt.py ...
    tools/compare_layouts.py --case sinks
    tools/compare_layouts.py -- torchrun .../Megatron-LM/pretrain_gpt.py --load CHECKPOINT ...

Compares losses, gradient norm, zero count and norm of the parameters; of programs of this project
also the gradient of every parameter, the copies of it that ranks hold, initial weights and
buffers.  Exit status: 0 equal, 1 different, 2 a run could not start or end.
docs/compare_layouts.md describes the output.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # installed or not

from megatron.core.config.errors import ConfigError
from tools.lib.layout_cases import CASES
from tools.lib.layout_commands import (
    ROOT,
    Layout,
    Program,
    default_layouts,
    layout_of,
    program_of,
    settings,
)
from tools.lib.layout_traces import PRECISIONS, Outcome, Trace, compare, read_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run, compare, print; return the exit status."""
    asked = _parser().parse_args(argv)
    if asked.cases:
        for name, case in CASES.items():
            print(f"{name:18}{case.title}")
        return 0
    try:
        command = asked.command[1:] if asked.command[:1] == ["--"] else asked.command
        if bool(command) == bool(asked.case):
            raise ConfigError("give -- and a command line, or --case NAME (--cases lists them)")
        results = {}
        for name in asked.case or [""]:
            case = CASES.get(name)
            if case is not None:
                print(f"{name}: {case.title}", flush=True)
                command = case.command()
            texts = asked.layouts or (case and case.layouts)
            results[name] = _compare(asked, command, texts)
        if asked.json is not None:
            content = results if asked.case else results[""]
            asked.json.write_text(json.dumps(content, indent=1) + "\n")
        return max(result["status"] for result in results.values())
    except (ConfigError, OSError) as error:
        print(f"compare_layouts: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--layouts",
        nargs="+",
        metavar="LAYOUT",
        help='such as one "tp2 sp" "pp2 vpp2" "ep2 dp4"; '
        "the others are compared with the first one; default: those that the model allows",
    )
    add("--processes", type=int, help="most processes of a default layout; default: GPUs, or 4")
    add("--steps", type=int, default=3, help="optimizer steps (default: %(default)s)")
    add(
        "--tolerance",
        type=float,
        help="relative difference of a loss that is no difference; "
        "norms and gradients may differ in proportion; default: by the precision of the command",
    )
    add("--fp32", action="store_true", help="leave out the flags of bf16, fp16, fp8 and fp4")
    add("--jobs", type=int, default=1, help="layouts that run at the same time (default: 1)")
    add("--log-only", action="store_true", help="read log lines only, as of Megatron-LM")
    add("--keep", type=Path, metavar="DIR", help="keep logs and recorded values here")
    add("--json", type=Path, metavar="FILE", help="write all results")
    add("--case", nargs="+", choices=list(CASES), metavar="NAME", help="run cases of our own")
    add("--cases", action="store_true", help="list the cases")
    add("command", nargs=argparse.REMAINDER, help="-- and the command line that trains")
    return parser


def _compare(
    asked: argparse.Namespace, command: Sequence[str], texts: Sequence[str] | None
) -> dict[str, Any]:
    """Compare the layouts of one command; return the exit status and all differences."""
    program = program_of(command, log_only=asked.log_only)
    layouts = [layout_of(text) for text in texts or ()]
    is_chosen = bool(layouts)
    layouts = layouts or default_layouts(program, asked.processes or _devices())
    flags = settings(program, layouts, asked.steps, asked.fp32)
    layouts = [*dict.fromkeys(layouts)]
    folder = asked.keep or Path(tempfile.mkdtemp(prefix="compare-layouts-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if program.is_ours:
            layouts = _that_start(program, layouts, flags, must_all=is_chosen)
        if len(layouts) < 2:
            raise ConfigError("one layout is left: there is nothing to compare; give --layouts")
        with ThreadPoolExecutor(asked.jobs) as pool:
            runs = [pool.submit(_run, program, layout, flags, folder) for layout in layouts]
            traces = [run.result() for run in runs]
    finally:
        if asked.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    limits = dict(PRECISIONS[_precision(program)])
    if asked.tolerance is not None:
        ratio = asked.tolerance / limits["loss"]
        limits |= {name: limits[name] * ratio for name in ("loss", "norm", "gradient")}
    first = traces[0]
    outcomes = [
        compare(layout.name, first, trace, limits)
        for layout, trace in zip(layouts[1:], traces[1:], strict=True)
    ]
    if first.contradictions:
        outcomes.insert(0, Outcome(layouts[0].name, first.contradictions, {}))
    _print_table(layouts[0].name, first, outcomes)
    status = _print_verdict(layouts[0].name, first, outcomes)
    found = [asdict(outcome) for outcome in outcomes]
    return {"first": layouts[0].name, "status": status, "limits": limits, "layouts": found}


def _devices() -> int:
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        found = ""
    return max(1, found.count("GPU ")) if found else 4


def _precision(program: Program) -> str:
    flags = {"fp4": "--fp4-format", "fp8": "--fp8-format", "bf16": "--bf16", "fp16": "--fp16"}
    return next((name for name, flag in flags.items() if program.value(flag) is not None), "fp32")


def _environ(program: Program, **variables: str) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    added = {"PYTHONPATH": os.pathsep.join(paths)} if program.is_ours else {}
    threads = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return {**threads, **os.environ, **added, **variables, **program.environ}


def _that_start(
    program: Program, layouts: Sequence[Layout], flags: Sequence[str], *, must_all: bool
) -> list[Layout]:
    """Return the layouts that the program's --check-only accepts; report the others."""
    checks = [
        subprocess.Popen(
            program.check(layout, flags),
            env=_environ(program),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for layout in layouts
    ]
    kept: list[Layout] = []
    for layout, check in zip(layouts, checks, strict=True):
        said, _ = check.communicate()
        if check.returncode == 0:
            kept.append(layout)
            continue
        reasons = [line for line in said.splitlines() if line.startswith("  - ")]
        print(f"{layout.name} cannot start:", *(reasons or [said.strip()[-2000:]]), sep="\n")
    if must_all and len(kept) < len(layouts):
        raise ConfigError("not every layout can start: change the command or --layouts")
    return kept


def _run(program: Program, layout: Layout, flags: Sequence[str], parent: Path) -> Trace:
    """Run one layout in a folder of its own.  Raises ConfigError if the run fails."""
    folder = parent / re.sub(r"[^\w.-]+", "-", layout.name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    metrics = folder / "metrics.jsonl"
    if program.is_ours:
        flags = [*flags, "--metrics-file", str(metrics)]
        flags += ["--callback", "tools.lib.tensor_recorder:RecordTensors"]
    command = program.in_layout(layout, flags)
    print(f"{layout.name}: {layout.processes} processes", flush=True)
    log = folder / "log.txt"
    with log.open("w") as out:
        out.write(f"{shlex.join(command)}\n")
        out.flush()
        environ = _environ(program, COMPARE_LAYOUTS_FOLDER=str(folder))
        done = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
    if done.returncode:
        raise ConfigError(f"{layout.name} failed:\n{log.read_text(errors='replace')[-3000:]}")
    trace = read_folder(folder)
    if not trace.numbers:
        raise ConfigError(f"{layout.name} has printed no step:\n{log.read_text()[-3000:]}")
    return trace


# -- output ---------------------------------------------------------------------------------


def _print_table(name: str, first: Trace, outcomes: Sequence[Outcome]) -> None:
    steps = sorted({step for step, _, _ in first.numbers})
    last = {n: v.number for (step, _, n), v in first.numbers.items() if step == steps[-1]}
    for kind in ("weight", "gradient", "buffer"):
        count = len({n for _, k, n in first.tensors if k == kind})
        if count:
            last[f"{kind}s"] = count
    compared = [outcome for outcome in outcomes if outcome.largest]
    heads = [f"{name}, step {steps[-1]}", *(outcome.layout for outcome in compared)]
    widths = [max(18, len(head) + 2) for head in heads]
    print(f"\nlargest relative difference of {len(steps)} steps, and its step (! beyond rounding)")
    print(" " * 24 + "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True)))
    for row, value in last.items():
        cells = [f"{value:.7g}"]
        for outcome in compared:
            relative, step = outcome.largest.get(row, (0.0, 0))
            marked = {n for d in outcome.differences for n in (d.name, f"{d.kind}s")}
            mark = " !" if row in marked else ""
            cells.append(f"{relative:.1e} ({step}){mark}" if relative else f"0{mark}")
        print(f"{row:24}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)))


def _print_verdict(name: str, first: Trace, outcomes: Sequence[Outcome]) -> int:
    """Print what differs and the verdict; return the exit status."""
    print()
    different = [outcome for outcome in outcomes if outcome.differences]
    for outcome in different:
        start, *others = outcome.differences
        print(f"{outcome.layout} differs first at {start}")
        names = [*dict.fromkeys(str(d) for d in others if d.step == start.step)]
        for text in names[:4]:
            print(f"    then {text}")
        if len(others) > 4:
            left = len(others) - len(names[:4])
            print(f"    and {left} other values, up to step {others[-1].step}")
    count = len({n for _, k, n in first.tensors if k == "gradient"})
    what = f" and the gradients of {count} parameters" if count else " of the log lines"
    if different:
        print(f"DIFFERENT: {', '.join(o.layout for o in different)}")
        return 1
    names = ", ".join(outcome.layout for outcome in outcomes)
    print(f"EQUAL: {names} compute the losses and norms{what} of {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
