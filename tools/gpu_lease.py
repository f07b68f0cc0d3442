"""Use half an hour on a machine with one GPU: run a stage of tests and measurements.

    python tools/gpu_lease.py smoke            build, kernels, one training and one generation run
    python tools/gpu_lease.py losses           losses of many flag sets against those of a CPU
    python tools/gpu_lease.py speed            training speed against peers
    python tools/gpu_lease.py profile          kernels of training steps
    python tools/gpu_lease.py rest             generation speed, kernels against plain torch

A stage takes less than nine minutes: each command has a time limit, and one that no time is left
for is skipped.  The table of results is printed last and written to the folder --output, with the
output of all commands.  The exit code is 1 if a command failed.

    python tools/gpu_lease.py losses --write-reference     compute the losses on this CPU
    python tools/gpu_lease.py losses --stand-in            try the script without a GPU
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "benchmarks" / "gpu_lease_losses.json"
_STAGE_S = 520.0
_ON_GPU = "--device cuda".split()
_ON_CPU = "--device cpu".split()
_OUTPUT_LINES = 60  # of a failed command, in the log
_TOLERANCE = {"fp32": 1e-4, "16 bits": 1e-2}  # relative, of losses

_TINY = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 --train-iters 3 "
    "--eval-iters 0 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 512 "
    "--hidden-dropout 0 --attention-dropout 0 --log-interval 1 --num-workers 0"
)
_LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
)
_EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --disable-bias-linear"
_GPT, _T5, _BERT, _MAMBA = (f"pretrain_{kind}.py" for kind in ("gpt", "t5", "bert", "mamba"))
_MASTER = "--use-distributed-optimizer --use-precision-aware-optimizer"
_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_HYBRID = "--num-layers 4 --hybrid-override-pattern M*-M --mamba-num-groups 1 --mamba-head-dim 32"
_GRAPHS = "--enable-cuda-graph --cuda-graph-warmup-steps 1"
# Name -> program, flags, number of gloo ranks on the one GPU.
LOSSES: dict[str, tuple[str, str, int]] = {
    "gpt2 in fp32": (_GPT, "", 1),
    "gpt2": (_GPT, "--bf16", 1),
    "llama, grouped queries": (
        _GPT,
        f"--bf16 {_LLAMA} --group-query-attention --num-query-groups 2",
        1,
    ),
    "latent attention": (
        _GPT,
        "--bf16 --multi-latent-attention --position-embedding-type rope --kv-channels 32",
        1,
    ),
    "sliding window": (_GPT, f"--bf16 {_LLAMA} --window-size 16,0", 1),
    "attention sink": (_GPT, f"--bf16 {_LLAMA} --softmax-type learnable", 1),
    "documents apart": (_GPT, "--bf16 --reset-attention-mask --reset-position-ids", 1),
    "experts, grouped GEMMs": (_GPT, f"--bf16 {_EXPERTS} --moe-grouped-gemm", 1),
    "fp8 delayed": (_GPT, "--bf16 --fp8-format hybrid --fp8-recipe delayed", 1),
    "fp8 tensorwise": (_GPT, "--bf16 --fp8-format hybrid --fp8-recipe tensorwise", 1),
    "fp8 blockwise": (_GPT, "--bf16 --fp8-format e4m3 --fp8-recipe blockwise", 1),
    "precision-aware optimizer": (_GPT, f"--bf16 {_MASTER}", 1),
    "fully sharded": (_GPT, "--bf16 --use-torch-fsdp2 --no-gradient-accumulation-fusion", 1),
    "optimizer on the host": (_GPT, f"--bf16 {_MASTER} --optimizer-cpu-offload", 1),
    "recomputation": (_GPT, f"--bf16 {_RECOMPUTE}", 1),
    "CUDA graphs": (_GPT, f"--bf16 {_GRAPHS}", 1),
    "deterministic": (_GPT, "--bf16 --deterministic-mode", 1),
    "T5": (_T5, "--bf16 --vocab-extra-ids 20", 1),
    "BERT": (_BERT, "--bf16", 1),
    "Mamba": (_MAMBA, f"--bf16 {_HYBRID}", 1),
    "TP and SP": (_GPT, "--tensor-model-parallel-size 2 --sequence-parallel --bf16", 2),
}


@dataclass(frozen=True)
class Command:
    """One row of a stage: a command line, its time limit, and what its output says."""

    name: str
    words: Sequence[str]
    limit_s: float
    judge: Callable[[str], str] = lambda output: "ok"  # a result that starts with "ok", or why not


@dataclass(frozen=True)
class Row:
    """The result of a command."""

    name: str
    result: str
    elapsed_s: float


def main() -> int:
    """Run one stage; return the exit code."""
    asked = _arguments()
    asked.output.mkdir(parents=True, exist_ok=True)
    if asked.write_reference:
        return _write_reference(asked)
    rows = run_stage(STAGES[asked.stage](asked), asked.output / f"{asked.stage}.log")
    table = "\n".join(table_of(rows))
    (asked.output / f"{asked.stage}.md").write_text(table + "\n")
    lines = (json.dumps(vars(row)) for row in rows)
    (asked.output / f"{asked.stage}.jsonl").write_text("\n".join(lines) + "\n")
    print(table, flush=True)
    return int(not all(row.result.startswith("ok") for row in rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(os.environ.get("OUT") or "gpu_lease"),
        help="Folder of the results; default: the environment variable OUT, or gpu_lease.",
    )
    parser.add_argument(
        "--stand-in", action="store_true", help="Run on the fake CUDA device of tests.host_gpu."
    )
    parser.add_argument(
        "--write-reference",
        action="store_true",
        help="Compute the losses of stage losses on this CPU and write them as its reference.",
    )
    parser.add_argument("--only", default="", help="Run the commands whose name has this text.")
    return parser.parse_args()


def run_stage(commands: Sequence[Command], log: Path, stage_s: float = _STAGE_S) -> list[Row]:
    """Run the commands one after the other; return a row for each."""
    rows = []
    ends_s = time.monotonic() + stage_s
    with log.open("w") as file:
        for command in commands:
            left_s = ends_s - time.monotonic()
            if left_s < 1:
                rows.append(Row(command.name, "skipped: no time is left", 0.0))
                continue
            rows.append(_run(command, min(command.limit_s, left_s), file.write))
            file.flush()
            print(f"{command.name}: {rows[-1].result} ({rows[-1].elapsed_s:.0f} s)", flush=True)
    return rows


def _run(command: Command, limit_s: float, write: Callable[[str], object]) -> Row:
    began_s = time.monotonic()
    process = subprocess.Popen(
        command.words,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that ranks are ended too, which would hold the GPU's memory
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        code = process.returncode
        result = command.judge(output) if code == 0 else f"failed with exit code {code}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        result = f"failed: not finished in {limit_s:.0f} s"
    shown = output.splitlines() if result.startswith("ok") else output.splitlines()[-_OUTPUT_LINES:]
    write(f"$ {shlex.join(command.words)}\n" + "\n".join(shown) + f"\n-> {result}\n\n")
    return Row(command.name, result, time.monotonic() - began_s)


def table_of(rows: Sequence[Row]) -> list[str]:
    """Return the rows as a Markdown table."""
    head = ["| command | result | seconds |", "|---|---|---|"]
    return [*head, *(f"| {r.name} | {r.result} | {r.elapsed_s:.1f} |" for r in rows)]


# ---- stages ------------------------------------------------------------------------------------


def _script(asked: argparse.Namespace, script: str, *words: str, ranks: int = 1) -> list[str]:
    """Return the command line of a script, on the fake device if that is asked for."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    if asked.stand_in:
        start += ["-m", "tests.host_gpu"]
    return [*start, script, *words]


