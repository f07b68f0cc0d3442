"""Convert a checkpoint from one format to another.

Between the formats of `FORMATS` everything is converted: weights, optimizer, counters, scheduler.
From and to Hugging Face, only the weights and the description of the model are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.core.dist_checkpointing.all_ranks import begin, complete, conclude, write
from megatron.core.dist_checkpointing.folders import TRACKER
from megatron.core.dist_checkpointing.formats import FORMATS, Contents
from megatron.core.dist_checkpointing.hashing import hash_here
from megatron.core.dist_checkpointing.key_names import is_vocabulary
from megatron.core.dist_checkpointing.manifest import TRUE_VOCAB_SIZE, write_text
from megatron.core.dist_checkpointing.plain_values import plain
from megatron.core.dist_checkpointing.records import OPTIMIZER_PREFIX, LazyPiece, TensorRecord
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.dist_checkpointing.validation import AMAX_HISTORY, SCALES
from megatron.core.export.trtllm.trtllm_layers import ExportConfig
from megatron.core.progress import Progress
from megatron.training.arguments.flat_values import flat_values
from megatron.training.checkpointing.base_model import (
    BaseModel,
    base_named_in,
    check_base,
    folder_of_base,
)
from megatron.training.checkpointing.paths import find, resolve_folder
from megatron.training.checkpointing.save import CHECKPOINT_VERSION
from megatron.training.config.quantization import QuantizationFlags
from megatron.training.config.run import RunConfig
from megatron.training.conversion import draft_heads, hf, hf_folder, onnx, peft, trtllm
from megatron.training.conversion.family import Family
from megatron.training.conversion.hf import as_classifier, without_heads
from megatron.training.conversion.lazy import counted, made_ahead
from megatron.training.conversion.model_folder import precision, read_folder
from megatron.training.conversion.peft import CONFIG, merged
from megatron.training.conversion.quantized_export import (
    BUFFER,
    MODELOPT,
    Quantization,
    modelopt_file,
    quantization_of,
    quantize,
    warning_of,
)
from megatron.training.conversion.shape import ModelShape, shape_of
from megatron.training.conversion.source import BESIDE as BESIDE
from megatron.training.conversion.source import HF as HF
from megatron.training.conversion.source import PEFT as PEFT
from megatron.training.conversion.source import (
    STAGE_FLAGS,
    Source,
    config_beside,
    default_args,
    embedding_of,
    layout_of,
    special_ids,
    text_of,
    vocab_size_of,
    with_changes,
    without_padding,
)
from megatron.training.conversion.source import ConversionRequest as ConversionRequest
from megatron.training.conversion.source import read_source as read_source
from megatron.training.conversion.source import run_config as run_config
from megatron.training.conversion.verify import compare_logits, report_quantized
from megatron.training.conversion.vision import (
    export_classifier,
)
from megatron.training.conversion.vision_language import (
    config_of,
    export_tensors,
    shape_of_config,
    with_attention_bias,
)
from megatron.training.estimates.automatic_settings import resolve_pipeline_split
from megatron.training.models.encoders import format_problem
from megatron.training.models.registry import layers_of_stages, model_kind, model_kind_of
from megatron.training.runtime.context import TrainState
from megatron.training.tokenizer import (
    pad_vocab_size,
)


def check_format(checkpoint_format: str, keys: Iterable[str], kind: str) -> None:
    """Raise CheckpointError unless the format can hold the tensors of a model of ``kind``.

    The formats torch and torch_dcp number the parameters and store the same state for each, and
    they hold no encoder of images.
    """
    if model_kind(kind).reads_images and (problem := format_problem(checkpoint_format)):
        raise CheckpointError(f"--format {problem}")
    if model_kind(kind).classifies_images and FORMATS[checkpoint_format].is_foreign:
        raise CheckpointError(
            f"--format {checkpoint_format}: Megatron-LM's image classifiers have other tensors; "
            "use safetensors_dist, or hf"
        )
    if checkpoint_format not in ("torch", "torch_dcp"):
        return
    names: dict[str, set[str]] = {}
    for key in keys:
        if key.startswith(OPTIMIZER_PREFIX) and "fp32_param" not in key:
            state, _, name = key.removeprefix(f"{OPTIMIZER_PREFIX}state.").partition(".")
            names.setdefault(state, set()).add(name)
    if any(members != next(iter(names.values())) for members in names.values()):
        raise CheckpointError(
            f"--format {checkpoint_format} has no room for state of some parameters alone, and "
            f"the checkpoint has {' and '.join(sorted(names))}: use safetensors_dist or torch_dist"
        )


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ALWAYS_FP32 = (".router.expert_bias", AMAX_HISTORY, *SCALES)
_WITH_SCALES = (HF, "safetensors_dist", "torch_dist")
Say = Callable[[str], None]


def convert(wanted: ConversionRequest, say: Say = print) -> Path:
    """Run the conversion that ``wanted`` describes and return the folder that was written.

    ``say`` receives progress messages.  Raises CheckpointError.
    """
    if (wanted.source / CONFIG).exists() or draft_heads.is_folder_of_heads(wanted.source):
        return _onto_base(wanted, say)
    is_theirs = (wanted.source / hf_folder.CONFIG).exists()
    if not is_theirs and find(str(wanted.source), wanted.step) is None:
        raise CheckpointError(
            f"--from {wanted.source} holds no checkpoint: no {TRACKER}, no iter_* folder; it is "
            f"{hf_folder.NO_MODEL}"
        )
    source = _from_hf(wanted, say) if is_theirs else read_source(wanted)
    kind = source.args["model_kind"]
    if wanted.kind not in (None, kind):
        raise CheckpointError(f"{wanted.source} is of kind {kind}, not {wanted.kind}")
    source = replace(source, args=with_changes(source.args, wanted.args, say))
    if wanted.quant is not None and wanted.format != HF:
        raise CheckpointError(
            f"--quant {wanted.quant} with --format {wanted.format}: --format {HF} alone is written "
            "in few bits"
        )
    if wanted.format not in _WITH_SCALES and any(key.endswith(SCALES) for key in source.tensors):
        raise CheckpointError(
            f"--format {wanted.format}: the checkpoint is quantized, and this format has no place "
            f"for its scales: use {', '.join(_WITH_SCALES)}"
        )
    if wanted.format == PEFT:
        return _to_peft(source, wanted, say)
    if base_named_in(source.args) is not None:
        add = _with_heads if draft_heads.has_heads(source.args) else _merged
        source = add(source, wanted, say)
    if wanted.is_release:
        source = source.only(source.weights)
    if wanted.rename is not None:
        source = replace(source, tensors=_renamed(source.tensors, wanted.rename))
    if wanted.dtype is not None:
        tensors = {k: _cast(t, wanted.dtype) for k, t in source.tensors.items()}
        source = replace(source, tensors=tensors, args={**source.args, **precision(wanted.dtype)})
    if wanted.format in EXPORTS:
        return EXPORTS[wanted.format](source, wanted, say)
    return write_checkpoint(source, wanted, say)


def _from_hf(wanted: ConversionRequest, say: Say) -> Source:
    model = read_folder(wanted.source)
    say(f"{wanted.source} is a {model.architecture} of {model.num_weights:,} weights")
    if model.fresh:
        heads = ", ".join(dict.fromkeys(name.partition(".")[0] for name in model.fresh))
        say(f"the weights have no {heads}: these get values to begin with")
    args = default_args() | model.args(wanted.source, wanted.target / BESIDE)
    if wanted.verify:
        rows = model.rows or 1
        say(compare_logits(wanted.source, run_config(args), model.tensors, rows, model.fresh))
    if model.rows is not None and not hf_folder.has_tokenizer(wanted.source):
        say(f"{wanted.source} has no tokenizer that is known here: give the runs one")
    return Source(tensors=model.tensors, args=args, common={}, layout={}, beside=wanted.source)


def _to_hf(source: Source, wanted: ConversionRequest, say: Say) -> Path:
    weights, heads = draft_heads.split(source.weights)
    flags = ("export_quant_cfg", "kitchen_config_file")
    recipe, globs = (source.args.get(name) for name in flags)
    saved = QuantizationFlags(export_quant_cfg=recipe, kitchen_config_file=globs).recipes
    plain = {**dict.fromkeys(flags), "export_kv_cache_quant": False}
    run = run_config({**draft_heads.as_model(source.args), **plain})
    vocab_size = 1 if model_kind_of(run).classifies_images else vocab_size_of(source, wanted)
    quant = quantization_of(wanted.quant, wanted.quant_form, weights, saved)
    if quant is not None and (warning := warning_of(quant, run)):
        say(warning)
    weights = {name: tensor for name, tensor in weights.items() if BUFFER not in name}
    with hf_folder.new_folder(wanted.target) as folder:
        architecture = write_model(
            folder,
            run,
            weights,
            vocab_size,
            config_beside(source.beside),
            family=wanted.family,
            quant=quant,
            max_shard_bytes=wanted.max_shard_bytes,
        )
        if source.beside is not None:
            hf_folder.copy_beside(source.beside, folder)
        if heads:
            config = hf_folder.read_config(folder)
            draft_heads.write(folder / draft_heads.FOLDER, heads, run.model, config)
            say(f"wrote the draft heads to {wanted.target / draft_heads.FOLDER}")
        if wanted.verify and quant is None:
            say(compare_logits(folder, run, weights, vocab_size))
        elif wanted.verify:
            held = read_folder(folder).tensors
            text = None if wanted.report_text is None else text_of(source, wanted.report_text)
            say(report_quantized(folder, run, weights, held, vocab_size, text))
    say(f"wrote {architecture}, {_count(weights)} weights, to {wanted.target}")
    return wanted.target


def write_model(
    folder: Path,
    run: RunConfig,
    weights: Mapping[str, LazyTensor],
    vocab_size: int,
    came_with: JsonObject,
    *,
    family: str | None = None,
    quant: Quantization | None = None,
    **files: Any,
) -> str:
    """Write config.json and the weights into ``folder``; return the architecture.

    ``came_with``: the config.json that the model was made from, or {}; it is kept if it describes
    the model.  ``quant``: write linear layers as codes.  ``files``: options of
    `hf_folder.write_weights`.  Raises CheckpointError if Hugging Face has no class for the model.
    """
    kind = model_kind_of(run)
    if kind.classifies_images:
        config, tensors = export_classifier(run, weights, came_with)
    elif kind.has_placeholders:
        raise CheckpointError(
            f"the model is {kind.title}, whose set of encoders has no form "
            "at Hugging Face: convert it to another --format, or train pretrain_vlm.py"
        )
    elif kind.reads_images:
        config = with_attention_bias(config_of(run, vocab_size, came_with), weights)
        tensors = export_tensors(shape_of_config(config), weights)
    else:
        config, found, shape = describe(run, vocab_size, came_with, family)
        tensors = hf.export_model(shape, weights, found)
    dtype = tensors[0].dtype
    config.pop("quantization_config", None)  # that of the source
    if quant is not None:
        if kind.classifies_images or kind.reads_images:
            raise CheckpointError(f"--quant: {kind.title} is written without quantization only")
        tensors, settings = quantize(tensors, weights, quant, run, shape, found)
        config["quantization_config"] = settings
        if quant.form == MODELOPT:
            file = json.dumps(modelopt_file(settings), indent=2)
            write_text(folder / hf_folder.MODELOPT_CONFIG, f"{file}\n")
    name = "torch_dtype" if "torch_dtype" in config else "dtype"
    config = {**config, name: str(dtype).removeprefix("torch.")}
    hf_folder.write_config(folder, config)
    hf_folder.write_weights(folder, tensors, **files)
    return str(config["architectures"][0])


def _to_onnx(source: Source, wanted: ConversionRequest, say: Say) -> Path:
    weights = source.weights
    run = run_config(source.args)
    onnx.check(run)
    vocab_size = 1 if model_kind_of(run).classifies_images else vocab_size_of(source, wanted)
    came_with = config_beside(source.beside)
    with hf_folder.new_folder(wanted.target) as folder:
        try:
            if model_kind_of(run).classifies_images:
                config, _ = export_classifier(run, weights, came_with)
            else:
                config, *_ = describe(run, vocab_size, came_with, wanted.family)
        except CheckpointError:  # Hugging Face has no class for the model
            config = onnx.describe(run, vocab_size)
        config.pop("quantization_config", None)
        hf_folder.write_config(folder, {**config, "dtype": "float32"})
        report = onnx.export(folder, run, weights, vocab_size, verify=wanted.verify)
        if source.beside is not None:
            hf_folder.copy_beside(source.beside, folder)
    if wanted.verify:
        say(onnx.summary(report))
    say(f"wrote {_count(weights)} weights to {wanted.target} as ONNX")
    return wanted.target


def _to_trtllm(source: Source, wanted: ConversionRequest, say: Say) -> Path:
    run = run_config(source.args)
    trtllm.check(run)
    layout = layout_of(wanted.args)
    if layout.get("ep", 1) > 1:
        raise CheckpointError(
            f"expert-parallel size {layout['ep']}: the ranks of --format trtllm share every expert"
        )
    export = ExportConfig(layout.get("tp", 1), layout.get("pp", 1))
    vocab_size = vocab_size_of(source, wanted)
    with hf_folder.new_folder(wanted.target) as folder:
        name = trtllm.write_ranks(folder, run, source.weights, vocab_size, wanted.family, export)
        if source.beside is not None:
            hf_folder.copy_beside(source.beside, folder)
        size = sum(path.stat().st_size for path in folder.glob("rank*"))
    say(f"wrote {name} to {wanted.target}, {size:,} bytes; its logits were not compared")
    say(trtllm.NOTE)
    return wanted.target


# Formats of other programs that hold the weights alone.
EXPORTS: dict[str, Callable[[Source, ConversionRequest, Say], Path]] = {
    HF: _to_hf,
    onnx.FORMAT: _to_onnx,
    trtllm.FORMAT: _to_trtllm,
}


def _with_base(source: Source, wanted: ConversionRequest) -> Source:
    """Return a source with the weights of the base and the adapters, and no training state."""
    named = base_named_in(source.args)
    if named is None:
        raise CheckpointError(
            f"{wanted.source} holds a complete model, no adapters: choose another --format"
        )
    given = None if wanted.base is None else str(wanted.base)
    folder = folder_of_base(named, given, wanted.source, "--base")
    if folder is None:
        raise CheckpointError(f"{wanted.source}: the base was random weights; there is no model")
    base = read_source(ConversionRequest(source=Path(folder), target=wanted.target, format=HF))
    if source.args.get("reward_model"):
        base = replace(base, tensors=without_heads(base.tensors))
    own = source.weights  # the base may have layers of MTP that were trained further
    source = source.only({**base.weights, **own})
    source = replace(source, beside=source.beside or base.beside)
    others = {name: t for name, t in base.weights.items() if name not in own}
    found = BaseModel(folder, _hash_of(base.only(others), wanted))
    check_base(named, found, wanted.source, "--base")
    return source


def _hash_of(base: Source, wanted: ConversionRequest) -> str:
    """Return the hash of the frozen weights ``base``, as a run computes it."""
    weights = without_padding(base, wanted).weights.items()
    frozen = (tensor for name, tensor in weights if not name.endswith(_ALWAYS_FP32))
    return f"{sum(int(hash_here(_record(tensor))) for tensor in frozen) % 2**64:016x}"


def _merged(source: Source, wanted: ConversionRequest, say: Say) -> Source:
    """Return the complete model: the base with its adapters added."""
    source = _with_base(source, wanted)
    shape = shape_of(run_config(source.args), vocab_size_of(source, wanted))
    tensors = merged(source.tensors, source.args, shape)
    say(f"{wanted.source} holds adapters: they are added to the weights of their base")
    args = {name: value for name, value in source.args.items() if not name.startswith("lora_")}
    return replace(source, tensors=tensors, args=args)


def _with_heads(source: Source, wanted: ConversionRequest, say: Say) -> Source:
    """Return the complete model: the base with its draft heads or layers of MTP."""
    source = _with_base(source, wanted)
    say(f"{wanted.source} holds draft heads: they are written with their model")
    args = {name: value for name, value in source.args.items() if not name.startswith("lora_base")}
    is_apart = any(draft_heads.split(source.tensors)[1])
    return replace(source, args=args if is_apart else draft_heads.as_model(args))


def _to_peft(source: Source, wanted: ConversionRequest, say: Say) -> Path:
    source = _with_base(source, wanted)
    family, shape = _family_of(source, wanted)
    name = config_beside(source.beside).get("_name_or_path")
    with hf_folder.new_folder(wanted.target) as folder:
        if warning := peft.write_peft(folder, source.weights, source.args, shape, family, name):
            say(warning)
    say(f"wrote adapters of a {family.architecture} to {wanted.target}, in the form of PEFT")
    return wanted.target


def _onto_base(wanted: ConversionRequest, say: Say) -> Path:
    """Convert a folder of PEFT or of draft heads to a checkpoint of them for ``wanted.base``."""
    is_peft = (wanted.source / CONFIG).exists()
    what = "adapters of PEFT" if is_peft else "draft heads"
    if wanted.base is None:
        raise CheckpointError(
            f"{wanted.source} holds {what}: give the checkpoint of their model with --base"
        )
    if wanted.format != "safetensors_dist":
        raise CheckpointError(
            f"--format {wanted.format}: {what} become a checkpoint of format safetensors_dist first"
        )
    folder = resolve_folder(wanted.base).resolve()
    base = read_source(replace(wanted, source=folder))
    if is_peft:
        family, shape = _family_of(base, wanted)
        dtype = wanted.dtype or embedding_of(base.tensors).dtype
        tensors, flags = peft.read_peft(wanted.source, shape, family, dtype)
    else:
        model = run_config(base.args).model
        tensors, flags = draft_heads.read(wanted.source, model, vocab_size_of(base, wanted))
    if flags.get("reward_model"):
        base = replace(base, tensors=without_heads(base.tensors))
    frozen = {name: t for name, t in base.weights.items() if name not in tensors}
    named = BaseModel(str(folder), _hash_of(base.only(frozen), wanted))
    args = with_changes({**base.args, **flags, **named.arguments}, wanted.args, say)
    return write_checkpoint(replace(base.only(tensors), args=args), wanted, say)


def _family_of(source: Source, wanted: ConversionRequest) -> tuple[Family, ModelShape]:
    shape = shape_of(run_config(source.args), vocab_size_of(source, wanted))
    first = str(config_beside(source.beside).get("model_type"))
    return hf.choose_family(shape, wanted.family, first), shape


def describe(
    run: RunConfig, vocab_size: int, came_with: JsonObject, family_name: str | None = None
) -> tuple[JsonObject, Family, ModelShape]:
    """Return config.json, family and shape of a model that reads text alone.

    ``came_with``, the config.json that was saved with the model, is returned if it describes it.
    """
    shape = shape_of(run, vocab_size)
    if shape.is_reward:
        came_with = as_classifier(came_with)
    family = hf.choose_family(shape, family_name, str(came_with.get("model_type")))
    if came_with.get("model_type") == family.model_type:
        described = replace(family.shape(came_with), vocab_size=vocab_size)
        if family.ahead_prefix is not None and shape.mtp_num_layers is None:
            described = replace(described, mtp_num_layers=None)  # transformers drops their weights
        if described == shape:
            config = {"architectures": [family.architecture], **came_with}
            if shape.is_reward and config.get("pad_token_id") is None:
                config["pad_token_id"] = special_ids(run)["pad_token_id"]  # to score batches
            return config | {"vocab_size": vocab_size}, family, shape
    config = {**family.config(shape), **special_ids(run)}
    if model_kind(shape.kind).has_encoder:
        config["decoder_start_token_id"] = config["bos_token_id"]
    return config | {"vocab_size": vocab_size}, family, shape


def write_checkpoint(source: Source, wanted: ConversionRequest, say: Say = print) -> Path:
    """Write ``source`` to ``wanted.target`` in a format of ours; return the folder."""
    format = FORMATS[wanted.format]
    check_format(wanted.format, source.tensors, source.args["model_kind"])
    if layout_of(wanted.args):
        run_config(source.args, **layout_of(source.args))  # raises if not supported
    change = _for_megatron if format.is_foreign else without_padding
    source = change(source, wanted)
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
    total = sum(tensor.num_bytes for tensor in in_order) / 1e9
    progress = Progress(f"writing {wanted.target}", total, "GB")
    contents = Contents(
        tensors=[_record(tensor) for tensor in counted(made_ahead(in_order), progress)],
        common=common,
        layout=source.layout,
    )
    if source.beside is not None:
        beside = wanted.target / BESIDE
        beside.mkdir(parents=True, exist_ok=True)
        hf_folder.copy_beside(source.beside, beside)
    begun = begin(wanted.target, common["iteration"], contents, None, format=format)
    written = []
    with progress:
        for rank, state in {0: None, **source.rank_states}.items():
            tensors = () if rank else begun.tensors
            its = replace(contents, rank_state=state)
            written.append(write(replace(begun, rank=rank, tensors=tensors, contents=its)))
    saved = conclude(begun, complete(begun, written), None)
    say(f"wrote {_count(source.tensors)} numbers to {saved.folder} in {wanted.format} format")
    return saved.folder


def _for_megatron(source: Source, wanted: ConversionRequest) -> Source:
    """Add the arguments that Megatron-LM derives from its command line, and pad vocabularies.

    Random states are kept only if the requested layout is the one that they were saved with.
    """
    layout = layout_of(source.args)
    run = run_config(source.args, **layout)
    rows = embedding_of(source.tensors).shape[0]
    multiple = run.language_model.make_vocab_size_divisible_by
    padded = pad_vocab_size(rows, multiple, run.model.tensor_model_parallel_size)
    padded = run.tokenizer.padded_vocab_size or padded
    if run.model.pipeline_split == "auto":
        run = resolve_pipeline_split(run, padded)
    cut = flat_values(run)
    lacking = {k: v for k, v in cut.items() if source.args.get(k) is None or k in STAGE_FLAGS}
    lacking["padded_vocab_size"] = padded
    lacking[TRUE_VOCAB_SIZE] = vocab_size_of(source, wanted)
    sizes = dict(source.layout.get("dense", ()))
    sizes |= {axis: size for axis, size in source.layout.get("expert", ()) if axis == "ep"}
    is_same = all(sizes.get(axis) == size for axis, size in layout.items())
    if not is_same:
        lacking |= {"world_size": run.world_size, "data_parallel_size": layout.get("ep", 1)}
        lacking["expert_tensor_parallel_size"] = cut["expert_tensor_parallel_size"]
    tensors = {
        key: _padded(tensor, padded) if is_vocabulary(key) else tensor
        for key, tensor in source.tensors.items()
    }
    return replace(
        source,
        tensors=tensors,
        args={**source.args, **lacking},
        common={**source.common, "stages": [list(layers) for layers in layers_of_stages(run)]},
        rank_states=source.rank_states if is_same else {},
    )


def _padded(tensor: LazyTensor, rows: int) -> LazyTensor:
    shape = (rows, *tensor.shape[1:])
    behind = [0, 0] * (len(shape) - 1) + [0, rows - tensor.shape[0]]
    return replace(tensor, shape=shape, make=lambda: F.pad(tensor.make(), behind))


def _record(tensor: LazyTensor) -> TensorRecord:
    piece = LazyPiece((0,) * len(tensor.shape), tensor.shape, tensor.make)
    return TensorRecord(
        key=tensor.name, global_shape=tensor.shape, dtype=tensor.dtype, pieces=(piece,)
    )


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


def _cast(tensor: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    if tensor.name.startswith(OPTIMIZER_PREFIX) or tensor.name.endswith(_ALWAYS_FP32):
        return tensor
    if BUFFER in tensor.name:  # scales
        return tensor
    return replace(tensor, dtype=dtype, make=lambda: tensor.make().to(dtype))


def _count(tensors: Mapping[str, LazyTensor]) -> str:
    return f"{sum(math.prod(tensor.shape) for tensor in tensors.values()):,}"
