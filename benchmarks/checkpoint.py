"""Time saves and loads of a GPT with Adam state, against torch's formats and the bare disk.

    python -m benchmarks.checkpoint [--model 124M] [--ranks 1] [--rounds 5] [--folder DIR]
    python -m benchmarks.checkpoint --steps 20 [--model 124M] [--folder DIR]

Weights and two moments per weight are in fp32, sharded by rows with --ranks 2.  Every save ends
with fsync; every load ends with the values in existing tensors.  The contenders alternate, in
another order each round; reported are best and median of each, on the slowest rank.  Loads read
from the page cache.  ``--steps`` trains instead, with and without an asynchronous save at every
tenth step, and prints the time of a step.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from megatron.core.dist_checkpointing import all_ranks
from megatron.core.dist_checkpointing.background import BackgroundSave, HostBuffer
from megatron.core.dist_checkpointing.formats import Contents
from megatron.core.dist_checkpointing.local import Replication, save_local
from megatron.core.dist_checkpointing.reader import CheckpointReader, StoredPiece
from megatron.core.dist_checkpointing.records import Piece, TensorRecord
from megatron.core.dist_checkpointing.safetensors_file import bytes_of

ROOT = Path(__file__).resolve().parent.parent
# layers, hidden size, heads
MODELS = {"30M": (6, 384, 6), "124M": (12, 768, 12), "350M": (24, 1024, 16), "1B": (22, 2048, 16)}
VOCABULARY, POSITIONS = 50304, 1024
SAVES, LOADS, STALLS = "save", "load", "stall of an asynchronous save"

Call = Callable[[], object]


def shapes(model: str) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the weights and both moments."""
    layers, hidden, _ = MODELS[model]
    weights: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (VOCABULARY, hidden),
        "embedding.position_embeddings.weight": (POSITIONS, hidden),
    }
    of_a_layer = {
        "linear_qkv.weight": (3 * hidden, hidden),
        "linear_qkv.bias": (3 * hidden,),
        "linear_proj.weight": (hidden, hidden),
        "linear_proj.bias": (hidden,),
        "linear_fc1.weight": (4 * hidden, hidden),
        "linear_fc1.bias": (4 * hidden,),
        "linear_fc2.weight": (hidden, 4 * hidden),
        "linear_fc2.bias": (hidden,),
        "norm1.weight": (hidden,),
        "norm2.weight": (hidden,),
    }
    for layer in range(layers):
        weights |= {f"decoder.layers.{layer}.{name}": s for name, s in of_a_layer.items()}
    kinds = ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
    return {kind + name: shape for kind in kinds for name, shape in weights.items()}


class _UncheckedReader(CheckpointReader):
    """Reader that does not compare checksums, to measure their cost."""

    def _read_bytes(self, piece: StoredPiece, begin: int, out: memoryview) -> None:
        os.preadv(self._open(piece.file), [out], piece.start + begin)