def _selected(asked: argparse.Namespace, commands: Sequence[Command]) -> list[Command]:
    return [command for command in commands if asked.only in command.name]


def smoke(asked: argparse.Namespace) -> list[Command]:
    """Return what shows that anything works."""
    python = [sys.executable]
    saved = tempfile.mkdtemp()  # not in --output, which has few files
    train = [*_TINY.split(), "--bf16", *_ON_GPU, "--save", saved]
    text = ["--load", saved, "--prompt", "5 7 9", "--num-tokens", "20", *_ON_GPU]
    commands = [
        Command("device", [*python, "-c", _DESCRIBE], 60, _last_line),
        Command("compiled kernels", [*python, *_build()], 180),
        Command("training", _script(asked, _GPT, *train), 120),
        Command("text", _script(asked, "tools/text_generation_cli.py", *text), 120, _last_line),
    ]
    if not asked.stand_in:  # these kernels have an interpreter of their own for a CPU
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
        commands.append(Command("kernels in Triton", [*python, *pytest], 300, _last_line))
    return _selected(asked, commands)


def _build() -> list[str]:
    """Return the arguments of Python that build the kernels, or import those of an installation."""
    if importlib.util.find_spec("pybind11") is not None:
        return ["setup.py", "-q", "build_ext", "--inplace"]
    return ["-c", "import megatron.core.kernels_cpp"]


_DESCRIBE = (
    "import torch; p = torch.cuda.is_available() and torch.cuda.get_device_properties(0); "
    "print(torch.__version__, p.name if p else 'no GPU', p.total_memory >> 30 if p else 0, 'GiB')"
)


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return f"ok: {lines[-1][:120]}" if lines else "failed: no output"


def losses(asked: argparse.Namespace) -> list[Command]:
    """Return a training run for each flag set of `LOSSES`."""
    known = json.loads(REFERENCE.read_text()) if REFERENCE.exists() else {}
    return _selected(
        asked,
        [_training(asked, name, _ON_GPU, _comparison(name, known.get(name))) for name in LOSSES],
    )


def _training(
    asked: argparse.Namespace, name: str, where: Sequence[str], judge: Callable[[str], str]
) -> Command:
    program, flags, ranks = LOSSES[name]
    words = [*_TINY.split(), *flags.split(), *where]
    if program == _T5:
        words += ["--encoder-seq-length", "64", "--decoder-seq-length", "64"]
    if ranks > 1:
        words += ["--distributed-backend", "gloo"]
    command = _script(asked, program, *words, ranks=ranks)
    return Command(name, ["env", "NCCL_ALGO=Ring", *command], 60, judge)


