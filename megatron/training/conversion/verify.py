"""Check that a model computes the same logits in `transformers` and in this program."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import HashStore, ProcessGroup
from torch.nn.functional import cross_entropy

from megatron.core import optional
from megatron.core.config.errors import CheckpointError
from megatron.core.datasets.images import STATISTICS, patches_of
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.models.multimodal.llava_model import DEFAULT_IMAGE_TOKEN_INDEX
from megatron.core.models.vision.kinds import KINDS
from megatron.core.parallel.process_groups_config import ProcessGroupCollection, make_grids
from megatron.core.params.param_info import info_of
from megatron.core.progress import Progress
from megatron.core.tile_arrangement import TileArrangement
from megatron.training.config.run import RunConfig
from megatron.training.conversion.hf_folder import read_config
from megatron.training.models.registry import build_model_stage, model_kind_of
from megatron.training.models.vlm import embeddings_per_tile, ends_rows, sees_images_whole

TOLERANCE = 1e-4  # relative to the largest logit, or absolute if that is below 1
_PROMPTS, _LENGTH = 3, 16
_BYTES_PER_WEIGHT = 4.5  # float32 and overhead


def compare_logits(
    hf_folder: Path,
    config: RunConfig,
    tensors: Mapping[str, LazyTensor],
    vocab_size: int,
    fresh: Sequence[str] = (),
) -> str:
    """Compare the logits of three random prompts in float32 and return a message about it.

    Raises CheckpointError if they differ by more than `TOLERANCE`.  Nothing is compared if
    `transformers` or memory is missing; outputs that depend on ``fresh`` tensors are left out.
    """
    reason = optional.why_missing("transformers")
    if reason is not None:
        return f'the logits were not compared: {reason} (pip install "megatron-train[hf]")'
    needed = sum(math.prod(t.shape) for t in tensors.values()) * _BYTES_PER_WEIGHT
    free = free_memory()
    if needed > free:
        return (
            f"the logits were not compared: that takes {needed / 1e9:.0f} GB of memory and "
            f"{free / 1e9:.0f} GB are free"
        )
    if "quantization_config" in read_config(hf_folder):
        return "the logits were not compared: theirs are of weights in few bits"
    if any(name.startswith("lm_head.") for name in fresh):
        return "the logits were not compared: the weights make none"
    kind = model_kind_of(config)
    prompts = synthetic_inputs(config, vocab_size)
    if kind.reads_images:  # the token of an image is put among others later
        described = json.loads((hf_folder / "config.json").read_bytes())
        prompts[prompts == described.get("image_token_index", described.get("image_token_id"))] = 0
    with Progress("comparing the logits of both forms"):
        theirs = _their_logits(hf_folder, config, prompts)
        ours = our_logits(config, tensors, vocab_size, prompts)
    apart, _, largest = differences(ours if not fresh else ours[:1], theirs)
    inputs = f"{len(prompts)} {'images' if kind.classifies_images else 'prompts'}"
    return f"the logits of {inputs} agree within {apart:.2g} (the largest {largest:.3g})"


def synthetic_inputs(config: RunConfig, vocab_size: int) -> Tensor:
    """Return random ids [b, s], or images [b, 3, H, W] for a classifier; the same in each call."""
    generator = torch.Generator().manual_seed(1)
    if model_kind_of(config).classifies_images:
        size = (2, 3, config.vision.img_h, config.vision.img_w)
        return torch.randn(size, generator=generator)
    length = min(_LENGTH, config.language_model.max_position_embeddings or _LENGTH)
    return torch.randint(0, vocab_size, (_PROMPTS, length), generator=generator)


def differences(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> tuple[float, float, float]:
    """Return the maximum and the mean difference of logits, and the largest logit, at least 1.

    Raises CheckpointError if the maximum exceeds `TOLERANCE`.  Outputs that ``ours`` lacks are not
    compared.
    """
    errors = [(mine - other).abs() for mine, other in zip(ours, theirs, strict=False)]
    apart = max(float(error.max()) for error in errors)
    mean = sum(float(error.sum()) for error in errors) / sum(error.numel() for error in errors)
    largest = max(1.0, *(float(other.abs().max()) for _, other in zip(ours, theirs, strict=False)))
    if not apart <= TOLERANCE * largest:
        raise CheckpointError(
            f"the logits of both forms differ by {apart:.3g}, the largest is {largest:.3g}: "
            "this conversion is wrong and is not kept; please report it with config.json"
        )
    return apart, mean, largest


def report_quantized(
    folder: Path,
    config: RunConfig,
    exact: Mapping[str, LazyTensor],
    rounded: Mapping[str, LazyTensor],
    vocab_size: int,
    text: Tensor | None = None,
) -> str:
    """Return a message on size, logit error and perplexity of quantized weights.

    ``exact``, ``rounded``: the weights before, and as ``folder`` holds them; inputs of layers are
    not rounded.  ``text``: ids [b, s]; None takes random ones, whose perplexity is not reported.
    """
    before = sum(tensor.num_bytes for tensor in exact.values())
    after = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    size = f"{after / 1e6:.3g} MB in place of {before / 1e6:.3g} MB"
    if sum(math.prod(t.shape) for t in exact.values()) * 2 * _BYTES_PER_WEIGHT > free_memory():
        return f"{size}; the logits were not compared: the memory is too small"
    length = min(_LENGTH, config.language_model.max_position_embeddings or _LENGTH)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, vocab_size, (_PROMPTS, length), generator=generator)
    prompts = prompts if text is None else text
    models = [our_model(config, tensors, vocab_size) for tensors in (exact, rounded)]
    apart, largest, same = [], [], []
    losses = torch.zeros(2)
    started_s = perf_counter()
    with Progress("comparing the logits before and after rounding"), torch.no_grad():
        for row in prompts.split(1):
            first, second = (next(our_outputs(model, config, row)) for model in models)
            apart.append((first - second).abs())
            largest.append(first.abs().max())
            same.append(first.argmax(-1) == second.argmax(-1))
            for number, logits in enumerate((first, second)):
                losses[number] += cross_entropy(logits[0, :-1], row[0, 1:])
    rate = 2 * prompts.numel() / (perf_counter() - started_s)
    of_text = ""
    if text is not None:
        of_text = "; perplexity {:.4g} before, {:.4g} after".format(*(losses / len(text)).exp())
    errors = torch.cat(apart)
    return (
        f"{size}; rounding the weights changes logits by {float(errors.mean()):.2g} on average, "
        f"{float(errors.max()):.2g} at most (the largest {float(max(largest)):.3g}); the best "
        f"token stays in {float(torch.cat(same).float().mean()):.0%} of {prompts.numel()} places"
        f"{of_text}; {rate:.3g} tokens/s here in fp32"
    )


def free_memory() -> int:
    """Return the free bytes of memory."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@torch.no_grad()
