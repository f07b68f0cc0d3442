"""Whether two forms of a model compute the same logits: theirs by `transformers`, ours here."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core import optional
from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.param_info import info_of
from megatron.core.process_groups_config import ProcessGroupCollection, make_grids
from megatron.training.config.run import RunConfig
from megatron.training.models.registry import build_model

TOLERANCE = 1e-4  # of the largest logit, or of 1
_PROMPTS, _LENGTH = 3, 16
_BYTES_PER_WEIGHT = 4.5  # float32, and what is around it


def compare_logits(
    hf_folder: Path, run: RunConfig, tensors: Mapping[str, LazyTensor], vocab_size: int
) -> str:
    """Compare on three random prompts, in float32; a sentence about it.

    Raises CheckpointError if they differ.  Not compared where `transformers` or memory lacks.
    """
    reason = optional.why_missing("transformers")
    if reason is not None:
        return f'the logits were not compared: {reason} (pip install "megatron-train[hf]")'
    needed = sum(t.num_bytes // t.dtype.itemsize for t in tensors.values()) * _BYTES_PER_WEIGHT
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > free:
        return (
            f"the logits were not compared: that takes {needed / 1e9:.0f} GB of memory and "
            f"{free / 1e9:.0f} GB are free"
        )
    if "quantization_config" in json.loads((hf_folder / "config.json").read_bytes()):
        return "the logits were not compared: theirs are of weights in few bits"
    length = min(_LENGTH, run.language_model.max_position_embeddings or _LENGTH)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, vocab_size, (_PROMPTS, length), generator=generator)
    theirs = _their_logits(hf_folder, prompts)
    ours = our_logits(run, tensors, vocab_size, prompts)
    apart = float((ours - theirs).abs().max())
    largest = max(1.0, float(theirs.abs().max()))
    if not apart <= TOLERANCE * largest:
        raise CheckpointError(
            f"the logits of both forms differ by {apart:.3g}, the largest is {largest:.3g}: "
            "this conversion is wrong and is not kept; please report it with config.json"
        )
    return f"the logits of {_PROMPTS} prompts agree within {apart:.2g} (the largest {largest:.3g})"


@torch.no_grad()
def _their_logits(folder: Path, prompts: Tensor) -> Tensor:
    transformers = optional.require("transformers", "comparing logits")
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    logits: Tensor = model.eval()(prompts, use_cache=False).logits
    return logits


@torch.no_grad()
def our_logits(
    run: RunConfig, tensors: Mapping[str, LazyTensor], vocab_size: int, prompts: Tensor
) -> Tensor:
    """[b, s] ids -> [b, s, v], of the model that ``run`` describes with ``tensors`` in it."""
    model = our_model(run, tensors, vocab_size)
    positions = torch.arange(prompts.shape[1]).expand_as(prompts)
    logits: Tensor = model(prompts, positions, None)
    return logits


@torch.no_grad()
def our_model(run: RunConfig, tensors: Mapping[str, LazyTensor], vocab_size: int) -> GPTModel:
    """The model that ``run`` describes, in float32 and not training, with ``tensors`` in it."""
    config = replace(
        run.model,
        params_dtype=torch.float32,
        bf16=False,
        fp16=False,
        perform_initialization=False,
    )
    model = build_model(
        replace(run, model=config),
        vocab_size=vocab_size,
        padded_vocab_size=vocab_size,
        groups=_alone(),
        parallel_output=False,
    ).eval()
    for name, param in model.named_parameters():
        param.copy_(tensors[info_of(param).name or name].make())
    for name, buffer in model.named_buffers():
        if name in tensors:  # the balancing bias of experts
            buffer.copy_(tensors[name].make())
    return model


def _alone() -> ProcessGroupCollection:
    """One rank, without a default process group."""
    one = ProcessGroup(0, 1)
    dense, expert = make_grids(1)
    names: dict[str, Any] = dict.fromkeys(("world", "tp", "pp", "cp", "dp", "dp_cp"), one)
    return ProcessGroupCollection(**names, dense_grid=dense, expert_grid=expert)
