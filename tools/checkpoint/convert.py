"""Convert a checkpoint: from and to Hugging Face, between our formats, for another layout.

    python tools/checkpoint/convert.py --from DIR --to DIR --format hf
    python tools/checkpoint/convert.py --from DIR --to DIR --format hf --quant int4
    python tools/checkpoint/convert.py --from DIR --to DIR --format hf --quant fp8 \\
        --calib-data texts.jsonl
    python tools/checkpoint/convert.py --from HF_DIR --to DIR [--tensor-parallel 2]
    python tools/checkpoint/convert.py --from ADAPTERS --to DIR --format peft|hf|safetensors_dist
    python tools/checkpoint/convert.py --from PEFT_DIR --base DIR --to ADAPTERS
    python tools/checkpoint/convert.py --from DIR --to DIR --format onnx
    python tools/checkpoint/convert.py --from DIR --to DIR --format trtllm [--tensor-parallel 2]

A checkpoint of adapters (LoRA) is merged into its base, except by --format peft.  Draft heads are
written with their base, by --format hf into its folder draft; --from and --base read such a folder.

Megatron-LM's command line is accepted too: --model-type GPT --loader core|llama_mistral --saver
core --load-dir DIR --save-dir DIR --target-tensor-parallel-size N ...  No GPU is used.  Memory
holds one or two tensors, and both models while their logits are compared (--no-verify omits this).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # installed or not

import megatron.post_training  # noqa: F401  registers its objectives
from megatron.core.config.errors import CheckpointError, ConfigError
from megatron.core.dist_checkpointing.folders import is_filled
from megatron.core.dist_checkpointing.formats import FORMATS
from megatron.core.quantization.formats import RECIPES
from megatron.post_training import quantization
from megatron.training.checkpointing.model_folder_args import local_folder
from megatron.training.conversion.convert import (
    BESIDE,
    DTYPES,
    EXPORTS,
    HF,
    PEFT,
    ConversionRequest,
    convert,
)
from megatron.training.conversion.hf_folder import CONFIG
from megatron.training.conversion.quantized_export import FORMS
from megatron.training.initialize import configure, connect, shut_down
from megatron.training.preprocess.cli import run_tool
from megatron.training.process.user_code import parse_tool_args

KINDS = ("GPT", "BERT", "T5", "MAMBA")  # Megatron-LM has the first two
# Megatron-LM's --loader and --saver: None if supported, else why not.
_IMAGES = (
    "Megatron-LM's files of models that read images are not converted; convert the Hugging Face "
    "form: --from HF_DIR, or --format hf"
)
LOADERS: dict[str, str | None] = {
    **dict.fromkeys(("core", "mcore", "megatron", "legacy", "llama_mistral", "mixtral_hf")),
    "llava": _IMAGES,
}
SAVERS: dict[str, str | None] = {
    **dict.fromkeys(("core", "mcore", "megatron", "legacy")),
    "llava": _IMAGES,
    "hf_llava": _IMAGES,
}
# Flags of the run that --calib-data starts: model and tokenizer are those of the checkpoint.
CALIBRATION = (
    "--use-checkpoint-args --skip-train --finetune --no-load-optim --no-load-rng --device cpu "
    "--micro-batch-size 1 --num-workers 0 --transformer-impl local"
)
# Megatron-LM's flags that have no effect, and why.
WITHOUT_EFFECT = {
    "max_queue_size": "there is no queue: tensors are converted one at a time",
    "no_checking": "every tensor is always checked",
    "megatron_path": "this program needs no other",
    "loader_transformer_impl": "no model is built",
    "saver_transformer_impl": "no model is built",
    "model_size": "config.json says it",
    "position_embedding_type": "the checkpoint says it",
    "make_vocab_size_divisible_by": "padding of the vocabulary is not stored",
    "vit_dummy_head_count": "it belongs to the loader llava",
}


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    names = "a folder, or a model of the Hugging Face hub: org/name or hf://org/name@revision"
    add("--from", "--load-dir", dest="source", required=True, help=f"what to read: {names}")
    add("--to", "--save-dir", dest="target", type=Path, required=True, help="what to write")
    add("--format", choices=(*EXPORTS, PEFT, *FORMATS), default=next(iter(FORMATS)))
    add("--quant", help=f"write linear layers in few bits, with --format hf: {', '.join(RECIPES)}")
    add("--quant-format", choices=FORMS, default=FORMS[0], help="files of --quant")
    add("--calib-data", help="JSON lines with a key text: calibrate by them before --quant rounds")
    add("--calib-size", type=int, default=512, help="rows of --calib-data (default 512)")
    add("--calib-length", type=int, help="tokens of a row; default: the checkpoint's --seq-length")
    add("--report-text", type=Path, help="text file for the perplexity before and after --quant")
    add(
        "--family",
        help="Hugging Face model_type, or trtllm's model, to write; default: the one that fits",
    )
    add("--base", help="model of the adapters or draft heads; default: where their checkpoint says")
    add("--dtype", choices=tuple(DTYPES), help="of the weights written; default: as they are")
    add("--bf16", action="store_const", const="bfloat16", dest="dtype", help="--dtype bfloat16")
    add("--fp16", action="store_const", const="float16", dest="dtype", help="--dtype float16")
    layout = "of the files of formats torch and trtllm; else only written into the arguments"
    add("--tensor-parallel", "--target-tensor-parallel-size", type=int, help=layout)
    add("--pipeline-parallel", "--target-pipeline-parallel-size", type=int, help=layout)
    add("--expert-parallel", "--target-expert-parallel-size", type=int, help=layout)
    add("--true-vocab-size", "--vocab-size", type=int, help="tokens, where the rest is padding")
    add("--tokenizer-model", help="tokenizer that the checkpoint is to name")
    add("--vocab-file", help="vocabulary file that the checkpoint is to name")
    add("--ckpt-step", type=int, help="iteration to convert; default: the newest")
    add("--no-verify", action="store_true", help="do not compare the logits of both forms")
    add("--max-shard-size", type=int, help="bytes of a Hugging Face file; default: 5 GB")
    group = parser.add_argument_group("of the reference")
    group.add_argument("--model-type", choices=KINDS, help="refuse a model of another kind")
    group.add_argument("--loader", help=", ".join(LOADERS))
    group.add_argument("--saver", help=", ".join(SAVERS))
    group.add_argument("--checkpoint-type", choices=("hf", "meta"), help="hf")
    group.add_argument("--no-checking", action="store_true", default=None)
    for name in (name for name in WITHOUT_EFFECT if name != "no_checking"):
        group.add_argument(f"--{name.replace('_', '-')}")
    return parser


def wanted_of(args: argparse.Namespace) -> ConversionRequest:
    """Return the conversion that ``args`` request.  Raises ConfigError if it is unsupported."""
    _refuse(args)
    run_args: dict[str, Any] = {
        "tensor_model_parallel_size": args.tensor_parallel,
        "pipeline_model_parallel_size": args.pipeline_parallel,
        "expert_model_parallel_size": args.expert_parallel,
        "vocab_file": args.vocab_file,
    }
    if args.tokenizer_model is not None:
        path = Path(args.tokenizer_model)
        is_pieces = path.suffix == ".model"
        run_args["tokenizer_type"] = "Llama2Tokenizer" if is_pieces else "HuggingFaceTokenizer"
        run_args["tokenizer_model"] = str(path.resolve()) if path.exists() else str(path)
    return ConversionRequest(
        source=Path(args.source),
        target=args.target,
        format=args.format,
        family=args.family,
        dtype=None if args.dtype is None else DTYPES[args.dtype],
        vocab_size=args.true_vocab_size,
        args={name: value for name, value in run_args.items() if value is not None},
        step=args.ckpt_step,
        base=args.base and Path(args.base),
        kind=args.model_type and args.model_type.lower(),
        verify=not args.no_verify,
        max_shard_bytes=args.max_shard_size,
        quant=args.quant,
        quant_form=args.quant_format,
        report_text=args.report_text,
    )


def _refuse(args: argparse.Namespace) -> None:
    for flag, name, known in (("loader", args.loader, LOADERS), ("saver", args.saver, SAVERS)):
        if name is None:
            continue
        if name not in known:
            raise ConfigError(
                f"--{flag} {name}: plug-ins are not loaded by name; there are {', '.join(known)}"
            )
        if known[name] is not None:
            raise ConfigError(f"--{flag} {name}: {known[name]}")
    if args.checkpoint_type == "meta":
        raise ConfigError(
            "--checkpoint-type meta: Meta's own files are not read; take the model in the Hugging "
            "Face form"
        )
    if args.calib_data is not None and (args.quant not in RECIPES or args.format != HF):
        raise ConfigError(
            f"--calib-data {args.calib_data} needs --format {HF} and --quant with a recipe: "
            f"{', '.join(RECIPES)}"
        )


@contextmanager
def calibrated(wanted: ConversionRequest, args: argparse.Namespace) -> Iterator[ConversionRequest]:
    """Calibrate the model in this process; yield the conversion of the quantized checkpoint.

    That checkpoint lies beside --to until the block ends.  Raises ConfigError or DataError.
    """
    if is_filled(wanted.target):
        raise CheckpointError(f"{wanted.target} is there already: name a new folder, or remove it")
    wanted.target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f"{wanted.target.name}.calibrated-"
    with TemporaryDirectory(dir=wanted.target.parent, prefix=prefix) as folder:
        argv = [*CALIBRATION.split(), "--load", str(wanted.source), "--save", folder]
        argv += ["--export-quant-cfg", str(wanted.quant), "--calib-data", args.calib_data]
        for flag, value in (
            ("--calib-size", args.calib_size),
            ("--seq-length", args.calib_length),
            ("--ckpt-step", wanted.step),
            ("--tokenizer-model", args.tokenizer_model),
        ):
            argv += [] if value is None else [flag, str(value)]
        config = configure(quantization.add_flags, argv=argv)
        connect(config)
        try:
            quantization.quantize_checkpoint(config)
        finally:
            shut_down()
        is_theirs = (wanted.source / CONFIG).exists()
        beside = wanted.source if is_theirs else wanted.source / BESIDE
        yield replace(wanted, source=Path(folder), step=None, quant=None, beside=beside)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    args = parse_tool_args(get_parser, argv)
    args.source = local_folder(args.source, "--from")
    args.base = args.base and local_folder(args.base, "--base")
    wanted = wanted_of(args)
    for name, why in WITHOUT_EFFECT.items():
        if vars(args)[name] is not None:
            print(f"note: --{name.replace('_', '-')} is without effect: {why}")
    with nullcontext(wanted) if args.calib_data is None else calibrated(wanted, args) as request:
        convert(request)


if __name__ == "__main__":
    sys.exit(run_tool(main))
