"""Serve a checkpoint over HTTP: OpenAI's API, and that of Megatron-LM's server.

    python tools/run_text_generation_server.py --load DIR --port 5000
    torchrun --nproc-per-node 2 tools/run_text_generation_server.py --load DIR \
        --tensor-model-parallel-size 2 --port 5000

This process, rank 0, holds the engine.  It starts the HTTP front end as a process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config.errors import ConfigError, MegatronError
from megatron.core.inference.paged_engine.engine import EngineOptions
from megatron.inference.server.messages import EngineInfo
from megatron.training.arguments.parser import parse_args
from megatron.training.inference.generation import GenerationLayout, Writer, open_writer
from megatron.training.initialize import shut_down
from megatron.training.process.launcher_watch import end_with_launcher
from megatron.training.process.rank_print import is_rank0
from tools.front_end_process import FrontEndProcess, add_front_end_flags

# Flag -> field of `EngineOptions`, and the factor of the flag's unit.  A later row wins.
_SIZES = {
    "--inference-max-requests": ("max_requests", 1),
    "--max-batch-size": ("max_requests", 1),
    "--inference-dynamic-batching-max-requests-override": ("max_requests", 1),
    "--inference-dynamic-batching-max-tokens-override": ("max_step_tokens", 1),
    "--inference-dynamic-batching-chunk-size": ("page_size", 1),
    "--inference-dynamic-batching-buffer-size-gb": ("buffer_bytes", 2**30),
    "--inference-max-seq-length": ("max_sequence_length", 1),
}
_DESTS = {"--inference-max-requests": "inference_max_batch_size"}  # where it is not the flag's name
# Flags of the server of Megatron-LM that each request sets for itself.
_OF_REQUESTS = (
    "--temperature",
    "--top_k",
    "--top_p",
    "--num-tokens-to-generate",
    "--prompts",
    "--return-log-probs",
)
# Other flags that this program reads; all others are those of a checkpoint's training run.
_READ = (
    "--load",
    "--ckpt-step",
    "--device",
    "--import-module",
    "--spec",
    "--cache-mla-latents",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
    "--use-checkpoint-args",
    "--inference-dynamic-batching",
    "--yaml-cfg",
)
_OWN = (
    "--port",
    "--host",
    "--api-key-file",
    "--chat-template",
    "--served-model-name",
    "--inference-batch-invariant",
)


def main() -> None:
    """Serve --load until SIGTERM."""
    try:
        args = parse_args(add_server_flags)
        if args.load is None:
            raise ConfigError("--load is missing: give the directory that training saved to")
        end_with_launcher()
        status = serve(args, sys.argv[1:]) if is_rank0() else follow(args, sys.argv[1:])
    except (MegatronError, OSError, ValueError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    sys.exit(status)


def serve(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Start the front end, load the model and serve; return the exit status.  For rank 0."""
    for warning in warnings_of(words):
        print(f"WARNING: {warning}", flush=True)
    front_end = FrontEndProcess(
        args.host, args.port, api_key_file=args.api_key_file, chat_template=args.chat_template
    )
    try:
        writer = open_engine(args, words)
        status = front_end.serve(writer.engine, engine_info(args, writer))
    finally:
        front_end.close()
    writer.engine.close()
    shut_down()
    return status


def follow(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Execute the steps that rank 0 plans, until it ends."""
    writer = open_engine(args, words)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # rank 0 first answers its open requests
    writer.engine.follow()
    shut_down()
    return 0


def open_engine(args: argparse.Namespace, words: Sequence[str]) -> Writer:
    """Build the engine of the checkpoint.  Collective over all ranks."""
    given = vars(args)
    return open_writer(
        args.load,
        step=args.ckpt_step,
        device_kind=args.device,
        layout=GenerationLayout(
            tensor=args.tensor_model_parallel_size,
            pipeline=args.pipeline_model_parallel_size,
            expert=args.expert_model_parallel_size,
            expert_tensor=args.expert_tensor_parallel_size,
        ),
        options=engine_options(args, words),
        flags={name: given[name] for name in ("cache_mla_latents", "spec") if given[name]},
    )


def engine_options(args: argparse.Namespace, words: Sequence[str]) -> EngineOptions:
    """Return the sizes that the command line sets; the others have the engine's defaults.

    Raises ConfigError for a size below 1.
    """
    given = flags_of(words)
    sizes: dict[str, int] = {}
    for flag, (field, factor) in _SIZES.items():
        if flag in given:
            dest = _DESTS.get(flag, flag[2:].replace("-", "_"))
            value = int(vars(args)[dest] * factor)
            if value < 1:
                raise ConfigError(f"{flag} {vars(args)[dest]}: give a number above 0")
            sizes[field] = value
    return EngineOptions(**sizes, batch_invariant=args.inference_batch_invariant)


def engine_info(args: argparse.Namespace, writer: Writer) -> EngineInfo:
    """Return what the front end must know of the engine."""
    model, longest = writer.engine.model, writer.engine.options.max_sequence_length
    return EngineInfo(
        model=args.served_model_name or Path(args.load).resolve().name,
        tokenizer=dataclasses.asdict(writer.tokenizer_spec),
        vocab_size=model.vocab_size,
        max_sequence_length=min(longest or model.max_sequence_length, model.max_sequence_length),
        eod=model.eod,
        decoder_start=model.decoder_start,
        modules=tuple(args.import_module or ()),
    )


def flags_of(words: Sequence[str]) -> list[str]:
    """Return the flags on a command line."""
    return [word.partition("=")[0] for word in words if word.startswith("--")]


def warnings_of(words: Sequence[str]) -> list[str]:
    """Return a message for each kind of flag on the command line that has no effect here."""
    flags = flags_of(words)
    out = []
    of_requests = sorted({*flags} & {*_OF_REQUESTS})
    if of_requests:
        out.append(f"{', '.join(of_requests)}: without effect, each request has its own values")
    known = {*_OF_REQUESTS, *_READ, *_OWN, *_SIZES}
    others = sorted({*flags} - known)
    if others:
        out.append(
            f"{', '.join(others)}: without effect, model and tokenizer are those of the checkpoint"
        )
    return out


def add_server_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of the server to those of the model."""
    add_front_end_flags(parser)
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--inference-batch-invariant",
        action="store_true",
        help="same bits of tokens and log-probabilities in every batch",
    )
    group.add_argument("--max-batch-size", type=int, help="requests that run at the same time")
    ignored = parser.add_argument_group("ignored: each request sets these")
    ignored.add_argument("--temperature", type=float)
    ignored.add_argument("--top_k", type=int)
    ignored.add_argument("--top_p", type=float)
    ignored.add_argument("--num-tokens-to-generate", type=int)
    ignored.add_argument("--prompts", nargs="+")
    ignored.add_argument("--return-log-probs", action="store_true")
    return parser


if __name__ == "__main__":
    main()
