"""Hugging Face model folder: config.json, weights, and small files such as the tokenizer.

Weights are read from safetensors, one file or several with an index, or from ``pytorch_model.bin``
with ``torch.load(weights_only=True)``, which executes no code.  They are written as safetensors.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import secrets
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.core.device import CPU
from megatron.core.dist_checkpointing.folders import is_filled
from megatron.core.dist_checkpointing.manifest import (
    adopt_file,
    fsync_folder,
    json_object,
    write_text,
)
from megatron.core.dist_checkpointing.safetensors_file import (
    LazyTensor,
    TensorEntry,
    read_header,
    write_file,
)
from megatron.core.progress import Progress
from megatron.core.text_files import path_inside
from megatron.training.conversion.lazy import as_lazy, counted, made_ahead

# Description for the error message, types, and bounds of entries.  A null counts as absent.
_KINDS: tuple[tuple[str, tuple[type, ...], float | None, float | None, str], ...] = (
    (
        *("an integer above 0 and below 2**31", (int,), 1, 2**31 - 1),
        "hidden_size intermediate_size max_position_embeddings vocab_size head_dim d_kv "
        "d_model d_ff embed_dim n_embd n_positions n_inner moe_intermediate_size kv_lora_rank "
        "q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim shared_expert_intermediate_size "
        "moe_shared_expert_intermediate_size state_size ssm_state_size mamba_head_dim "
        "relative_attention_num_buckets relative_attention_max_distance "
        "original_max_position_embeddings",
    ),
    (
        *("an integer from 1 to 10000", (int,), 1, 10_000),  # layers, experts or heads
        "num_hidden_layers num_attention_heads num_key_value_heads num_layers num_decoder_layers "
        "n_layer n_head num_heads depth num_experts_per_tok n_groups mamba_num_heads conv_kernel "
        "decoder_sparse_step type_vocab_size",
    ),
    (
        *("an integer from 0 to 10000", (int,), 0, 10_000),
        "num_experts num_local_experts n_routed_experts n_shared_experts n_group "
        "topk_group first_k_dense_replace num_nextn_predict_layers",
    ),
    (
        *("an integer from 0 to 2**31", (int,), 0, 2**31 - 1),
        "sliding_window max_window_layers sliding_window_pattern",
    ),
    (
        *("a number above 0", (int, float), math.ulp(0.0), 1e30),
        "rms_norm_eps layer_norm_epsilon layer_norm_eps rope_theta partial_rotary_factor "
        "query_pre_attn_scalar expand factor beta_fast beta_slow rope_local_base_freq",
    ),
    (
        *("a finite number", (int, float), -1e30, 1e30),
        "attention_dropout attn_pdrop embd_pdrop resid_pdrop dropout_rate hidden_dropout "
        "hidden_dropout_prob attention_probs_dropout_prob attn_logit_softcapping "
        "final_logit_softcapping routed_scaling_factor swiglu_limit mscale mscale_all_dim",
    ),
    (
        *("true or false", (bool,), None, None),
        "tie_word_embeddings attention_bias mlp_bias norm_topk_prob use_sliding_window "
        "use_bidirectional_attention scale_decoder_outputs truncate",
    ),
    (
        *("text", (str,), None, None),
        "model_type hidden_act hidden_activation activation_function mlp_hidden_act "
        "feed_forward_proj topk_method scoring_func hybrid_override_pattern rope_type type",
    ),
    (
        *("a list", (list,), None, None),
        "layer_types layers_block_type mlp_only_layers short_factor long_factor",
    ),
    (
        *("an object", (dict,), None, None),
        "rope_scaling rope_parameters quantization_config text_config vision_config "
        "full_attention sliding_attention",
    ),
)
_EXPECTED = {name: kind for kind in _KINDS for name in kind[-1].split()}


def check_values(config: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError if a known entry of ``config`` has a wrong type or is out of range.

    ``path`` is the file that the error message names.  Unknown entries and nulls are not checked;
    the entries of nested objects are.
    """
    for name, value in config.items():
        if value is None or name not in _EXPECTED:
            continue
        description, types, low, high, _ = _EXPECTED[name]
        if type(value) not in types or not (low is None or low <= value <= high):
            shown = repr(value)
            shown = shown if len(shown) < 60 else f"{shown[:60]}..."
            raise CheckpointError(f"{path} has {name} {shown}: {description} is needed")
        if isinstance(value, dict):
            check_values(value, path)


