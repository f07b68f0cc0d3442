"""Inspect a checkpoint of any format: list, print a tensor, compare two, verify, rename keys.

    python tools/checkpoint/checkpoint_inspector.py inspect DIR
    python tools/checkpoint/checkpoint_inspector.py print-tensor DIR KEY
    python tools/checkpoint/checkpoint_inspector.py diff DIR OTHER
    python tools/checkpoint/checkpoint_inspector.py verify DIR
    python tools/checkpoint/checkpoint_inspector.py modify-state-dict DIR NEW --op "rename OLD NEW"
    python tools/checkpoint/checkpoint_inspector.py convert-checkpoint DIR NEW --format hf

DIR is a directory as for --load, one checkpoint in it, or a Hugging Face folder.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # installed or not

import torch

from megatron.core.config.errors import CheckpointError, ConfigError
from megatron.core.dist_checkpointing.formats import FORMATS, format_of, open_reader
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.training.checkpointing.paths import check_common, holds_run, resolve_folder
from megatron.training.conversion.convert import HF, ConversionRequest, convert
from megatron.training.conversion.hf_folder import CONFIG, read_weights
from megatron.training.preprocess.cli import run_tool

Tensors = Mapping[str, LazyTensor]
_ARGUMENTS = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "tokenizer_type")


def open_tensors(directory: Path, step: int | None = None) -> tuple[str, Tensors]:
    """Return a line about the checkpoint in ``directory``, and its tensors.

    Raises CheckpointError.
    """
    if (directory / CONFIG).exists():
        return f"{directory}: Hugging Face", read_weights(directory)
    folder = resolve_folder(directory, step)
    reader = open_reader(folder)
    tensors = {
        key: LazyTensor(key, stored.dtype, stored.shape, lambda key=key: reader.read(key))
        for key, stored in sorted(reader.tensors.items())
    }
    return f"{folder}: {format_of(folder)}, {_source(reader)}", tensors


def _source(reader: CheckpointReader) -> str:
    """Return what saved a checkpoint: a run, with its main arguments, or a call of the library.

    Raises CheckpointDamaged.
    """
    common = reader.common()
    if not holds_run(common):
        return "library checkpoint (saved by dist_checkpointing.save, not by a training run)"
    check_common(common, reader.folder)
    about = f"iteration {reader.manifest.iteration}"
    layout = reader.manifest.layout.get("dense")
    if layout:
        about += ", written by " + " ".join(f"{axis}{size}" for axis, size in layout)
    asked = common["args"]
    known = [name for name in _ARGUMENTS if asked.get(name) is not None]
    return about + "".join(f"\n  {name} {asked[name]}" for name in known)


def inspect(args: argparse.Namespace) -> None:
    """List keys, shapes and dtypes."""
    about, tensors = open_tensors(args.checkpoint_dir, args.ckpt_step)
    print(about)
    for key, tensor in tensors.items():
        print(f"{key}  {list(tensor.shape)}  {_short(tensor.dtype)}")
    count = sum(prod(tensor.shape) for tensor in tensors.values())
    num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
    print(f"{len(tensors)} tensors, {count:,} numbers, {num_bytes:,} bytes")


def print_json(args: argparse.Namespace) -> None:
    """Print keys, shapes and dtypes as JSON."""
    _, tensors = open_tensors(args.checkpoint_dir, args.ckpt_step)
    found = {k: {"shape": list(t.shape), "dtype": _short(t.dtype)} for k, t in tensors.items()}
    print(json.dumps(found, indent=2))


def print_tensor(args: argparse.Namespace) -> None:
    """Print one tensor and statistics of its values."""
    _, tensors = open_tensors(args.checkpoint_dir, args.ckpt_step)
    if args.key not in tensors:
        near = [key for key in tensors if args.key in key]
        hint = f"; there are {', '.join(near[:5])}" if near else ""
        raise CheckpointError(f"{args.checkpoint_dir} holds no tensor {args.key}{hint}")
    tensor = tensors[args.key].make()
    values = tensor.double()
    print(tensor)
    print(
        f"{args.key}  {list(tensor.shape)}  {_short(tensor.dtype)}  min {values.min():.6g}  "
        f"max {values.max():.6g}  mean {values.mean():.6g}  norm {values.norm():.6g}  "
        f"not finite {int((~values.isfinite()).sum())}"
    )


def diff(args: argparse.Namespace) -> int:
    """Compare two checkpoints tensor by tensor; exit with 1 if they differ."""
    (_, mine), (_, other) = (open_tensors(d) for d in (args.checkpoint_dir, args.other_dir))
    differing = 0
    for key in sorted({*mine, *other}):
        sentence = _difference(mine.get(key), other.get(key))
        if sentence:
            differing += 1
            print(f"{key}  {sentence}")
    print(f"{differing} of {len({*mine, *other})} tensors differ")
    return int(differing > 0)


def _difference(a: LazyTensor | None, b: LazyTensor | None) -> str | None:
    if a is None or b is None:
        return f"only in the {'second' if a is None else 'first'}"
    if a.shape != b.shape:
        return f"shape {list(a.shape)} and {list(b.shape)}"
    first, second = a.make(), b.make()
    sentence = f"dtype {_short(a.dtype)} and {_short(b.dtype)}, " if a.dtype != b.dtype else ""
    x, y = first.double(), second.double()
    same = (x == y) | (x.isnan() & y.isnan())
    if bool(same.all()):
        return f"{sentence}same values" if sentence else None
    apart = (x - y).abs()
    apart = torch.where(same, torch.zeros_like(apart), apart)
    relative = apart / torch.maximum(x.abs(), y.abs()).clamp_min(1e-300)
    return (
        f"{sentence}max abs {float(apart.max()):.3g}, max rel {float(relative.max()):.3g}, "
        f"{int((~same).sum()):,} of {x.numel():,} numbers"
    )


def verify(args: argparse.Namespace) -> None:
    """Read all data and compare it with its checksums."""
    folder = resolve_folder(args.checkpoint_dir, args.ckpt_step)
    with open_reader(folder) as reader:
        _source(reader)
        reader.check_sizes()
        reader.check_all()
        print(f"{folder} is whole: {len(reader.tensors)} tensors read and verified")


def modify(args: argparse.Namespace) -> None:
    """Write a copy with renamed keys, or without some tensors."""
    changes = [_operation(text) for text in args.op]
    rename: dict[str, str | None] = {}
    for key in open_tensors(args.input_dir, args.ckpt_step)[1]:
        name: str | None = key
        for change in changes:
            name = None if name is None else change(name)
        rename[key] = name
    done = sum(key != name for key, name in rename.items())
    if not done:
        raise ConfigError(f"--op {' '.join(args.op)} changes no key of {args.input_dir}")
    convert(
        ConversionRequest(
            source=args.input_dir,
            target=args.output_dir,
            format=args.format,
            rename=rename.__getitem__,
            step=args.ckpt_step,
        )
    )
    print(f"{done} keys were changed")


def _operation(text: str) -> Callable[[str], str | None]:
    """Return the change of a key by ``rename PATTERN REPLACEMENT`` or ``delete PATTERN``."""
    kind, *words = text.split()
    if (kind, len(words)) not in (("rename", 2), ("delete", 1)):
        raise ConfigError(
            f"--op {text!r}: give 'rename PATTERN REPLACEMENT' or 'delete PATTERN', with regular "
            "expressions for a part of the key"
        )
    pattern = re.compile(words[0])
    if kind == "rename":
        return lambda key: pattern.sub(words[1], key)
    return lambda key: None if pattern.search(key) else key


def convert_checkpoint(args: argparse.Namespace) -> None:
    """Convert to another format, as convert.py does."""
    convert(
        ConversionRequest(
            source=args.input_dir, target=args.output_dir, format=args.format, step=args.ckpt_step
        )
    )


def convert_to_fsdp(args: argparse.Namespace) -> None:
    """Convert any checkpoint to the format of Megatron-LM's FSDP."""
    for flag, default in _PREFIXES.items():
        found = vars(args)[flag.removeprefix("--").replace("-", "_")]
        if found not in (None, default):
            raise ConfigError(
                f"{flag} {found}: the written keys always begin with {default}; give {flag} "
                f"{default}"
            )
    for flag, why in _WITHOUT_EFFECT.items():
        if vars(args)[flag.removeprefix("--").replace("-", "_")]:
            print(f"note: {flag} is without effect: {why}")
    convert(
        ConversionRequest(
            source=args.input_dir,
            target=args.output_dir,
            format="fsdp_dtensor",
            args={"swiglu": True} if args.swiglu else {},
            step=args.ckpt_step,
        )
    )