def _their_logits(folder: Path, config: RunConfig, prompts: Tensor) -> list[Tensor]:
    transformers = optional.require("transformers", "comparing logits")
    transformers.utils.logging.disable_progress_bar()
    kind = model_kind_of(config)
    auto = "SequenceClassification" if config.preference.reward_model else kind.transformers_class
    if kind.has_masked_lm_head and config.language_model.bert_binary_head:
        auto = "PreTraining"
    # Prompts have no padding.
    more: dict[str, Any] = {"pad_token_id": None} if config.preference.reward_model else {}
    loader = getattr(transformers, f"AutoModelFor{auto}")
    described = read_config(folder)
    names = described.get("architectures")
    name = str(names[0]) if names and isinstance(names, list) else ""
    named = getattr(transformers, name, None)
    if auto == "CausalLM" and name.endswith(auto) and named is not None:
        # transformers does not find the class of each family by its model_type.
        loader = named
        its = named.config_class
        described = json.loads(json.dumps(described), object_hook=_as_float)
        more["config"] = its.from_dict({**described, "model_type": its.model_type})
    model = loader.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
        **more,
    )
    return list(their_outputs(model.eval(), config, prompts))


def _as_float(value: dict[str, Any]) -> Any:
    """Return the float that transformers writes as an object because JSON has no infinity."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


@torch.no_grad()
def our_logits(
    config: RunConfig, tensors: Mapping[str, LazyTensor], vocab_size: int, prompts: Tensor
) -> list[Tensor]:
    """Return logits [b, s, v] of ids [b, s], by the model that ``config`` and ``tensors`` describe.

    For BERT with a binary head, also its logits [b, 2].
    """
    return list(our_outputs(our_model(config, tensors, vocab_size), config, prompts))


def their_outputs(model: nn.Module, run: RunConfig, ids: Tensor) -> Iterator[Tensor]:
    """Yield the outputs of a `transformers` model, to compare with those of `our_outputs`."""
    kind = model_kind_of(run)
    if kind.reads_images:
        config: Any = model.config
        rows, _, images = _with_images(run, ids, config.image_token_id)
        yield model(input_ids=rows, use_cache=False, **images).logits
    elif kind.classifies_images:
        yield model(ids).logits
    elif run.preference.reward_model:
        yield torch.cat([model(row.unsqueeze(0), use_cache=False).logits for row in ids])
    elif kind.has_encoder:
        yield model(input_ids=ids, decoder_input_ids=ids.flip(1), use_cache=False).logits
    elif kind.has_masked_lm_head:
        yield from model(ids, token_type_ids=token_types(run, ids), return_dict=True).to_tuple()
    else:
        yield model(ids, use_cache=False).logits


def our_outputs(model: nn.Module, config: RunConfig, ids: Tensor) -> Iterator[Tensor]:
    """Yield the logits of ids [b, s]; the decoder of an encoder-decoder reads them reversed."""
    kind = model_kind_of(config)
    if kind.reads_images:
        rows, images, _ = _with_images(config, ids, None)
        places = torch.arange(rows.shape[1]).expand_as(rows)
        yield model(input_ids=rows, position_ids=places, **images)[0]
    elif kind.classifies_images:
        yield model(ids)
    elif config.preference.reward_model:
        yield model(ids, torch.arange(ids.shape[1]).expand_as(ids), None, labels=ids)[:, -1:]
    elif kind.has_encoder:
        yield model(ids, ids.flip(1))
    elif kind.has_masked_lm_head:
        outputs = model(ids, None, token_types(config, ids))
        yield from (logits for logits in outputs if logits is not None)
    else:
        yield model(ids, torch.arange(ids.shape[1]).expand_as(ids), None)


def _with_images(
    config: RunConfig, ids: Tensor, their_token: int | None
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Put an image behind the first token of each row.

    ``their_token``: the id that stands for one embedding of an image; None: one id of ours stands
    for all of them.  Return the rows and the further arguments of our model and of theirs.
    """
    v = config.vision
    generator = torch.Generator().manual_seed(2)
    ours: dict[str, Tensor] = {}
    theirs: dict[str, Tensor] = {}
    reads_any_size = KINDS[v.vision_model_type].reads_any_size
    if reads_any_size:  # an image of 4 x 6 patches, in blocks of 2 x 2
        count = 6
        size: tuple[int, ...] = (len(ids), 3, 4 * v.patch_dim, 6 * v.patch_dim)
        ours["num_image_tiles"] = torch.tensor([count] * len(ids))
        ours["image_sizes"] = torch.tensor([[1, 4, 6]] * len(ids))
    else:
        count = embeddings_per_tile(v)
        size = (len(ids), 1, 3, v.img_h, v.img_w)
    if v.grids:  # every image fills the same grid, so that rows have one length
        height, width = v.grids[-1]
        grid = (height // v.img_h, width // v.img_w, height, width - 1)
        arrangement = TileArrangement(*grid, side=math.isqrt(count))
        count = len(arrangement.order)
        size = (len(ids), arrangement.num_tiles, 3, v.img_h, v.img_w)
        ours["image_sizes"] = torch.tensor([grid] * len(ids))
        theirs["image_sizes"] = torch.tensor([grid[2:]] * len(ids))
    images = torch.randn(size, generator=generator)
    ours["images"] = images.flatten(0, 1)
    theirs["pixel_values"] = images if v.grids else images.flatten(0, 1)
    token, count = (DEFAULT_IMAGE_TOKEN_INDEX, 1) if their_token is None else (their_token, count)
    image = [token] * count
    if reads_any_size:
        frames = STATISTICS[v.vision_model_type].frames
        blocks = [patches_of(each.numpy(), v.patch_dim, frames) for each in images]
        ours["images"] = torch.from_numpy(np.concatenate(blocks))
        theirs["pixel_values"] = ours["images"].flatten(0, 1)
    if ends_rows(v):
        theirs |= {"pixel_values": images, "image_sizes": torch.tensor([size[2:]] * len(ids))}
        if their_token is not None:
            image = [x for end in v.image_row_end_tokens for x in (*[token] * 3, end)]
    elif reads_any_size:
        theirs["image_grid_thw"] = ours["image_sizes"]
    rows = torch.cat([ids[:, :1], ids.new_tensor([image] * len(ids)), ids[:, 1:]], 1)
    if reads_any_size and not ends_rows(v):
        theirs["mm_token_type_ids"] = (rows == token).int()
    if sees_images_whole(v):
        theirs["token_type_ids"] = (rows == token).int()
    return rows, ours, theirs


def token_types(config: RunConfig, ids: Tensor) -> Tensor | None:
    """Return token types of ids [b, s]: the second half is the second sentence."""
    if not config.language_model.bert_binary_head:
        return None
    return (torch.arange(ids.shape[1]) >= ids.shape[1] // 2).long().expand_as(ids)


@torch.no_grad()
def our_model(run: RunConfig, tensors: Mapping[str, LazyTensor], vocab_size: int) -> nn.Module:
    """Build the model that ``run`` describes, in float32 and eval mode, and load ``tensors``."""
    config = run.model.changed(
        params_dtype=torch.float32, bf16=False, fp16=False, perform_initialization=False
    )
    model = build_model_stage(
        replace(run, model=config),
        vocab_size=vocab_size,
        padded_vocab_size=vocab_size,
        groups=groups_of_one_rank(),
        parallel_output=False,
    ).eval()
    for name, param in model.named_parameters():
        made = tensors[info_of(param).name or name].make()
        param.copy_(made[: len(param)] if param.dim() else made)  # without vocabulary padding
    for name, buffer in model.named_buffers():
        if name in tensors:  # router.expert_bias
            buffer.copy_(tensors[name].make())
    return model


def model_on_meta(run: RunConfig, vocab_size: int) -> nn.Module:
    """Build the model that ``run`` describes for one rank, without storage."""
    with torch.device("meta"):
        return build_model_stage(
            run,
            vocab_size=vocab_size,
            padded_vocab_size=vocab_size,
            groups=groups_of_one_rank(),
        )


def groups_of_one_rank() -> ProcessGroupCollection:
    """Return process groups of a single rank, without a default process group."""
    one = ProcessGroup(HashStore(), 0, 1)
    dense, expert = make_grids(1)
    groups = dict.fromkeys(("world", "tp", "pp", "cp", "dp", "dp_cp"), one)
    return ProcessGroupCollection(**groups, dense_grid=dense, expert_grid=expert)
