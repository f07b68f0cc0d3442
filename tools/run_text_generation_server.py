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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config.errors import ConfigError, LaunchError, MegatronError
from megatron.core.inference.grammar import Grammars
from megatron.core.optional import available
from megatron.inference.engine_flags import engine_options, generation_layout
from megatron.inference.generation import Writer, open_writer
from megatron.inference.server.engine_link import EngineInfo
from megatron.training.arguments.argument_parser import Parser
from megatron.training.arguments.parser import parse_args
from megatron.training.initialize import shut_down
from megatron.training.process.exit_report import exit_code
from megatron.training.process.rank_print import is_rank0
from megatron.training.process.signals import end_with_launcher
from megatron.training.tokenizer.fast import token_bytes
from tools.lib.front_end_process import FrontEndProcess, add_front_end_flags, start_worker

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
    "--distributed-timeout-minutes",
    "--import-module",
    "--spec",
    "--cache-mla-latents",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
    "--use-checkpoint-args",
    "--config",
    "--max-tokens-to-oom",
    "--no-inference-prefix-cache",
    "--port",
    "--host",
    "--api-key-file",
    "--chat-template",
    "--allowed-local-media-path",
    "--served-model-name",
    "--tool-call-parser",
    "--reasoning-parser",
    "--max-batch-size",
    "--lora-modules",
    "--allow-runtime-lora-updating",
    "--embedding-pooling",
)
_OWN_TOKENIZER = "--no-use-tokenizer-model-from-checkpoint-args"
_TOKENIZER = (
    _OWN_TOKENIZER,
    "--tokenizer-type",
    "--tokenizer-model",
    "--vocab-file",
    "--merge-file",
)
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def main() -> None:
    """Serve --load until SIGTERM."""
    try:
        args = parse_args(add_server_flags)
        if args.load is None:
            raise ConfigError("--load is missing: give the directory that training saved to")
        end_with_launcher()
        if is_rank0():
            serve(args, sys.argv[1:])
        else:
            follow(args)
    except (MegatronError, OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(exit_code(error))


def serve(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Start the front end, load the model and serve.  For rank 0."""
    for warning in warnings_of(words):
        print(f"WARNING: {warning}", flush=True)
    front_end = FrontEndProcess(
        args.host,
        args.port,
        api_key_file=args.api_key_file,
        chat_template=args.chat_template,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        allowed_local_media_path=args.allowed_local_media_path,
        max_api_tokens=args.max_tokens_to_oom,
    )
    adapters = adapters_of(args)
    try:
        with ExitStack() as watch:
            writer = open_engine(args, watch)
            features = ["grammar"] if add_grammars(writer, watch) else []
            if may_control(args):
                features.append("control")  # a client names a directory to read
                features += ["runtime_adapters"] * args.allow_runtime_lora_updating
            for name, folder in adapters.items():
                writer.engine.load_adapter(name, folder)
            info = engine_info(args, writer, tuple(features), adapters)
            print(writer.engine.describe(), flush=True)
            status = front_end.serve(writer.engine, info, explain=writer.explain)
            if status:
                raise LaunchError(why_ended(status))
            writer.engine.close()
    finally:
        front_end.close()
    shut_down()


def why_ended(status: int) -> str:
    """Return why the front end has ended with ``status``, which is not 0."""
    if status > 0:
        return f"the HTTP front end has ended with status {status}; its message is above"
    return (
        f"the HTTP front end has been killed by {signal.Signals(-status).name}; clients have lost "
        "their connections: start the server again"
    )


def follow(args: argparse.Namespace) -> None:
    """Execute the steps that rank 0 plans, until it ends."""
    with ExitStack() as watch:
        writer = open_engine(args, watch)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # rank 0 first answers its open requests
        writer.engine.follow()
    shut_down()


def open_engine(args: argparse.Namespace, watch: ExitStack) -> Writer:
    """Build the engine of the checkpoint; until ``watch`` closes, a rank that fails ends all.

    Collective over all ranks.
    """
    options = engine_options(args)
    options = dataclasses.replace(options, timeout_s=60.0 * args.distributed_timeout_minutes)
    if args.max_batch_size is not None:
        options = dataclasses.replace(options, max_requests=args.max_batch_size)
    return open_writer(
        args.load,
        step=args.ckpt_step,
        device_kind=args.device,
        layout=generation_layout(args),
        options=options,
        flags=model_flags(args),
        watch=watch,
    )


def model_flags(args: argparse.Namespace) -> dict[str, object]:
    """Return the flags, dest -> value, that replace those of the checkpoint.

    With --no-use-tokenizer-model-from-checkpoint-args these are those of the tokenizer, whose files
    may be at another place now.
    """
    names = ["cache_mla_latents", "spec"]
    if not args.use_tokenizer_model_from_checkpoint_args:
        names += ["tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"]
    return {name: vars(args)[name] for name in names if vars(args)[name]}


def add_grammars(writer: Writer, watch: ExitStack) -> bool:
    """Let the engine follow grammars until ``watch`` closes; return whether it can.

    It cannot without llguidance, or if the texts of the tokenizer are not its tokens' bytes.
    """
    tokens = token_bytes(writer.tokenizer)
    eod = writer.engine.model.eod
    if tokens is None or eod is None or not available("llguidance"):
        return False
    grammars = Grammars(tokens, eod, start_worker)
    watch.callback(grammars.close)
    writer.engine.make_matcher = grammars.matcher
    return True


def adapters_of(args: argparse.Namespace) -> dict[str, str]:
    """Return the adapters of --lora-modules, name -> folder.  Raises ConfigError."""
    pairs = [word.partition("=") for word in args.lora_modules]
    names = [name for name, _, _ in pairs]
    own = args.served_model_name or Path(args.load).resolve().name
    problems = []
    for (name, _, folder), word in zip(pairs, args.lora_modules, strict=True):
        if not name or not folder:
            problems.append(f"--lora-modules {word}: give NAME=FOLDER")
        elif name == own or names.count(name) > 1:
            problems.append(f"--lora-modules {word}: {name} is the name of another model")
    if args.allow_runtime_lora_updating and not may_control(args):
        problems.append(
            "--allow-runtime-lora-updating lets clients name folders to read: with --host "
            f"{args.host} give --api-key-file"
        )
    ConfigError.raise_for(problems)
    return {name: folder for name, _, folder in pairs}


def may_control(args: argparse.Namespace) -> bool:
    """Return whether clients may name directories to read, and pause the engine."""
    return args.api_key_file is not None or args.host in _LOOPBACK


def engine_info(
    args: argparse.Namespace,
    writer: Writer,
    features: tuple[str, ...],
    adapters: Mapping[str, str],
) -> EngineInfo:
    """Return what the front end must know of the engine."""
    model = writer.engine.model
    images = writer.image_prompts
    return EngineInfo(
        model=args.served_model_name or Path(args.load).resolve().name,
        tokenizer=dataclasses.asdict(writer.tokenizer_spec),
        vocab_size=model.vocab_size,
        max_sequence_length=writer.engine.limits.max_sequence_length,
        eod=model.eod,
        decoder_start=model.decoder_start,
        modules=tuple(args.import_module or ()),
        features=features,
        images=None if images is None else dataclasses.asdict(images.input),
        adapters=adapters,
        vector_size=model.config.hidden_size,
        pooling=args.embedding_pooling,
    )


def warnings_of(words: Sequence[str]) -> list[str]:
    """Return a message for each kind of flag on the command line that has no effect here."""
    of_tokenizer = _TOKENIZER if _OWN_TOKENIZER in words else ()
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    out = []
    of_requests = sorted({*flags} & {*_OF_REQUESTS})
    if of_requests:
        out.append(f"{', '.join(of_requests)}: without effect, each request has its own values")
    flags = [flag for flag in flags if not flag.startswith("--inference-")]
    others = sorted({*flags} - {*_OF_REQUESTS, *_READ, "--yaml-cfg", *of_tokenizer})
    if others:
        out.append(
            f"{', '.join(others)}: without effect, model and tokenizer are those of the checkpoint"
        )
    return out


def add_server_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of the server to those of the model."""
    if isinstance(parser, Parser):
        parser.flags_of_tool = [f for f in _READ if f in parser._option_string_actions]
    add_front_end_flags(parser)
    group = parser.add_argument_group("engine")
    group.add_argument("--max-batch-size", type=int, help="requests that run at the same time")
    group.add_argument(
        "--lora-modules",
        nargs="+",
        default=[],
        metavar="NAME=FOLDER",
        help="adapters that requests can name as their model: folders of PEFT, or checkpoints of "
        "--lora-rank",
    )
    group.add_argument(
        "--allow-runtime-lora-updating",
        action="store_true",
        help="let clients load and unload adapters, from any folder that this process can read",
    )
    group.add_argument(
        "--embedding-pooling",
        choices=("last", "mean"),
        default="last",
        help="vectors of texts are the last hidden state of the last token, or their mean",
    )
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
