"""Convert a checkpoint from one format to another.

Between the formats of `FORMATS` everything is converted: weights, optimizer, counters, scheduler.
From and to Hugging Face, only the weights and the description of the model are.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from megatron.core.config.errors import CheckpointError, MegatronError
from megatron.core.dist_checkpointing.folders import TRACKER
from megatron.core.dist_checkpointing.formats import FORMATS, open_reader
from megatron.core.dist_checkpointing.mapping import OPTIMIZER_PREFIX, LazyPiece, ShardedTensor
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.dist_checkpointing.serialization import Contents, begin, conclude, publish, write
from megatron.core.dist_checkpointing.validation import AMAX_HISTORY
from megatron.core.dist_checkpointing.value_types import Arguments, Common, JsonObject, Layout
from megatron.training.arguments.flat_values import flat_values
from megatron.training.arguments.parser import build_parser
from megatron.training.arguments.resolve import resolve
from megatron.training.checkpointing.checkpoint_args import (
    FORCED,
    FORCED_PREFIXES,
    IF_UNSET,
    saved_namespace,
)
from megatron.training.checkpointing.paths import find, open_checkpoint
from megatron.training.checkpointing.save import CHECKPOINT_VERSION, plain
from megatron.training.config.run import RunConfig
from megatron.training.conversion import hf, hf_folder
from megatron.training.conversion.family import Config, Family
from megatron.training.conversion.lazy import made_ahead
from megatron.training.conversion.shape import ModelShape, args_of, shape_of
from megatron.training.conversion.special_tokens import special_ids
from megatron.training.conversion.target_format import check_format
from megatron.training.conversion.verify import compare_logits
from megatron.training.conversion.vision_language import (
    VisionLanguageShape,
    check_encoder,
    config_of,
    flags_of,
    is_vision_language,
    shape_of_config,
)
from megatron.training.conversion.vision_language_tensors import (
    export_tensors,
    import_tensors,
    with_attention_bias,
)
from megatron.training.models.registry import model_kind, model_kind_of
from megatron.training.runtime.state import TrainState
from megatron.training.tokenizer import (
    TokenizerSpec,
    create_tokenizer,
    pad_vocab_size,
)

HF = "hf"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BESIDE = "huggingface"  # folder next to iter_*: config.json, tokenizer, generation config
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
_ALWAYS_FP32 = (".router.expert_bias", AMAX_HISTORY)
_EMBEDDING = "embedding.word_embeddings.weight"
# Arguments that define a model, besides those of --use-checkpoint-args; values that every run
# needs to be resolved.
_MORE = ("bias_gelu_fusion", "bias_swiglu_fusion", "tokenizer_model", "encoder_num_layers")
_TO_RESOLVE = {"skip_train": True, "micro_batch_size": 1, "transformer_impl": "local"}
Say = Callable[[str], None]


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
    kind: str | None = None  # refuse a model of another kind
    is_release: bool = False  # write weights only, without training state
    verify: bool = True
    max_shard_bytes: int | None = None
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


def convert(wanted: ConversionRequest, say: Say = print) -> Path:
    """Run the conversion that ``wanted`` describes and return the folder that was written.

    ``say`` receives progress messages.  Raises CheckpointError.
    """
    is_theirs = (wanted.source / hf_folder.CONFIG).exists()
    if not is_theirs and find(str(wanted.source), wanted.step) is None:
        raise CheckpointError(
            f"--from {wanted.source} holds no checkpoint: no {TRACKER}, no iter_* folder; it is "
            f"{hf_folder.NO_MODEL} (nothing is downloaded by name)"
        )
    source = _from_hf(wanted, say) if is_theirs else read_source(wanted)
    kind = source.args["model_kind"]
    if wanted.kind not in (None, kind):
        raise CheckpointError(f"{wanted.source} is of kind {kind}, not {wanted.kind}")
    source = replace(source, args={**source.args, **wanted.args})
    if wanted.is_release:
        source = replace(source, tensors=_weights(source), common={}, rank_states={}, layout={})
    if wanted.rename is not None:
        source = replace(source, tensors=_renamed(source.tensors, wanted.rename))
    if wanted.dtype is not None:
        tensors = {k: _cast(t, wanted.dtype) for k, t in source.tensors.items()}
        source = replace(source, tensors=tensors, args={**source.args, **_precision(wanted.dtype)})
    if wanted.format == HF:
        return _to_hf(source, wanted, say)
    return _to_ours(source, wanted, say)


def _from_hf(wanted: ConversionRequest, say: Say) -> Source:
    config = hf_folder.read_config(wanted.source)
    weights = hf_folder.read_weights(wanted.source)
    fresh: tuple[str, ...] = ()
    images: VisionLanguageShape | None = None
    if is_vision_language(config):
        images = shape_of_config(config)
        architecture = images.family.architecture
        shape = images.text
        tensors = import_tensors(images, weights)
        flags = flags_of(images)
    else:
        model = hf.import_model(config, weights)
        architecture = model.family.architecture
        shape = model.shape
        tensors = dict(model.tensors)
        fresh = model.fresh
        flags = args_of(shape)
    say(f"{wanted.source} is a {architecture} of {_count(tensors)} weights")
    if fresh:
        heads = ", ".join(dict.fromkeys(name.partition(".")[0] for name in fresh))
        say(f"the weights have no {heads}: these get values to begin with")
    args = vars(build_parser().parse_args([])) | flags | _precision(_embedding(tensors).dtype)
    args |= _TO_RESOLVE | _tokenizer_args(wanted, shape) | {"vocab_extra_ids": None}
    if images is not None:
        check_encoder(images, run_config(args))
    if wanted.verify:
        say(compare_logits(wanted.source, run_config(args), tensors, shape.vocab_size, fresh))
    if not hf_folder.has_tokenizer(wanted.source):
        say(f"{wanted.source} has no tokenizer that is known here: give the runs one")
    return Source(tensors=tensors, args=args, common={}, layout={}, beside=wanted.source)


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
    beside = content.folder.parent / BESIDE
    model = content.asked.get("tokenizer_model")
    if not beside.is_dir() and isinstance(model, str) and hf_folder.has_tokenizer(Path(model)):
        beside = Path(model)  # the checkpoint chose this path: only a tokenizer is read
    return Source(
        tensors=tensors,
        args={**content.asked, "model_kind": kind or _kind_of(tensors)},
        common=content.common,
        layout=content.manifest.layout,
        rank_states={rank: state for rank, state in states.items() if state is not None},
        beside=beside if beside.is_dir() else None,
    )


# Substring of names that only one model kind has; Megatron-LM does not store the kind.
_KINDS = {".mixer.": "mamba", ".cross_attention.": "t5", "encoder.layers.": "bert"}


def _kind_of(names: Collection[str]) -> str:
    return next((k for part, k in _KINDS.items() if any(part in name for name in names)), "gpt")


def _weights(source: Source) -> dict[str, LazyTensor]:
    return {k: t for k, t in source.tensors.items() if not k.startswith(OPTIMIZER_PREFIX)}


def _to_hf(source: Source, wanted: ConversionRequest, say: Say) -> Path:
    weights = _weights(source)
    run = run_config(source.args)
    vocab_size = _vocab_size(source, wanted)
    if model_kind_of(run).reads_images:
        config = config_of(run, vocab_size, _config_beside(source))
        config = with_attention_bias(config, weights)
        tensors = export_tensors(shape_of_config(config), weights)
    else:
        config, tensors = _language_model(source, wanted, run, weights)
        config = {**config, "vocab_size": vocab_size}
    name = "torch_dtype" if "torch_dtype" in config else "dtype"
    config = {**config, name: str(tensors[0].dtype).removeprefix("torch.")}
    config.pop("quantization_config", None)  # weights are written unquantized
    with hf_folder.new_folder(wanted.target) as folder:
        hf_folder.write_config(folder, config)
        hf_folder.write_weights(folder, tensors, wanted.max_shard_bytes)
        if source.beside is not None:
            hf_folder.copy_beside(source.beside, folder)
        if wanted.verify:
            say(compare_logits(folder, run, weights, vocab_size))
    architecture = config["architectures"][0]
    say(f"wrote {architecture}, {_count(weights)} weights, to {wanted.target}")
    return wanted.target


def _language_model(
    source: Source, wanted: ConversionRequest, run: RunConfig, weights: Mapping[str, LazyTensor]
) -> tuple[JsonObject, list[LazyTensor]]:
    """Return config.json and the tensors of a model that reads text alone."""
    shape = shape_of(run, _vocab_size(source, wanted))
    came_with = _config_beside(source)
    family = hf.choose_family(shape, wanted.family, str(came_with.get("model_type")))
    tensors = hf.export_model(shape, weights, family)
    if _describes(came_with, family, shape):
        return {"architectures": [family.architecture], **came_with}, tensors
    config = {**family.config(shape), **special_ids(run)}
    if model_kind(shape.kind).has_encoder:
        config["decoder_start_token_id"] = config["bos_token_id"]
    return config, tensors


def _to_ours(source: Source, wanted: ConversionRequest, say: Say) -> Path:
    format = FORMATS[wanted.format]
    check_format(wanted.format, source.tensors, source.args["model_kind"])
    if wanted.args:
        run_config(source.args, **_layout_of(wanted.args))  # raises if not supported
    if format.is_foreign:
        source = _for_megatron(source)
    common = {
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": 0,
        "counters": TrainState().to_dict(),
        "optimizer": None,
        "opt_param_scheduler": None,
        **source.common,
        "args": {name: plain(value) for name, value in source.args.items()},
    }
    in_order = sorted(source.tensors.values(), key=lambda t: (-t.dtype.itemsize, t.name))
    contents = Contents(
        tensors=[_record(tensor) for tensor in made_ahead(in_order)],
        common=common,
        layout=source.layout,
    )
    if source.beside is not None:
        beside = wanted.target / BESIDE
        beside.mkdir(parents=True, exist_ok=True)
        hf_folder.copy_beside(source.beside, beside)
    begun = begin(wanted.target, common["iteration"], contents, None, format=format)
    written = []
    for rank, state in {0: None, **source.rank_states}.items():
        tensors = () if rank else begun.tensors
        its = replace(contents, rank_state=state)
        written.append(write(replace(begun, rank=rank, tensors=tensors, contents=its)))
    saved = conclude(begun, publish(begun, written), None)
    say(f"wrote {_count(source.tensors)} numbers to {saved.folder} in {wanted.format} format")
    return saved.folder


def _for_megatron(source: Source) -> Source:
    """Add the arguments that Megatron-LM derives from its command line, and pad vocabularies.

    Random states are kept only if the requested layout is the one that they were saved with.
    """
    layout = _layout_of(source.args)
    run = run_config(source.args, **layout)
    cut = flat_values(run)
    lacking = {k: v for k, v in cut.items() if source.args.get(k) is None}
    rows = _embedding(source.tensors).shape[0]
    multiple = run.language_model.make_vocab_size_divisible_by
    padded = pad_vocab_size(rows, multiple, run.model.tensor_model_parallel_size)
    lacking["padded_vocab_size"] = run.tokenizer.padded_vocab_size or padded
    sizes = dict(source.layout.get("dense", ()))
    sizes |= {axis: size for axis, size in source.layout.get("expert", ()) if axis == "ep"}
    is_same = all(sizes.get(axis) == size for axis, size in layout.items())
    if not is_same:
        replicas = layout.get("ep", 1)
        lacking |= {"world_size": run.world_size, "data_parallel_size": replicas}
        lacking["expert_tensor_parallel_size"] = cut["expert_tensor_parallel_size"]
    tensors = {
        key: _padded(tensor, lacking["padded_vocab_size"]) if key.endswith(_VOCABULARY) else tensor
        for key, tensor in source.tensors.items()
    }
    return replace(
        source,
        tensors=tensors,
        args={**source.args, **lacking},
        rank_states=source.rank_states if is_same else {},
    )


def _padded(tensor: LazyTensor, rows: int) -> LazyTensor:
    shape = (rows, *tensor.shape[1:])
    behind = [0, 0] * (len(shape) - 1) + [0, rows - tensor.shape[0]]
    return replace(tensor, shape=shape, make=lambda: F.pad(tensor.make(), behind))


def _record(tensor: LazyTensor) -> ShardedTensor:
    piece = LazyPiece((0,) * len(tensor.shape), tensor.shape, tensor.make)
    return ShardedTensor(
        key=tensor.name, global_shape=tensor.shape, dtype=tensor.dtype, pieces=(piece,)
    )


def run_config(args: Arguments, tp: int = 1, pp: int = 1, ep: int = 1) -> RunConfig:
    """Resolve the model and tokenizer arguments of a saved run, for these parallel sizes.

    All other arguments are ignored.  Raises ConfigError if the arguments request something that is
    not implemented, or if the model does not support these sizes.
    """
    names = {*FORCED, *IF_UNSET, *_MORE, *(n for n in args if n.startswith(FORCED_PREFIXES))}
    described = {name: args[name] for name in names if args.get(name) is not None}
    path = described.pop("heterogeneous_layers_config_path", None)  # never opened
    if path and not described.get("heterogeneous_layers_config_encoded_json"):
        raise CheckpointError(
            f"the checkpoint was saved with --heterogeneous-layers-config-path {path} and does not "
            "hold the text of that file: load it with this flag and save it once"
        )
    namespace = saved_namespace(described | _TO_RESOLVE)
    vars(namespace)["tensor_model_parallel_size"] = tp
    vars(namespace)["pipeline_model_parallel_size"] = pp
    vars(namespace)["expert_model_parallel_size"] = ep
    vars(namespace)["expert_tensor_parallel_size"] = 1 if ep > 1 else None
    vars(namespace)["sequence_parallel"] = tp > 1 and bool(described.get("num_experts"))
    return resolve(namespace, tp * pp * ep)


def _layout_of(args: Arguments) -> dict[str, int]:
    axes = {"tp": "tensor", "pp": "pipeline", "ep": "expert"}
    names = {axis: f"{word}_model_parallel_size" for axis, word in axes.items()}
    return {axis: args[name] for axis, name in names.items() if name in args}


def _config_beside(source: Source) -> JsonObject:
    """Return the config.json that was saved with the model, or {}."""
    if source.beside is None or not (source.beside / hf_folder.CONFIG).exists():
        return {}
    return hf_folder.read_config(source.beside)


def _describes(config: Config, family: Family, shape: ModelShape) -> bool:
    """Return whether ``config`` describes ``shape``, apart from the vocabulary size."""
    if config.get("model_type") != family.model_type:
        return False
    return replace(family.shape(config), vocab_size=shape.vocab_size) == shape


def _vocab_size(source: Source, wanted: ConversionRequest) -> int:
    """Return the number of embedding rows that are tokens; the other rows are padding.

    This is ``wanted.vocab_size`` if given, else the tokenizer's size if padding it by
    --make-vocab-size-divisible-by gives the number of rows, else all rows.
    """
    rows = _embedding(source.tensors).shape[0]
    if wanted.vocab_size is not None:
        return wanted.vocab_size
    args = source.args
    if args.get("pad_vocab_in_loss"):
        return rows
    try:
        tokens = create_tokenizer(TokenizerSpec.of(argparse.Namespace(**args))).vocab_size
    except (MegatronError, OSError):  # its files may be on another machine
        return rows
    multiple, tp = args["make_vocab_size_divisible_by"], args["tensor_model_parallel_size"]
    return tokens if pad_vocab_size(tokens, multiple, tp) == rows else rows


def _tokenizer_args(wanted: ConversionRequest, shape: ModelShape) -> dict[str, object]:
    """Return the arguments of the source's tokenizer, or of a NullTokenizer if it has none.

    If the embedding has more rows than the tokenizer has tokens, padded_vocab_size keeps them.
    """
    rows = shape.vocab_size
    if not hf_folder.has_tokenizer(wanted.source):
        return {"tokenizer_type": "NullTokenizer", "vocab_size": rows - 1}  # it adds EOD
    found: dict[str, object] = {
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": str((wanted.target / BESIDE).resolve()),
    }
    here = TokenizerSpec(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(wanted.source))
    if create_tokenizer(here).vocab_size == rows:
        return found
    return {**found, "padded_vocab_size": rows, "pad_vocab_in_loss": True}


def _embedding(tensors: Mapping[str, LazyTensor]) -> LazyTensor:
    """Return the embedding of words, which may be that of a part of the model."""
    return next(tensor for name, tensor in tensors.items() if name.endswith(_EMBEDDING))


def _renamed(
    tensors: Mapping[str, LazyTensor], rename: Callable[[str], str | None]
) -> dict[str, LazyTensor]:
    out: dict[str, LazyTensor] = {}
    for key, tensor in tensors.items():
        name = rename(key)
        if name in out:
            raise CheckpointError(f"two tensors would be called {name}")
        if name is not None:
            out[name] = replace(tensor, name=name)
    return out


def _precision(dtype: torch.dtype) -> dict[str, bool]:
    return {"bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}


def _cast(tensor: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    if tensor.name.startswith(OPTIMIZER_PREFIX) or tensor.name.endswith(_ALWAYS_FP32):
        return tensor
    return replace(tensor, dtype=dtype, make=lambda: tensor.make().to(dtype))


def _count(tensors: Mapping[str, LazyTensor]) -> str:
    return f"{sum(math.prod(tensor.shape) for tensor in tensors.values()):,}"
