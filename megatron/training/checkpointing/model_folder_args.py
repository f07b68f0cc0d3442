"""Set the command line of a run that starts from a Hugging Face folder.

The folder determines the model and the tokenizer.  Flags that a user has to give for a checkpoint
have defaults here, which rank 0 prints.  Runs on every rank alike, before the command line is
checked and before a process group exists.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import device, optional
from megatron.core.config.errors import CheckpointError, ConfigError
from megatron.core.config.value_types import Arguments
from megatron.core.dist_checkpointing.formats import HUGGING_FACE, format_of, open_reader
from megatron.core.dist_checkpointing.key_names import is_vocabulary
from megatron.training.arguments.parser import GIVEN, OF_PROGRAM
from megatron.training.arguments.sections import flags_and_defaults
from megatron.training.checkpointing.checkpoint_args import (
    FORCED,
    FORCED_PREFIXES,
    IF_UNSET,
    check_kind,
    compare_models,
    saved_namespace,
)
from megatron.training.checkpointing.paths import check_common, find, is_same_directory
from megatron.training.config.adapters import HEADS
from megatron.training.config.preference import reads_conversations
from megatron.training.config.run import data_parallel_size
from megatron.training.process.rank_print import print_flags
from megatron.training.tokenizer import MegatronTokenizer, TokenizerSpec, create_tokenizer

_HUB = "hf://"
_NAME = re.compile(r"([\w.-]+)/[\w.-]+(@[\w./-]+)?")
_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*"]
_FOLDERS = ("load", "pretrained_checkpoint", "export_kd_teacher_load")
_TOKENIZER = (
    *("tokenizer_type", "tokenizer_model", "vocab_size", "padded_vocab_size", "pad_vocab_in_loss"),
    *("vocab_extra_ids", "vocab_file", "merge_file", "tiktoken_pattern"),
)
_LONGEST_ROW = 4096  # default of --seq-length, unless the model's is shorter
_BATCH = 8  # least default of --global-batch-size
# Objective -> default learning rate, of all weights and of adapters.
_RATES = {"preference": (1e-6, 1e-5), "reward": (1e-5, 1e-4), "other": (1e-5, 1e-4)}


def local_folder(directory: str, flag: str, *, may_be_new: bool = False) -> str:
    """Return ``directory``, or the local copy of the model of the hub that it names.

    ``hf://org/name`` names a model, as ``org/name`` does if there is no folder ``org``; a revision
    follows ``@``.  ``may_be_new``: a missing folder is not looked up without ``hf://``.  Raises
    CheckpointError if the hub does not give it.
    """
    name = directory.removeprefix(_HUB)
    if name == directory:
        found = _NAME.fullmatch(name)
        is_local = found is None or Path(found[1]).exists() or may_be_new
        if is_local or not optional.available("huggingface_hub"):
            return directory
    hub = optional.require("huggingface_hub", f"{flag} {directory}")
    model, _, revision = name.partition("@")
    try:
        get = partial(hub.snapshot_download, model, revision=revision or None)
        folder = Path(get(allow_patterns=_FILES))
        if not any(folder.glob("*.safetensors")):
            get(allow_patterns=["pytorch_model*.bin*"])
        return str(folder)
    except Exception as error:  # the library raises those of its HTTP client too
        raise CheckpointError(
            f"{flag} {directory} is no folder here, and the Hugging Face hub did not give it: "
            f"{str(error).splitlines()[0]}"
        ) from None


def start_from_model_folder(namespace: Namespace, world_size: int, *, trains: bool) -> None:
    """Set, in place, what the Hugging Face folder of --load or --pretrained-checkpoint determines.

    Names of the hub become folders first.  Raises ConfigError that lists every flag which describes
    another model than the folder, CheckpointError for a folder that cannot be read.
    """
    values = vars(namespace)
    for name in _FOLDERS:
        directory = values.get(name)
        if directory is not None:
            may_be_new = is_same_directory(directory, values["save"])
            flag = flags_and_defaults()[name][0]
            values[name] = local_folder(directory, flag, may_be_new=may_be_new)
    folder = _model_folder(namespace)
    if folder is None:
        return
    with open_reader(folder) as reader:
        asked = check_common(reader.common(), folder)["args"]
        rows = {tensor.shape[0] for key, tensor in reader.tensors.items() if is_vocabulary(key)}
    check_kind(asked, values.get("model_kind"))
    defaults = vars(saved_namespace({}))
    of_program = values.get(OF_PROGRAM, ())
    given = {name: values[name] for name in _given(values, defaults) if name in values}
    # A run may quantize the folder's model, or add heads to it.
    quantized = "export_quant_cfg", "kitchen_config_file", "export_kv_cache_quant"
    own = (*_TOKENIZER, *HEADS, *quantized)
    _check_model({n: v for n, v in given.items() if n not in own}, asked, folder)
    chosen: dict[str, Any] = {
        name: value
        for name, value in asked.items()
        if (name in (*FORCED, *IF_UNSET) or name.startswith(FORCED_PREFIXES))
        and name not in _TOKENIZER
        and name not in of_program
        and value is not None
    }
    if trains:
        longest = asked.get("seq_length") or _LONGEST_ROW
        chosen["seq_length"] = min(longest, _LONGEST_ROW)
    if "encoder_seq_length" in given:
        chosen.pop("seq_length", None)
    _set(values, chosen, given, f"the model of {folder}")
    _set_tokenizer(namespace, given, asked, max(rows, default=None), folder)
    if trains:
        _set(values, _usual_settings(namespace, given, asked, world_size), given, "flags not given")


def _given(values: Arguments, defaults: Arguments) -> Iterable[str]:
    """Return the dests that the user has set; without a command line, those that differ."""
    differ = (name for name, value in values.items() if value != defaults.get(name, value))
    given: Iterable[str] = values.get(GIVEN, differ)
    return given


def _model_folder(namespace: Namespace) -> Path | None:
    """Return the Hugging Face folder that the run starts from, or None."""
    for directory in (namespace.load, namespace.pretrained_checkpoint):
        try:
            choice = find(directory, namespace.ckpt_step, lenient=True)
        except (CheckpointError, OSError):
            if any(Path(directory).glob("*.safetensors")):
                raise
            continue  # it is a checkpoint, and loading reports the error
        if choice is not None and format_of(choice.found.folder) == HUGGING_FACE:
            return choice.found.folder
    return None


def _check_model(given: Arguments, asked: Arguments, folder: Path) -> None:
    """Raise ConfigError if flags describe another model than ``folder``; list all of them."""
    found = compare_models(asked, {**asked, **given}, is_finetuning=True)
    problems = [*found.refused, *found.shown]
    if problems:
        lines = [line.replace(" in the checkpoint", " in the folder") for line in problems]
        raise ConfigError(
            f"{folder} is another model than the command line describes; leave these flags out:"
            + "".join(f"\n  - {line}" for line in lines)
        )


def _set(values: dict[str, Any], chosen: Arguments, given: Arguments, what: str) -> None:
    """Set the values that are not given, and print their flags."""
    words = []
    for name, value in chosen.items():
        if name in given or name not in values or values[name] == value:
            continue
        values[name] = value
        words.append(flags_and_defaults()[name][0])
        if isinstance(value, list | tuple):
            words.append(",".join(map(str, value)))
        elif not isinstance(value, bool):
            words.append(str(value))
    if words:
        print_flags(what, words)


def _set_tokenizer(
    namespace: Namespace, given: Arguments, asked: Arguments, rows: int | None, folder: Path
) -> None:
    """Set the tokenizer to that of ``folder``, or check the given one.

    Raises ConfigError if the embedding of ``rows`` has other tokens than the tokenizer.
    """
    values = vars(namespace)
    if rows is None:
        return
    files = [n for n in ("tokenizer_model", "vocab_file", "merge_file") if values.get(n)]
    own = {name: asked[name] for name in _TOKENIZER if asked.get(name) is not None}
    if not files and "tokenizer_type" not in given:
        if own["tokenizer_type"] == "NullTokenizer" and reads_conversations(namespace):
            raise ConfigError(
                f"{folder} has no tokenizer that is known here: give --tokenizer-model with its "
                "folder, or another --tokenizer-type with its files"
            )
        _set(
            values, own, {n: v for n, v in given.items() if n != "tokenizer_type"}, "its tokenizer"
        )
        return
    if files == ["tokenizer_model"] and "tokenizer_type" not in given:
        values["tokenizer_type"] = "HuggingFaceTokenizer"
    tokenizer = create_tokenizer(TokenizerSpec.of(namespace))
    what = f"the tokenizer {' '.join(str(values[n]) for n in files) or values['tokenizer_type']}"
    if tokenizer.vocab_size > rows:
        raise ConfigError(
            f"{what} has {tokenizer.vocab_size} tokens, and the embedding of {folder} has {rows}: "
            "leave it out to use that of the folder"
        )
    if own["tokenizer_type"] == values["tokenizer_type"] == "HuggingFaceTokenizer":
        spec = TokenizerSpec(tokenizer_type=own["tokenizer_type"], tokenizer_model=str(folder))
        _check_tokens(what, tokenizer, create_tokenizer(spec), folder)
    if tokenizer.vocab_size < rows:
        _set(values, {"padded_vocab_size": rows, "pad_vocab_in_loss": True}, given, what)


def _check_tokens(
    what: str, mine: MegatronTokenizer, theirs: MegatronTokenizer, folder: Path
) -> None:
    """Raise ConfigError if ids of both tokenizers are different tokens."""
    of_id = {index: token for token, index in theirs.vocab.items()}
    wrong = [token for token, index in mine.vocab.items() if of_id.get(index, token) != token]
    if wrong:
        index = mine.vocab[wrong[0]]
        raise ConfigError(
            f"{what} is another one than that of {folder}: {len(wrong)} of its "
            f"{len(mine.vocab)} ids are other tokens, such as {index}, {wrong[0]!r} instead of "
            f"{of_id[index]!r}: leave it out to use that of the folder"
        )


def _usual_settings(
    namespace: Namespace, given: Arguments, asked: Arguments, world_size: int
) -> dict[str, object]:
    """Return the defaults of a run that tunes a model: dest -> value."""
    out: dict[str, object] = {}
    if device.selects_gpu(namespace.device) and not namespace.fp16:
        out["bf16"] = bool(asked.get("bf16") or asked.get("fp16"))
    if not (reads_conversations(namespace) or namespace.export_kd_teacher_load):
        return out
    kind = "reward" if namespace.reward_model else "other"
    kind = kind if namespace.dpo_beta is None else "preference"
    micro = namespace.micro_batch_size or 1
    sizes = namespace.tensor_model_parallel_size, namespace.pipeline_model_parallel_size
    checked = namespace.check_world_size if namespace.check_only else None
    ranks = namespace.virtual_ranks or checked or world_size
    step = micro * data_parallel_size(ranks, *sizes, namespace.context_parallel_size)
    out |= {
        "micro_batch_size": micro,
        "global_batch_size": -(-_BATCH // step) * step,
        "lr": _RATES[kind][namespace.lora_rank is not None],
        "log_interval": 1,
    }
    if reads_conversations(namespace):
        if namespace.train_iters is None and namespace.train_samples is None:
            out["epochs"] = 3.0 if kind == "other" else 1.0
        if namespace.data_path is not None:
            out["split"] = "95,5,0"
        if "eval_iters" not in given:
            out["full_validation"] = True
    if namespace.save is not None:
        out["save_interval"] = 500
    return out