def _comparison(name: str, wanted: Sequence[float] | None) -> Callable[[str], str]:
    return lambda output: _compare(output, wanted, name)


def _losses_in(output: str) -> list[float]:
    lines = [line for line in output.splitlines() if "lm loss:" in line]
    return [float(line.split("lm loss:")[1].split("|")[0]) for line in lines]


def _compare(output: str, wanted: Sequence[float] | None, name: str) -> str:
    found = _losses_in(output)
    if wanted is None:
        return "failed: no losses of a CPU; use --write-reference there"
    if len(found) != len(wanted):
        return f"failed: {len(found)} losses, not {len(wanted)}"
    kind = "16 bits" if "--bf16" in LOSSES[name][1] else "fp32"
    apart = [abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True)]
    if not all(gap <= _TOLERANCE[kind] for gap in apart):  # nor if one is NaN
        return f"failed: relative differences {', '.join(f'{gap:.1e}' for gap in apart)}"
    return f"ok: relative difference {max(apart):.1e}"


def _write_reference(asked: argparse.Namespace) -> int:
    """Run the flag sets on this CPU and write their losses."""
    found: dict[str, list[float]] = {}

    def keep(name: str) -> Callable[[str], str]:
        def judge(output: str) -> str:
            found[name] = _losses_in(output)
            return "ok" if len(found[name]) == 3 else "failed: no three losses"

        return judge

    asked.stand_in = False
    commands = [_training(asked, name, _ON_CPU, keep(name)) for name in LOSSES]
    rows = run_stage(_selected(asked, commands), asked.output / "reference.log", stage_s=3600)
    before = json.loads(REFERENCE.read_text()) if REFERENCE.exists() else {}
    REFERENCE.write_text(json.dumps(before | found, indent=1) + "\n")
    print("\n".join(table_of(rows)))
    return int(not all(row.result.startswith("ok") for row in rows))


def speed(asked: argparse.Namespace) -> list[Command]:
    """Return the benchmark of training, one command for each shape."""
    shapes = ("tiny", "tiny-llama") if asked.stand_in else ("124m", "1.3b", "llama-8b-stack")
    rows = str(asked.output.resolve() / "speed_rows.jsonl")
    words = ["-m", "benchmarks.train_gpu", "--rounds", "2", "--steps", "2", "--output", rows]
    if asked.stand_in:  # peers do not know that device
        words += [*_ON_CPU, "--steps", "2", "--contenders", "ours"]
    return _selected(
        asked,
        [Command(s, [sys.executable, *words, "--shape", s], 170, _rates) for s in shapes],
    )


def _rates(output: str) -> str:
    """Return tokens/s of each contender, and their share of the rate of a matmul."""
    table = [[cell.strip() for cell in line.split("|")] for line in output.splitlines()]
    rows = [row for row in table if len(row) == 10 and row[1].strip("-") not in ("contender", "")]
    found = [f"{row[1]} {row[2]} tokens/s ({row[5]} of a matmul)" for row in rows]
    return f"ok: {', '.join(found)}" if found else "failed: no row of a contender"


def profile(asked: argparse.Namespace) -> list[Command]:
    """Return the benchmark that lists kernels, one command for each shape."""
    shapes = ("tiny", "tiny-moe") if asked.stand_in else ("124m", "1.3b", "llama-8b-stack", "moe")
    words = ["-m", "benchmarks.profile_gpu", *(_ON_CPU if asked.stand_in else _ON_GPU)]
    return _selected(
        asked,
        [Command(s, [sys.executable, *words, "--shape", s], 125, _last_line) for s in shapes],
    )


def rest(asked: argparse.Namespace) -> list[Command]:
    """Return the benchmarks of generation and of single kernels."""
    saved = tempfile.mkdtemp()
    size = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --train-iters 1"
    size = "--train-iters 1" if asked.stand_in else size
    train = [*_TINY.split(), *size.split(), "--bf16", *_ON_GPU, "--save", saved]
    commands = [Command("a model to generate with", _script(asked, _GPT, *train), 120)]
    for requests in (1, 8) if asked.stand_in else (1, 8, 128):
        words = f"--num-input-tokens 16 --num-tokens-to-generate 32 --device cuda --load {saved} "
        words += f"--inference-max-requests {requests}"
        tool = "tools/run_inference_performance_test.py"
        generate = _script(asked, tool, *words.split())
        commands.append(Command(f"generation, {requests} requests", generate, 120, _last_line))
    if not asked.stand_in:  # that device has no kernels of its own
        kernels = [sys.executable, "-m", "benchmarks.kernels", *_ON_GPU]
        commands.append(Command("kernels", kernels, 240, _last_line))
    return _selected(asked, commands)


STAGES: dict[str, Callable[[argparse.Namespace], list[Command]]] = {
    "smoke": smoke,
    "losses": losses,
    "speed": speed,
    "profile": profile,
    "rest": rest,
}

if __name__ == "__main__":
    sys.exit(main())
