"""Measure time and memory of checkpoint conversion against a plain copy of the same bytes.

    python benchmarks/conversion.py [--gigabytes 1.5] [--rounds 3] [--folder DIR]

A random model of Llama's shape is converted from Hugging Face to our format and back.  The baseline
reads every file in blocks, writes it and fsyncs it.  Each contender runs in its own process, so
that its peak memory is known; they alternate, and the best time of each is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

BLOCK_BYTES = 4 << 20


def make(folder: Path, gigabytes: float) -> int:
    """Write the model; return the bytes of its largest tensor."""
    import torch

    from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
    from megatron.training.conversion.families import FAMILIES
    from megatron.training.conversion.hf_folder import write_config, write_weights
    from megatron.training.conversion.shape import ModelShape

    sizes = {"hidden_size": 2048, "ffn_hidden_size": 8192, "vocab_size": 32000, "kv_channels": 64}
    per_layer = 2 * (2048 * 2048 * 2 + 2 * 2048 * 512 + 3 * 2048 * 8192)
    num_layers = max(1, round((gigabytes * 1e9 - 2 * 2 * 2048 * 32000) / per_layer))
    heads = {"num_attention_heads": 32, "num_query_groups": 8, "softmax_scale": 64**-0.5}
    shape = ModelShape(
        num_layers=num_layers,
        max_position_embeddings=2048,
        windows=(None,) * num_layers,
        **heads,
        **sizes,
    )
    family = FAMILIES["llama"]
    folder.mkdir(parents=True)
    write_config(folder, family.config(shape))
    from megatron.training.conversion.hf import export_model
    from megatron.training.conversion.tensors import tensors_of

    generator = torch.Generator().manual_seed(0)

    def lazy(name: str, size: tuple[int, ...]) -> LazyTensor:
        def values() -> torch.Tensor:
            return torch.empty(size, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)

        return LazyTensor(name, torch.bfloat16, size, values)

    ours = {name: lazy(name, size) for name, size in tensors_of(shape).items()}
    write_weights(folder, export_model(shape, ours, family))
    return max(tensor.num_bytes for tensor in ours.values())


def plain(source: Path, target: Path) -> None:
    """Read and write every file of weights."""
    target.mkdir()
    for path in source.glob("*.safetensors"):
        with open(path, "rb") as read, open(target / path.name, "wb") as write:
            while block := read.read(BLOCK_BYTES):
                write.write(block)
            write.flush()
            os.fsync(write.fileno())


def work(kind: str, source: Path, target: Path) -> None:
    """Run one contender in this process; print seconds, and peak memory beyond the imports."""
    import torch  # noqa: F401

    from megatron.training.conversion.convert import ConversionRequest, convert

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, start_cpu = time.perf_counter(), time.process_time()
    if kind == "plain":
        plain(source, target)
    else:
        wanted = "hf" if kind == "to hf" else "safetensors_dist"
        with open(os.devnull, "w") as quiet:
            convert(
                ConversionRequest(source=source, target=target, format=wanted, verify=False),
                lambda text: print(text, file=quiet),
            )
    elapsed, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        json.dumps({"s": elapsed, "cpu": cpu, "peak": (peak - before) * 1024, "all": peak * 1024})
    )


def run(kind: str, source: Path, target: Path) -> dict[str, float]:
    """Run `work` in its own process."""
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, __file__, "--work", kind, str(source), str(target)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(out.splitlines()[-1])


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--work", nargs=3)
    args = parser.parse_args()
    if args.work:
        work(args.work[0], Path(args.work[1]), Path(args.work[2]))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        folder = Path(scratch)
        theirs, ours = folder / "theirs", folder / "ours"
        largest = make(theirs, args.gigabytes)
        size = sum(path.stat().st_size for path in theirs.glob("*.safetensors"))
        print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores")
        print(f"{size / 1e9:.2f} GB in bf16, the largest tensor {largest / 1e6:.0f} MB")
        contenders = {
            "plain": (theirs, folder / "plain"),
            "from hf": (theirs, ours),
            "to hf": (ours, folder / "back"),
        }
        best: dict[str, dict[str, float]] = {}
        for _ in range(args.rounds):
            for kind, places in contenders.items():
                found = run(kind, *places)
                if kind not in best or found["s"] < best[kind]["s"]:
                    best[kind] = found
        for kind, found in best.items():
            share = best["plain"]["s"] / found["s"]
            peak = f"{found['all'] / 1e9:.2f} GB, {found['peak'] / 1e6:.0f} MB above the imports"
            took = f"{found['s']:6.2f} s ({found['cpu']:.2f} s of CPU)"
            print(f"{kind:8}  {took}  {share:5.2f} of plain  peak {peak}")
        print(f"allowed above the imports: {(2 * largest + 2**30) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
