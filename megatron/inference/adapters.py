"""Load low-rank adapters for requests: a folder of PEFT, or a checkpoint that holds adapters alone.

Each rank reads the folder and keeps its part.  Order of collectives: the result of reading
(`all_or_none`), the names that a rank has taken (gather), the result of the comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import nn

from megatron.core.config.errors import CheckpointError, ConfigError
from megatron.core.dist_checkpointing.formats import open_reader
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.inference.paged_engine.adapters import LayerAdapters
from megatron.core.parallel.collectives import all_gather_json, all_or_none
from megatron.core.params.param_info import info_of
from megatron.core.peft.lora import LoraConfig, is_of_adapter, make_adapters
from megatron.training.checkpointing.base_model import base_named_in
from megatron.training.checkpointing.paths import open_checkpoint
from megatron.training.conversion.convert import describe
from megatron.training.conversion.peft import CONFIG, lora_of, read_peft
from megatron.training.conversion.source import config_beside
from megatron.training.runtime.context import RunContext

_OF_EXPERTS = ".local_experts."
_OTHERS = ("mtp.", "score.")  # prefixes of tensors that write no text


def load_adapter(run: RunContext, module: nn.Module, folder: str) -> LayerAdapters:
    """Return the adapter in ``folder``: a term for each of its layers of ``module``.

    Collective over all ranks.  Raises CheckpointError on all ranks if it is not of this model.
    """
    world = run.groups.world
    lora, tensors = all_or_none(partial(_read, run, module, folder), folder, world)
    found: dict[nn.Module, nn.Module] = {}
    taken: list[str] = []

    def take() -> None:
        for name, layer, adapter in make_adapters(module, lora):
            if name.startswith(_OTHERS):
                continue
            found[layer] = adapter.eval().requires_grad_(False)
            for param in adapter.parameters():
                _fill(param, tensors, folder)
                taken.append(info_of(param).name)

    all_or_none(take, folder, world)
    every = {name for names in all_gather_json(taken, world) for name in names}
    if left := sorted(tensors.keys() - every):
        raise CheckpointError(f"{folder} has adapters of layers that the model has not: {left[0]}")
    return found  # type: ignore[return-value]


def _fill(param: nn.Parameter, tensors: Mapping[str, LazyTensor], folder: str) -> None:
    """Copy this rank's part of a matrix."""
    info = info_of(param)
    stored = tensors.get(info.name)
    if stored is None or tuple(stored.shape) != tuple(info.global_shape):
        shape = "no values" if stored is None else f"shape {list(stored.shape)}"
        raise CheckpointError(
            f"{folder} has {shape} for {info.name}, which is {list(info.global_shape)} here: it "
            "holds adapters of another model"
        )
    whole = stored.make()
    for offset, view in info.pieces(param.data):
        box = tuple(slice(at, at + n) for at, n in zip(offset, view.shape, strict=True))
        view.copy_(whole[box])


def _read(
    run: RunContext, module: nn.Module, folder: str
) -> tuple[LoraConfig, Mapping[str, LazyTensor]]:
    """Return the settings of the adapters in ``folder``, and their tensors by global name."""
    config = run.config
    if config.adapters.lora is not None:
        raise CheckpointError(
            f"{folder}: the served checkpoint has adapters of its own: serve their base"
        )
    if config.model.cache_mla_latents:
        raise CheckpointError(
            f"{folder}: --cache-mla-latents multiplies by weights without adapters: leave it out"
        )
    if (Path(folder) / CONFIG).is_file():
        beside = config_beside(Path(config.checkpoint.load or ""))
        language = config.language_model
        tokens = run.padded_vocab_size if language.pad_vocab_in_loss else run.tokenizer.vocab_size
        try:
            _, family, shape = describe(config, tokens, beside)
        except ConfigError as error:
            raise CheckpointError(f"{folder}: {error}") from None
        tensors, flags = read_peft(Path(folder), shape, family, config.model.params_dtype)
        lora = lora_of(flags)
    else:
        content = open_checkpoint(folder)
        if base_named_in(content.asked) is None:
            raise CheckpointError(
                f"{folder} holds a complete model, no adapters: give a folder of PEFT, or what "
                "--lora-rank has saved"
            )
        reader = open_reader(content.folder)
        tensors = {
            key: LazyTensor(key, stored.dtype, stored.shape, partial(reader.read, key))
            for key, stored in reader.tensors.items()
            if is_of_adapter(key) and not key.startswith(("optimizer.", *_OTHERS))
        }
        lora = lora_of(content.asked)
    if lora.modules_to_save:
        raise CheckpointError(
            f"{folder} has complete modules (--lora-modules-to-save "
            f"{' '.join(lora.modules_to_save)}), which requests cannot choose: merge it into the "
            "model, and serve that"
        )
    if any(_OF_EXPERTS in name for name in tensors):
        raise CheckpointError(
            f"{folder} has adapters of experts, whose rows are not in the order of requests: merge "
            "them into the model, and serve it"
        )
    return lora, tensors