_PREFIXES = {
    "--output-optimizer-state-prefix": "optimizer.state.module.module.module",
    "--output-model-weight-prefix": "model.module",
}
_WITHOUT_EFFECT = {
    "--oom-traceback": "tensors are converted one at a time",
    "--distributed-timeout-minutes": "there is one process",
}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line: a subcommand and its arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[..., object], *places: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=(run.__doc__ or "").splitlines()[0])
        sub.set_defaults(run=run)
        for place in places:
            sub.add_argument(place, type=str if place == "key" else Path)
        sub.add_argument("--ckpt-step", type=int, help="iteration; default: the newest")
        sub.add_argument("--enable-msc", action="store_true", help="without effect on local files")
        return sub

    command("inspect", inspect, "checkpoint_dir")
    command("print-torch-dcp-in-json", print_json, "checkpoint_dir")
    command("print-tensor", print_tensor, "checkpoint_dir", "key")
    command("diff", diff, "checkpoint_dir", "other_dir")
    command("verify", verify, "checkpoint_dir")
    sub = command("modify-state-dict", modify, "input_dir", "output_dir")
    sub.add_argument("--op", action="append", required=True, help="rename A B, or delete A")
    sub.add_argument("--format", choices=tuple(FORMATS), default=next(iter(FORMATS)))
    sub = command("convert-checkpoint", convert_checkpoint, "input_dir", "output_dir")
    sub.add_argument("--format", choices=(HF, *FORMATS), default=next(iter(FORMATS)))
    sub = command("convert-torch-dist-to-fsdp-dtensor", convert_to_fsdp, "input_dir", "output_dir")
    for flag in ("--swiglu", "--oom-traceback"):
        sub.add_argument(flag, action="store_true")
    for flag in ("--distributed-timeout-minutes", *_PREFIXES):
        sub.add_argument(flag)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; exits with 1 if two checkpoints differ."""
    args = get_parser().parse_args(argv)
    for place in (v for v in vars(args).values() if isinstance(v, Path)):
        if str(place).startswith("msc:"):
            raise ConfigError(
                f"{place}: checkpoints are read from local files only; copy it to this machine"
            )
    if args.enable_msc:
        print("note: --enable-msc is without effect: the files are local")
    if args.run(args):
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(run_tool(main))