CONFIG = "config.json"
MODELOPT_CONFIG = "hf_quant_config.json"
NO_MODEL = (
    f"no Hugging Face model: it has no {CONFIG}; name the folder that save_pretrained() or a "
    "download made"
)
_SAFETENSORS, _BIN = "model.safetensors", "pytorch_model.bin"
_BESIDE = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*")
_NOT_BESIDE = ("*.index.json", "requirements.txt", "*quant*_config.json")
MAX_SHARD_BYTES = 5_000_000_000


def read_config(folder: Path) -> JsonObject:
    """Read and check config.json.  Raises CheckpointError."""
    if not (folder / CONFIG).exists():
        raise CheckpointError(f"{folder} is {NO_MODEL}")
    config = read_json(folder / CONFIG)
    if (folder / MODELOPT_CONFIG).exists():
        config.setdefault("quantization_config", {"quant_method": "modelopt"})
    check_values(config, folder / CONFIG)
    return config


def read_json(path: Path) -> JsonObject:
    """Read a file of one JSON object.  Raises CheckpointError."""
    try:
        return json_object(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def read_weights(folder: Path) -> dict[str, LazyTensor]:
    """Return the tensors of ``folder`` by name; each is read on use.  Raises CheckpointError."""
    for name, read in ((_SAFETENSORS, read_safetensors), (_BIN, _read_bin)):
        index = folder / f"{name}.index.json"
        if index.exists():
            return _read_parts(index, read)
        if (folder / name).exists():
            return read(folder / name)
    raise CheckpointError(f"{folder} has neither {_SAFETENSORS} nor {_BIN} nor an index of parts")


def _read_parts(
    index: Path, read: Callable[[Path], Mapping[str, LazyTensor]]
) -> dict[str, LazyTensor]:
    """Return the tensors of all files that ``index`` names; the files are in its folder.

    Raises CheckpointError if the index and the files do not agree.
    """
    mapped = read_json(index).get("weight_map")
    if not isinstance(mapped, dict) or not mapped:
        raise CheckpointError(
            f"{index} has no weight_map from names of tensors to files: get the folder again"
        )
    paths = {name: path_inside(index.parent, file, index) for name, file in mapped.items()}
    out: dict[str, LazyTensor] = {}
    for path in sorted(set(paths.values())):
        part = read(path)
        twice = out.keys() & part.keys()
        if twice:
            raise CheckpointError(f"{path} holds {min(twice)}, as another file does")
        strange = {name for name in part if paths.get(name) != path}
        lacking = {name for name, place in paths.items() if place == path} - part.keys()
        if strange or lacking:
            names = ", ".join(sorted(strange | lacking)[:3])
            raise CheckpointError(f"{index} does not fit its files: {names} in {path.name}")
        out |= part
    return out


def read_safetensors(path: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a file by name; each is read on use.  Raises CheckpointError."""
    if not path.exists():
        raise CheckpointError(f"{path} is missing")
    entries = read_header(path)
    for name, entry in entries.items():
        _check_has_elements(path, name, entry.shape)
    return {
        name: LazyTensor(name, entry.dtype, entry.shape, partial(_read, path, entry), path)
        for name, entry in entries.items()
    }


def _check_has_elements(path: Path, name: str, shape: Sequence[int]) -> None:
    """Refuse shapes such as [2**60, 0]: they take no bytes, so file sizes do not bound them."""
    if 0 in shape:
        raise CheckpointError(f"{path}: {name} has shape {list(shape)}, which is without elements")


def _read(path: Path, entry: TensorEntry) -> Tensor:
    """Map a tensor into memory: what is used of it is read from the disk when it is used."""
    begin = entry.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    size = entry.start + entry.num_bytes - begin
    try:
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=begin)
    except (OSError, ValueError) as error:  # gone, or cut short since its header was read
        raise CheckpointError(f"{path} cannot be read: {error}; get the folder again") from None
    values = torch.frombuffer(mapped, dtype=torch.uint8, offset=entry.start - begin)
    return values.view(entry.dtype).view(entry.shape)


def _read_bin(path: Path) -> dict[str, LazyTensor]:
    if not path.exists():
        raise CheckpointError(f"{path} is missing")
    try:
        held = torch.load(path, CPU, weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # a damaged pickle raises almost any
        reason = str(error).split("\n")[0]
        raise CheckpointError(f"{path} holds more than tensors, or is damaged: {reason}") from None
    if not isinstance(held, dict):
        raise CheckpointError(f"{path} holds a {type(held).__name__}, not tensors by name")
    for name, tensor in held.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"{path} holds a {type(tensor).__name__} as {name!r}, not tensors by name"
            )
        _check_has_elements(path, name, tensor.shape)
        is_plain = tensor.layout is torch.strided and not tensor.is_quantized
        # A view with stride 0 takes more memory once it is copied.
        if not is_plain or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise CheckpointError(f"{path}: {name} is sparse, quantized or expanded, not plain")
    return as_lazy(held)


def has_tokenizer(folder: Path) -> bool:
    """Whether `transformers` or `tokenizers` can build a tokenizer from ``folder``."""
    names = "tokenizer.json tokenizer.model vocab.json tokenizer_config.json vocab.txt"
    return any((folder / name).exists() for name in names.split())


@contextlib.contextmanager
def new_folder(path: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Create the folder ``path`` atomically: it has a temporary name until the block ends.

    An error within the block removes the folder.  Raises CheckpointError if ``path`` is a file or a
    folder that is not empty, unless it ``replaces`` that folder.
    """
    if not replaces and is_filled(path) or path.is_file():
        raise CheckpointError(f"{path} is there already: name a new folder, or remove it")
    made = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    made.mkdir(parents=True)
    try:
        yield made
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    fsync_folder(made)
    if replaces:
        remove(path)
    made.rename(path)
    fsync_folder(path.parent)


def remove(path: Path) -> None:
    """Remove the folder ``path``, if it is there; a kill leaves it complete or under another name.

    `sweep` removes folders that were left so.
    """
    if path.is_dir():
        path.rename(doomed := path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}"))
        shutil.rmtree(doomed, ignore_errors=True)


def sweep(path: Path) -> None:
    """Remove what killed runs left of `new_folder` and `remove` of ``path``."""
    for left in path.parent.glob(f"{path.name}.tmp-*"):
        shutil.rmtree(left, ignore_errors=True)


def write_weights(
    folder: Path,
    tensors: Sequence[LazyTensor],
    max_shard_bytes: int | None = None,
    *,
    in_thread: bool = True,
) -> None:
    """Write ``tensors`` into one safetensors file, or into several files with an index.

    ``max_shard_bytes`` (default `MAX_SHARD_BYTES`) limits the size of a file; a larger tensor has a
    file of its own.  ``in_thread``: a thread computes each tensor while another one is written.
    """
    shards: list[list[LazyTensor]] = [[]]
    limit = MAX_SHARD_BYTES if max_shard_bytes is None else max_shard_bytes
    for tensor in sorted(tensors, key=lambda t: -t.dtype.itemsize):  # keeps all aligned
        if shards[-1] and sum(t.num_bytes for t in (*shards[-1], tensor)) > limit:
            shards.append([])
        shards[-1].append(tensor)
    place: dict[str, str] = {}
    total = sum(tensor.num_bytes for tensor in tensors)
    with Progress(f"writing {folder}", total / 1e9, "GB") as progress:
        for number, shard in enumerate(shards, 1):
            name = _SAFETENSORS
            if len(shards) > 1:
                name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            made = counted(made_ahead(shard) if in_thread else shard, progress)
            write_file(folder / name, made, {"format": "pt"}, step=0)
            place |= {tensor.name: name for tensor in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(place.items()))}
        write_text(folder / f"{_SAFETENSORS}.index.json", json.dumps(index, indent=2) + "\n")


def write_config(folder: Path, config: Mapping[str, object]) -> None:
    """Write config.json as `transformers` does."""
    write_text(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")


def copy_beside(source: Path, folder: Path) -> None:
    """Copy and fsync the small files of ``source`` that ``folder`` lacks.

    These are tokenizer, generation config, chat template and licence.
    """
    for path in sorted({path for pattern in _BESIDE for path in source.glob(pattern)}):
        copy = folder / path.name
        if path.is_file() and not any(map(path.match, _NOT_BESIDE)) and not copy.exists():
            shutil.copyfile(path, copy)
            adopt_file(copy)
    fsync_folder(folder)
