"""Command line, model, rows of data and errors of the programs of this folder.

The programs have the names and flags of Megatron-LM v0.14's, and do not need nvidia-modelopt.  Each
also takes the flags of pretrain_gpt.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import distributed as dist
from torch import nn

from megatron.core.config.errors import ConfigError, DataError, MegatronError
from megatron.core.datasets.conversations import Rows, open_rows
from megatron.core.optional import require
from megatron.core.progress import Progress
from megatron.inference.engine_flags import engine_options, generation_layout
from megatron.inference.llm import LLM
from megatron.training import get_model, initialize_megatron
from megatron.training.arguments.parser import GIVEN, parse_args
from megatron.training.arguments.sections import flags_and_defaults
from megatron.training.checkpointing import load_checkpoint
from megatron.training.checkpointing.model_folder_args import local_folder
from megatron.training.checkpointing.paths import open_checkpoint
from megatron.training.config.adapters import EAGLE_3
from megatron.training.initialize import fail, fail_before_start
from megatron.training.process.exit_report import exit_code
from megatron.training.process.rank_print import print_rank_0
from pretrain_gpt import model_provider

T = TypeVar("T")
# Weights are loaded in the precision of this run.
_OWN = (
    *("finetune", "no_load_optim", "no_load_rng", "load_main_params_from_ckpt"),
    *("use_checkpoint_args", "exit_on_missing_checkpoint"),
)
# Flags that `open_llm` and its callers read, besides the engine's flags.
_READ = frozenset(
    "load ckpt_step device tensor_model_parallel_size pipeline_model_parallel_size "
    "expert_model_parallel_size expert_tensor_parallel_size distributed_timeout_minutes seed "
    "chat_template finetune_hf_dataset finetune_data_split import_module use_checkpoint_args "
    "finetune".split()
)
_MODEL_PATH = "pretrained_model_path"
_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")  # of a data set of the Hugging Face hub


def run(main: Callable[[], None]) -> None:
    """Run a program; an error of the user ends it with one message."""
    try:
        main()
    except (MegatronError, OSError) as error:
        report = fail if dist.is_initialized() else fail_before_start
        report(error)
        raise SystemExit(exit_code(error)) from None


def parse(add: Callable[[argparse.ArgumentParser], object]) -> argparse.Namespace:
    """Parse the flags of pretrain_gpt.py and the flags that ``add`` adds.

    --pretrained-model-path, where a program has it, replaces --load.  Raises ConfigError.
    """

    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        add(parser)
        return parser

    args = parse_args(provider, args_defaults={"micro_batch_size": 1})
    folder = vars(args).get(_MODEL_PATH)
    if folder is not None and args.load is not None:
        raise ConfigError(
            f"--load {args.load} and --pretrained-model-path {folder} both name a model: leave one "
            "out"
        )
    if folder is None and args.load is None:
        other = " (or --pretrained-model-path)" if _MODEL_PATH in vars(args) else ""
        raise ConfigError(f"--load{other} is missing: give a checkpoint or a Hugging Face folder")
    flag = "--load" if folder is None else "--pretrained-model-path"
    args.load = local_folder(folder or args.load, flag)
    if not Path(args.load).exists():
        raise ConfigError(f"{flag} {args.load}: no such folder on this machine")
    return args


def add_model_path(group: argparse._ArgumentGroup) -> None:
    """Add --pretrained-model-path."""
    group.add_argument(
        "--pretrained-model-path",
        metavar="DIR",
        help="Hugging Face folder (or hf://org/name) to start from, in place of --load",
    )


def add_selection(group: argparse._ArgumentGroup, what: str) -> None:
    """Add the flags of `first` and `with_progress`; ``what``: the rows, for help."""
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")
    group.add_argument("--percentage", type=float, default=1.0, help=f"share of {what}, 0 to 1")


def only_weights(args: argparse.Namespace) -> None:
    """Let --load give the architecture and the weights, and nothing of its training."""
    vars(args).update(dict.fromkeys(_OWN, True))


def load_model(args: argparse.Namespace) -> list[nn.Module]:
    """Start the run of ``args``; return this rank's chunks of the model with the weights of --load.

    Collective over all ranks.
    """
    only_weights(args)
    initialize_megatron(parsed_args=args)
    model = get_model(model_provider, wrap_with_ddp=False)
    load_checkpoint(model, None, None)
    return model


def open_llm(
    args: argparse.Namespace, watch: ExitStack, written: str | None = None, **options: Any
) -> LLM:
    """Load --load, or ``written`` by this program, to generate in the layout of ``args``.

    --load determines model and tokenizer: flags that describe them are announced as without
    effect.  ``options`` replace options of the engine.  Collective over all ranks.
    """
    names = flags_and_defaults()
    given = [n for n in vars(args)[GIVEN] if n in names and not n.startswith("inference_")]
    others = sorted({names[name][0] for name in given if name not in _READ})
    if others and written is None:
        print_rank_0(
            f"WARNING: {', '.join(others)}: without effect, --load determines model and tokenizer"
        )
    return LLM.load(
        written or args.load,
        step=args.ckpt_step,
        device_kind=args.device,
        layout=generation_layout(args),
        options=dataclasses.replace(engine_options(args), **options),
        watch=watch,
    )


def split_paths(name: str, split: str, flag: str) -> list[str]:
    """Return the files or folders that hold ``split`` of a data set.

    ``name`` is a file of JSON lines, a folder of `datasets.save_to_disk`, a folder of files whose
    names begin with the split, or a data set of the Hugging Face hub.  Raises DataError.
    """
    path = Path(name)
    if not path.exists():
        if not _NAME.fullmatch(name):
            raise DataError(f"{flag} {name}: no such file or folder on this machine")
        path = _download(name, split, flag)
    if (path / split).is_dir():
        return [str(path / split)]
    folders = (path, path / "data", path / "all")
    files = (f for folder in folders for f in folder.glob(f"{split}[-._]*") if f.is_file())
    found = sorted(map(str, files))
    if found:
        return found
    if split != "train":
        raise DataError(f"{flag} {name}: no split {split}: no folder and no file of that name")
    return [str(path)]


def rows_of(name: str, split: str, flag: str) -> list[Rows]:
    """Return the rows of a split, see `split_paths`."""
    return [open_rows(path) for path in split_paths(name, split, flag)]


def _download(name: str, split: str, flag: str) -> Path:
    """Return a folder with the files of a split of a data set of the hub.  Raises DataError."""
    hub = require("huggingface_hub", f"{flag} {name} is no file or folder here; to download it")
    patterns = [f"*{split}*.{ending}" for ending in ("parquet", "jsonl", "json")]
    try:
        get = partial(hub.snapshot_download, repo_type="dataset", allow_patterns=patterns)
        return Path(get(name))
    except Exception as error:  # the library raises its HTTP client's exceptions too
        raise DataError(
            f"{flag} {name} is no file or folder here, and the Hugging Face hub did not give it: "
            f"{str(error).splitlines()[0]}"
        ) from None


def first(items: Sequence[Any], part: float) -> Sequence[Any]:
    """Return the first ``part`` (--percentage, 0 to 1) of ``items``, but at least one."""
    if not 0 < part <= 1:
        raise ConfigError(f"--percentage {part}: give a number above 0 and at most 1")
    return items[: max(1, round(part * len(items)))]


def with_progress(items: Sequence[T], unit: str, args: argparse.Namespace) -> Iterator[T]:
    """Yield ``items`` and show on a terminal how many are done, unless --disable-tqdm is given."""
    with nullcontext() if args.disable_tqdm else Progress("generating", len(items), unit) as shown:
        for item in items:
            yield item
            if shown is not None:
                shown.add()


def draft_options(args: argparse.Namespace, length: int) -> dict[str, object]:
    """Return the options of an engine that drafts ``length`` tokens in a step.

    The model's draft heads draft, or else its layers for multi-token prediction, unless
    --inference-draft-model is given.
    """
    if length < 0:
        raise ConfigError(f"{length} draft tokens: give 0 or more")
    if not length:
        return {}
    kind = args.inference_draft_model
    if "inference_draft_model" not in vars(args)[GIVEN]:
        asked = open_checkpoint(args.load, args.ckpt_step).asked
        is_eagle = (
            asked.get("export_num_eagle_layers") and asked["export_eagle_algorithm"] == EAGLE_3
        )
        kind = "heads" if asked.get("export_num_medusa_heads") or is_eagle else "mtp"
    return {"num_draft_tokens": length, "draft_model": kind}
