"""The checkpoint that a conversion reads, and what it is asked for."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointError, ConfigError, MegatronError
from megatron.core.config.value_types import Arguments, JsonObject
from megatron.core.dist_checkpointing.formats import HUGGING_FACE, format_of, open_reader
from megatron.core.dist_checkpointing.key_names import is_vocabulary
from megatron.core.dist_checkpointing.manifest import TRUE_VOCAB_SIZE, Common, Layout
from megatron.core.dist_checkpointing.records import OPTIMIZER_PREFIX
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.models.multimodal.llava_model import IMAGE_TOKEN
from megatron.training.arguments.parser import build_parser
from megatron.training.arguments.resolve import resolve
from megatron.training.arguments.sections import flags_and_defaults
from megatron.training.checkpointing.checkpoint_args import (
    FORCED,
    FORCED_PREFIXES,
    IF_UNSET,
    saved_namespace,
)
from megatron.training.checkpointing.paths import open_checkpoint
from megatron.training.config.run import RunConfig
from megatron.training.conversion import hf_folder
from megatron.training.conversion.lazy import first_rows
from megatron.training.models.registry import model_kind
from megatron.training.tokenizer import (
    MegatronTokenizer,
    TokenizerSpec,
    create_tokenizer,
    pad_vocab_size,
)

HF = "hf"
PEFT = "peft"
_WINDOWS = 16  # rows of --report-text
_WINDOW = 256  # tokens of a row
BESIDE = "huggingface"  # folder next to iter_*: config.json, tokenizer, generation config
EMBEDDING = "embedding.word_embeddings.weight"
# Arguments that define a model, besides those of --use-checkpoint-args; values that every run
# needs to be resolved.
_MORE = (
    "bias_gelu_fusion bias_swiglu_fusion tokenizer_model encoder_num_layers reward_model".split()
)
TO_RESOLVE = {"skip_train": True, "micro_batch_size": 1, "transformer_impl": "local"}
_PIPELINE = "pipeline_model_parallel_size"
# Arguments that split the layers over the pipeline stages of one pipeline size.
STAGE_FLAGS = (
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("pipeline_model_parallel_layout", "pipeline_split", "pipeline_schedule"),
)
# Values that Megatron-LM's formats store even where they were derived from these.
_DERIVED_FROM_STAGES = (
    *("virtual_pipeline_model_parallel_size", "microbatch_group_size_per_vp_stage"),
    "encoder_pipeline_model_parallel_size",
)


@dataclass(frozen=True, kw_only=True)
class ConversionRequest:
    """Options of one conversion, from the command line."""

    source: Path
    target: Path
    format: str
    family: str | None = None
    dtype: torch.dtype | None = None  # None: unchanged
    vocab_size: int | None = None  # number of tokens, if the embedding has padding
    args: Arguments = field(default_factory=dict)  # dest -> value, replaces saved arguments
    step: int | None = None
    base: Path | None = None  # of adapters; None: where their checkpoint says
    beside: Path | None = None  # folder of config.json and tokenizer; None: with the checkpoint
    kind: str | None = None  # refuse a model of another kind
    is_release: bool = False  # write weights only, without training state
    verify: bool = True
    max_shard_bytes: int | None = None
    quant: str | None = None  # recipe of quantized linear layers
    quant_form: str = "compressed-tensors"
    report_text: Path | None = None  # for the perplexity before and after
    rename: Callable[[str], str | None] | None = None  # key -> new key, or None to omit it


@dataclass(frozen=True, kw_only=True)
class Source:
    """Checkpoint to convert: tensors by global name, and all its other content."""

    tensors: Mapping[str, LazyTensor]
    args: Arguments
    common: Common
    layout: Layout
    rank_states: Mapping[int, JsonObject] = field(default_factory=dict)
    beside: Path | None = None  # folder with config.json, tokenizer and similar

    @property
    def weights(self) -> dict[str, LazyTensor]:
        """Return the tensors without those of the optimizer."""
        return {k: t for k, t in self.tensors.items() if not k.startswith(OPTIMIZER_PREFIX)}

    def only(self, tensors: Mapping[str, LazyTensor]) -> Source:
        """Return the source with these tensors and without training state."""
        return replace(self, tensors=tensors, common={}, rank_states={}, layout={})


def default_args() -> JsonObject:
    """Return the default of each flag, dest -> value, and what every run needs."""
    return vars(build_parser().parse_args([])) | TO_RESOLVE


def read_source(wanted: ConversionRequest) -> Source:
    """Open a checkpoint of one of `FORMATS`; each tensor is read from disk when it is used."""
    content = open_checkpoint(wanted.source, wanted.step)
    reader = open_reader(content.folder)
    tensors = {
        key: LazyTensor(key, stored.dtype, stored.shape, partial(reader.read, key))
        for key, stored in reader.tensors.items()
    }
    kind = content.asked.get("model_kind")
    ranks = math.prod(size for _, size in content.manifest.layout.get("dense", []))
    states = {rank: reader.rank_state(rank) for rank in range(ranks)}
    is_theirs = format_of(content.folder) == HUGGING_FACE
    beside = content.folder if is_theirs else content.folder.parent / BESIDE
    beside = wanted.beside or beside
    model = content.asked.get("tokenizer_model")
    if not beside.is_dir() and isinstance(model, str) and hf_folder.has_tokenizer(Path(model)):
        beside = Path(model)  # the checkpoint chose this path: only a tokenizer is read
    return Source(
        tensors=tensors,
        args={**content.asked, "model_kind": kind or kind_of(tensors)},
        common=content.common,
        layout=content.manifest.layout,
        rank_states={rank: state for rank, state in states.items() if state is not None},
        beside=beside if beside.is_dir() else None,
    )


# Substring of names that only one model kind has; Megatron-LM does not store the kind.
_KINDS = {".mixer.": "mamba", ".cross_attention.": "t5", "encoder.layers.": "bert"}


def kind_of(names: Collection[str]) -> str:
    return next((k for part, k in _KINDS.items() if any(part in name for name in names)), "gpt")


def run_config(args: Arguments, tp: int = 1, pp: int = 1, ep: int = 1) -> RunConfig:
    """Resolve the model and tokenizer arguments of a saved run, for these parallel sizes.

    With ``pp`` above 1, the arguments that split the layers over stages count as well; all others
    are ignored.  Raises ConfigError if the arguments request something that is not implemented, or
    if the model does not support these sizes.
    """
    names = {*FORCED, *IF_UNSET, *_MORE, *(n for n in args if n.startswith(FORCED_PREFIXES))}
    names |= set(STAGE_FLAGS if pp > 1 else ())
    described = {name: args[name] for name in names if args.get(name) is not None}
    path = described.pop("heterogeneous_layers_config_path", None)  # never opened
    if path and not described.get("heterogeneous_layers_config_encoded_json"):
        raise CheckpointError(
            f"the checkpoint was saved with --heterogeneous-layers-config-path {path} and does not "
            "hold the text of that file: load it with this flag and save it once"
        )
    namespace = saved_namespace(described | TO_RESOLVE)
    vars(namespace).update(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1 if ep > 1 else None,
        sequence_parallel=tp > 1 and bool(described.get("num_experts")),
    )
    return resolve(namespace, tp * pp * ep)


def with_changes(stored: Arguments, changes: Arguments, say: Callable[[str], None]) -> JsonObject:
    """Return the arguments of a saved run with ``changes``.

    With another pipeline size, the arguments that split the layers for the saved one are dropped,
    which splits them evenly; ``say`` receives those that had an effect.  Raises ConfigError if the
    layers cannot be split evenly.
    """
    pp = changes.get(_PIPELINE)
    num_layers = stored.get("num_layers")
    if pp is None or pp == (stored.get(_PIPELINE) or 1):
        return {**stored, **changes}
    has_encoder = model_kind(stored.get("model_kind") or "gpt").has_encoder
    if not has_encoder and num_layers and (pp < 1 or num_layers % pp):
        raise ConfigError(
            f"pipeline-parallel size {pp}: the {num_layers} layers of the checkpoint cannot be "
            f"split evenly over {pp} stages: give a size that divides {num_layers}"
        )
    known = [(name, *flags_and_defaults()[name]) for name in STAGE_FLAGS if name in stored]
    given = [flag for name, flag, default in known if stored[name] != default]
    if given:
        say(f"the layers are split evenly over {pp} stages, without {', '.join(given)}")
    dropped = (*STAGE_FLAGS, *_DERIVED_FROM_STAGES)
    return {**{n: v for n, v in stored.items() if n not in dropped}, **changes}


def layout_of(args: Arguments) -> dict[str, int]:
    words = {"tp": "tensor", "pp": "pipeline", "ep": "expert"}
    sizes = {axis: args.get(f"{word}_model_parallel_size") for axis, word in words.items()}
    return {axis: size for axis, size in sizes.items() if size is not None}


def config_beside(folder: Path | None) -> JsonObject:
    """Return the config.json that was saved with the model in ``folder``, or {}."""
    if folder is None or not (folder / hf_folder.CONFIG).exists():
        return {}
    return hf_folder.read_config(folder)


def vocab_size_of(source: Source, wanted: ConversionRequest) -> int:
    """Return the number of embedding rows that are tokens; the other rows are padding.

    This is ``wanted.vocab_size`` if given, else the size that the checkpoint stores, else the
    tokenizer's size if padding it by --make-vocab-size-divisible-by gives the number of rows, else
    all rows.
    """
    rows = embedding_of(source.tensors).shape[0]
    if wanted.vocab_size is not None:
        return wanted.vocab_size
    args = source.args
    if args.get("pad_vocab_in_loss"):
        return rows
    if args.get(TRUE_VOCAB_SIZE):
        return min(int(args[TRUE_VOCAB_SIZE]), rows)
    tokenizer = _tokenizer(TokenizerSpec.of(argparse.Namespace(**args)))
    if tokenizer is None:
        return rows
    tokens = tokenizer.vocab_size
    multiple = args["make_vocab_size_divisible_by"]
    tp = args["tensor_model_parallel_size"]
    return tokens if pad_vocab_size(tokens, multiple, tp) == rows else rows


def text_of(source: Source, path: Path) -> Tensor:
    """Return the first tokens of a text file, in at most `_WINDOWS` rows [b, s]."""
    tokenizer = create_tokenizer(TokenizerSpec.of(argparse.Namespace(**source.args)))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"--report-text {path} cannot be read: {error}") from None
    ids = torch.tensor(tokenizer.tokenize(text)[: _WINDOWS * _WINDOW])
    length = min(_WINDOW, source.args.get("max_position_embeddings") or _WINDOW)
    if len(ids) <= length:
        raise CheckpointError(
            f"--report-text {path} has {len(ids)} tokens: more than {length} are needed"
        )
    return ids[: len(ids) // length * length].view(-1, length)


def without_padding(source: Source, wanted: ConversionRequest) -> Source:
    """Remove the rows of vocabulary padding, which only Megatron-LM's formats store.

    Adapters alone come from PEFT, which has no padding.
    """
    has_embedding = any(name.endswith(EMBEDDING) for name in source.tensors)
    if not has_embedding or source.args.get("pad_vocab_in_loss"):
        return source
    vocab_size = vocab_size_of(source, wanted)
    tensors = {
        name: first_rows(tensor, vocab_size) if is_vocabulary(name) else tensor
        for name, tensor in source.tensors.items()
    }
    return replace(source, tensors=tensors)


def embedding_of(tensors: Mapping[str, LazyTensor]) -> LazyTensor:
    """Return the embedding of words, which may be that of a part of the model."""
    return next(tensor for name, tensor in tensors.items() if name.endswith(EMBEDDING))


def special_ids(config: RunConfig) -> dict[str, int | None]:
    """Return the tokenizer's bos, eos and pad ids under config.json's names; None if unknown."""
    names = ("bos", "eos", "pad")
    spec = TokenizerSpec.of(config.tokenizer)
    tokenizer = None if spec.tokenizer_type in (None, "NullTokenizer") else _tokenizer(spec)
    return {f"{name}_token_id": tokenizer.id_of(name) if tokenizer else None for name in names}


def _tokenizer(spec: TokenizerSpec) -> MegatronTokenizer | None:
    try:
        return create_tokenizer(spec)
    except (MegatronError, OSError):  # its files may be on another machine
        return None


def image_token(config: RunConfig) -> int:
    """Return the id of the tokenizer's token for an image."""
    tokenizer = create_tokenizer(TokenizerSpec.of(config.tokenizer))
    try:
        ids = tokenizer.tokenize(IMAGE_TOKEN)
    except MegatronError:
        ids = []
    if len(ids) != 1:
        raise CheckpointError(
            f"the tokenizer has no token {IMAGE_TOKEN}, whose id config.json needs: give "
            "--tokenizer-model with one, or put a config.json into the checkpoint's folder "
            "huggingface"
        )
    return int(ids[0])