class Contest:
    """Values of one rank, and all ways to save and load them."""

    def __init__(self, model: str, rank: int, ranks: int, folder: Path):
        self.rank, self.ranks, self.folder = rank, ranks, folder
        self.memory = Path("/dev/shm", f"benchmark-{folder.name}")
        self.group = dist.group.WORLD if ranks > 1 else None
        self.mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None
        torch.manual_seed(rank)
        self.shapes = shapes(model)
        self.values = {
            name: torch.randn(shape[0] // ranks, *shape[1:]) for name, shape in self.shapes.items()
        }
        self.loaded = {name: torch.zeros_like(value) for name, value in self.values.items()}
        self.num_bytes = sum(value.nbytes for value in self.values.values())
        self.buffer = HostBuffer()
        self.pending: Any = None

    def contenders(self) -> dict[str, dict[str, Call]]:
        """Return what is compared -> name -> the call that is timed."""
        own = self.folder / f"rank{self.rank}"
        safe, pickled, plain = (own.with_suffix(end) for end in (".safetensors", ".pt", ".bin"))
        return {
            SAVES: {
                "ours": self.save_ours,
                "dcp": lambda: dcp.save(self.state(self.values), **self.dcp_options()),
                "safetensors": lambda: (save_file(self.values, safe), synced(safe)),
                "torch.save": lambda: (torch.save(self.values, pickled), synced(pickled)),
                "plain": lambda: self.write_plain(plain),
                "local": lambda: self.save_parts(self.folder / "local"),
                "local, in memory": lambda: self.save_parts(self.memory),
            },
            LOADS: {
                "ours": self.load_ours,
                "ours, not verified": lambda: self.load_ours(verify=False),
                "dcp": lambda: dcp.load(self.state(self.loaded), **self.dcp_options()),
                "safetensors": lambda: self.copy_in(load_file(safe)),
                "torch.load": lambda: self.copy_in(torch.load(pickled, weights_only=True)),
                "plain": lambda: self.read_plain(plain),
            },
            STALLS: {"ours": self.start_ours, "dcp": self.start_dcp},
        }

    def tensors(self, values: dict[str, Tensor]) -> list[TensorRecord]:
        """Return this rank's rows as arguments of our functions."""
        return [
            TensorRecord(
                key=name,
                global_shape=self.shapes[name],
                dtype=value.dtype,
                pieces=(Piece((self.rank * len(value),) + (0,) * (value.dim() - 1), value),),
            )
            for name, value in values.items()
        ]

    def state(self, values: dict[str, Tensor]) -> dict[str, Any]:
        """Return the same rows as a state dict for torch.distributed.checkpoint."""
        if self.mesh is None:
            return dict(values)
        return {
            name: DTensor.from_local(value, self.mesh, [Shard(0)]) for name, value in values.items()
        }

    def dcp_options(self) -> dict[str, Any]:
        options = {"checkpoint_id": self.folder / "dcp"}
        return options if self.ranks > 1 else {**options, "no_dist": True}

    def contents(self) -> Contents:
        return Contents(tensors=self.tensors(self.values))

    def save_ours(self) -> None:
        all_ranks.save(self.folder / "ours", 1, self.contents(), self.group)

    def save_parts(self, root: Path) -> None:
        """Save as --non-persistent-ckpt-type does, on the disk or in host memory."""
        world = dist.group.WORLD
        assert world is not None
        save_local(root, 1, self.contents(), world, share_work=False, replication=Replication())

    def load_ours(self, *, verify: bool = True) -> None:
        folder, wanted = self.folder / "ours" / "iter_0000001", self.tensors(self.loaded)
        if verify:
            all_ranks.load(folder, wanted, self.group)
            return
        with _UncheckedReader(folder) as reader:
            all_ranks.fill(wanted, reader)

    def start_ours(self) -> None:
        begun = all_ranks.begin(self.folder / "ours", 1, self.contents(), self.group)
        self.pending = BackgroundSave(begun, self.buffer, self.group).wait

    def start_dcp(self) -> None:
        self.pending = dcp.async_save(self.state(self.values), **self.dcp_options()).result

    def copy_in(self, found: dict[str, Tensor]) -> None:
        for name, value in self.loaded.items():
            value.copy_(found[name])

    def write_plain(self, path: Path) -> None:
        with open(path, "wb", buffering=0) as file:
            for value in self.values.values():
                assert file.write(bytes_of(value)) == value.nbytes
            os.fsync(file.fileno())

    def read_plain(self, path: Path) -> None:
        with open(path, "rb", buffering=0) as file:
            for value in self.loaded.values():
                assert file.readinto(bytes_of(value)) == value.nbytes

    def seconds(self, call: Call) -> tuple[float, float]:
        """Return wall and CPU time of the slowest rank; all ranks begin together.  Collective.

        The time that an asynchronous save takes in the background is not included.
        """
        self.barrier()
        start, start_cpu = time.perf_counter(), time.process_time()
        call()
        took = torch.tensor([time.perf_counter() - start, time.process_time() - start_cpu])
        if self.pending is not None:
            self.pending()
            self.pending = None
        if self.group is not None:
            dist.all_reduce(took, dist.ReduceOp.MAX)
        return float(took[0]), float(took[1])

    def barrier(self) -> None:
        if self.group is not None:
            dist.barrier()

    def empty(self) -> None:
        """Empty the folder and flush file system buffers, before a save.  Collective."""
        self.barrier()
        if self.rank == 0:
            shutil.rmtree(self.memory, ignore_errors=True)
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
            os.sync()
        self.barrier()

    def load(self, name: str, call: Call) -> tuple[float, float]:
        """Return the times of a load as `seconds` does; check that all values were loaded."""
        for value in self.loaded.values():
            value.zero_()
        took = self.seconds(call)
        same = all(torch.equal(self.loaded[key], value) for key, value in self.values.items())
        assert same, f"{name} did not load what was saved"
        return took


def synced(path: Path) -> None:
    """Fsync a complete file."""
    file = os.open(path, os.O_RDWR)
    os.fsync(file)
    os.close(file)


def compete(rank: int, args: argparse.Namespace, store: str) -> None:
    """Run all contenders on one rank; rank 0 prints."""
    torch.set_num_threads(1)
    # Also with one rank: asynchronous saves of torch need a process group.
    dist.init_process_group("gloo", store=dist.FileStore(store), rank=rank, world_size=args.ranks)
    contest = Contest(args.model, rank, args.ranks, args.folder)
    contest.folder = args.folder / "kept"
    contest.empty()
    for call in contest.contenders()[SAVES].values():
        contest.seconds(call)  # writes what the loads read
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for i in range(args.rounds + 1):
        for what in (SAVES, LOADS, STALLS):
            contest.folder = args.folder / ("kept" if what == LOADS else "scratch")
            calls = list(contest.contenders()[what].items())
            first = i % len(calls)
            for name, call in calls[first:] + calls[:first]:
                if what == LOADS:
                    took = contest.load(name, call)
                else:
                    contest.empty()
                    took = contest.seconds(call)
                if i > 0:  # the first round is warmup
                    found.setdefault((what, name), []).append(took)
    if rank == 0:
        report(contest.num_bytes * args.ranks, args, found)
        shutil.rmtree(contest.memory, ignore_errors=True)
    dist.destroy_process_group()


def report(
    num_bytes: int,
    args: argparse.Namespace,
    found: dict[tuple[str, str], list[tuple[float, float]]],
) -> None:
    """Print a table in Markdown."""
    print(f"{args.model}, {num_bytes / 1e9:.2f} GB, {args.ranks} ranks, {args.rounds} rounds")
    print("| what | contender | best s | median s | GB/s | best / ours | CPU s |")
    print("|---|---|---|---|---|---|---|")
    for (what, name), took in found.items():
        times = [wall for wall, _ in took]
        best, cpu = min(times), min(cpu for _, cpu in took)
        ratio = best / min(wall for wall, _ in found[what, "ours"])
        print(
            f"| {what} | {name} | {best:.3f} | {statistics.median(times):.3f} "
            f"| {num_bytes / best / 1e9:.2f} | {ratio:.2f} | {cpu:.2f} |"
        )


def step_times(args: argparse.Namespace, saving: bool) -> list[float]:
    """Return the milliseconds of each step of a real run, from its log."""
    layers, hidden, heads = MODELS[args.model]
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), "--device", "cpu"]
    command += f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads}".split()
    command += "--seq-length 256 --max-position-embeddings 1024 --micro-batch-size 4".split()
    command += "--global-batch-size 4 --mock-data --tokenizer-type NullTokenizer".split()
    command += f"--vocab-size {VOCABULARY - 1} --lr 1e-4 --log-interval 1 --eval-iters 0".split()
    command += ["--train-iters", str(args.steps), "--num-workers", "0"]
    if saving:
        folder = str(args.folder / "training")
        command += ["--save", folder, "--save-interval", "10", "--async-save"]
        command += ["--keep-last-checkpoints", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    out = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    found = re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", out.stdout)
    return [float(milliseconds) for milliseconds in found]


def train(args: argparse.Namespace) -> None:
    """Alternate runs with and without saves, and compare the sums of their steps."""
    sums: dict[bool, list[float]] = {False: [], True: []}
    for i in range(args.rounds):
        for saving in (False, True) if i % 2 else (True, False):
            # The first steps are warmup; from the first save on, each save has ten steps.
            sums[saving].append(sum(step_times(args, saving)[9:]))
            shutil.rmtree(args.folder / "training", ignore_errors=True)
            mean = sums[saving][-1] / (args.steps - 9)
            print(f"saving {saving}: {mean:.1f} ms a step", flush=True)
    print(f"steps with saves / without: {min(sums[True]) / min(sums[False]):.4f} (best runs)")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="124M")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        args.folder = Path(scratch)
        if args.steps:
            train(args)
            return
        print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores", flush=True)
        store = str(args.folder / "store")
        torch.multiprocessing.spawn(compete, (args, store), args.ranks)


if __name__ == "__main__":
    main()
