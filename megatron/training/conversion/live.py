"""Write the model of a run as a Hugging Face folder (--save-hf), from memory.

Rank 0 writes the files.  It asks for one tensor of ours after the other, whose parts the ranks that
hold them send.  Adapters become a folder of PEFT, or are added to the weights of their model.

Order of collectives: the parameter all-gathers of `model_tensors`, the list of parts (gather,
broadcast), for each tensor its number (broadcast) and its parts (send, receive), the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.core.dist_checkpointing.folders import CheckpointFolder, is_filled
from megatron.core.dist_checkpointing.records import TensorRecord, to_write
from megatron.core.dist_checkpointing.safetensors_file import DTYPE_NAMES, DTYPES, LazyTensor
from megatron.core.parallel.collectives import (
    all_or_none,
    broadcast_json,
    gather_json,
    on_rank_0,
    on_wire,
)
from megatron.core.quantization.quantizer import quantized_layers
from megatron.training.checkpointing.base_model import base_named_in
from megatron.training.checkpointing.checkpoint_tensors import model_tensors
from megatron.training.checkpointing.save import retention_of
from megatron.training.conversion import hf_folder, peft
from megatron.training.conversion.convert import describe, write_model
from megatron.training.conversion.quantized_export import (
    BUFFER,
    COMPRESSED_TENSORS,
    quantization_of,
)
from megatron.training.conversion.shape import shape_of
from megatron.training.conversion.source import BESIDE, EMBEDDING, config_beside, embedding_of
from megatron.training.models.registry import model_kind_of
from megatron.training.process.rank_print import print_rank_0
from megatron.training.runtime.context import StepResult
from megatron.training.step.run import Callback, ModelRun, TrainingRun

_SNAPSHOT = re.compile(r".*/models--([\w.-]+?)--([\w.-]+)/snapshots/\w+")
_STEP = "-step-"  # between --save-hf and a step
_END = -1


def check_model(run: ModelRun) -> None:
    """Raise CheckpointError if the model of ``run`` has no form at Hugging Face.

    Only a run that was done when it started may find a folder that has files.  Called before
    training; collective over all ranks.
    """
    target = Path(run.config.checkpoint.save_hf or "")
    is_done = isinstance(run, TrainingRun) and run.finished()

    def check() -> None:
        if is_filled(target) and not is_done:
            raise CheckpointError(f"{target} has files: choose another folder, or remove it")
        recipes = {quantizer.recipe.name for _, quantizer in quantized_layers(run.model_chunks)}
        if len(recipes) > 1:
            raise CheckpointError(
                f"{target}: the model has the recipes {', '.join(sorted(recipes))}, and the layers "
                "of a Hugging Face folder are written by one: leave --save-hf out"
            )
        kind = model_kind_of(run.config)
        if not kind.reads_images and not kind.classifies_images:
            describe(run.config, run.tokenizer.vocab_size, config_beside(_origin(run)))

    all_or_none(check, "--save-hf", run.groups.world)


class StepFolders(Callback):
    """Write the model every --save-hf-interval steps.  Collective over all ranks."""

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        config = run.config.checkpoint
        step = run.state.iteration
        assert config.save_hf_interval is not None, "it adds this callback"
        if step % config.save_hf_interval:
            return
        try:
            with run.callbacks.paused(run, "checkpoint"):
                save_model(run, step)
        except CheckpointError as error:  # on all ranks alike
            print_rank_0(f"WARNING: {error}; training goes on")


def save_model(run: ModelRun, step: int | None = None) -> None:
    """Write the folder of --save-hf, or of ``step``; it has a temporary name until it is complete.

    Collective over all ranks.  Raises CheckpointError on all ranks if rank 0 cannot write it.
    """
    target = Path(run.config.checkpoint.save_hf or "")
    if step is not None:
        target = target.with_name(f"{target.name}{_STEP}{step}")
    has_adapters = run.config.adapters.lora is not None
    is_peft = has_adapters and not run.config.checkpoint.save_hf_merged
    tensors = [
        tensor
        for tensor in model_tensors(run.parts)
        if not (is_peft and tensor.is_constant) or tensor.key == EMBEDDING
    ]
    world = run.groups.world
    if step is None and on_rank_0(lambda: is_filled(target), f"--save-hf {target}", world):
        print_rank_0(f"  {target} stays as it is: the run was done when it started")
        return
    shared = _SharedTensors.of(to_write(tensors, share_work=False), world)

    def write() -> None:
        if world.rank() > 0:
            shared.serve()
            return
        try:
            _write(run, target, shared.lazy(), is_peft=is_peft, replaces=step is not None)
            if step is not None:
                _remove_older(run, target, step)
        finally:
            shared.announce(_END)

    print_rank_0(f"writing the model to {target} in the form of Hugging Face")
    all_or_none(write, f"--save-hf {target}", world)
    print_rank_0(f"  successfully wrote {'adapters' if is_peft else 'the model'} to {target}")


def _remove_older(run: ModelRun, target: Path, step: int) -> None:
    """Remove folders of earlier steps, as --keep-last-checkpoints and its like say."""
    prefix = target.name.removesuffix(str(step))
    found = {path.name.removeprefix(prefix): path for path in target.parent.glob(f"{prefix}*")}
    steps = sorted((int(name) for name in found if name.isdecimal()), reverse=True)
    order = [CheckpointFolder(found[str(each)], each) for each in steps if each <= step]
    kept = retention_of(run.config.checkpoint, run.state.to_dict())
    for old in kept.select_expired(order):
        hf_folder.remove(old.folder)


def _write(
    run: ModelRun,
    target: Path,
    weights: Mapping[str, LazyTensor],
    *,
    is_peft: bool,
    replaces: bool,
) -> None:
    config = run.config
    has_text = not model_kind_of(config).classifies_images
    vocab_size = embedding_of(weights).shape[0] if has_text else 1
    origin = _origin(run)
    came_with = config_beside(origin)
    hf_folder.sweep(target)
    with hf_folder.new_folder(target, replaces=replaces) as folder:
        if is_peft:
            _, family, shape = describe(config, vocab_size, came_with)
            name = _base_name(run) or came_with.get("_name_or_path")
            warning = peft.write_peft(folder, weights, config.asked, shape, family, name)
            if warning:
                print_rank_0(warning)
            return
        if config.adapters.lora is not None:
            weights = peft.merged(weights, config.asked, shape_of(config, vocab_size))
        quant = quantization_of(None, COMPRESSED_TENSORS, weights, config.quantization.recipes)
        weights = {name: tensor for name, tensor in weights.items() if BUFFER not in name}
        write_model(folder, config, weights, vocab_size, came_with, quant=quant, in_thread=False)
        tokenizer = Path(config.tokenizer.tokenizer_model or "-")
        beside = tokenizer if hf_folder.has_tokenizer(tokenizer) else origin
        if beside is not None:
            hf_folder.copy_beside(beside, folder)


def _origin(run: ModelRun) -> Path | None:
    """Return the folder of the config.json that the model was made from; None if it is gone."""
    saves = run.checkpoints
    base = base_named_in(saves.adapter_base or {})
    places = [saves.started_from, saves.loaded_from, base.folder if base is not None else None]
    for place in filter(None, places):
        for folder in (Path(place), Path(place).parent / BESIDE):
            if (folder / hf_folder.CONFIG).exists():
                return folder
    tokenizer = Path(run.config.tokenizer.tokenizer_model or "-")
    return tokenizer if (tokenizer / hf_folder.CONFIG).exists() else None


def _base_name(run: ModelRun) -> str | None:
    """Return the name of the model of the hub, or the folder, that the adapters belong to."""
    base = base_named_in(run.checkpoints.adapter_base or {})
    if base is None or base.folder is None or not (Path(base.folder) / hf_folder.CONFIG).exists():
        return None
    found = _SNAPSHOT.fullmatch(base.folder)
    return f"{found[1]}/{found[2]}" if found else base.folder


@dataclass(frozen=True)
class _SharedTensors:
    """Tensors whose parts are on several ranks; rank 0 collects one at a time.

    ``mine``: this rank's parts.  ``entries``, which are the same on all ranks: key -> shape, name
    of the dtype, and parts.
    """

    world: ProcessGroup
    mine: Mapping[str, TensorRecord]
    entries: Mapping[str, JsonObject]

    @classmethod
    def of(cls, tensors: Iterable[TensorRecord], world: ProcessGroup) -> _SharedTensors:
        """Exchange which rank holds which parts.  Collective."""
        mine = {tensor.key: tensor for tensor in tensors}
        own = {
            key: {
                "shape": tensor.global_shape,
                "dtype": DTYPE_NAMES[tensor.dtype],
                "parts": [(world.rank(), piece.offset, piece.shape) for piece in tensor.pieces],
            }
            for key, tensor in mine.items()
        }
        entries: dict[str, JsonObject] = {}
        for of_rank in gather_json(own, world) or ():
            for key, entry in of_rank.items():
                found = entries.setdefault(key, {**entry, "parts": []})
                found["parts"] += entry["parts"]
        return cls(world, mine, broadcast_json(entries, world))

    def lazy(self) -> dict[str, LazyTensor]:
        """Return the complete tensors, for rank 0; each is collected when it is used."""
        return {
            key: LazyTensor(
                key, DTYPES[entry["dtype"]], tuple(entry["shape"]), partial(self._collect, number)
            )
            for number, (key, entry) in enumerate(self.entries.items())
        }

    def announce(self, number: int) -> int:
        """Return the number that rank 0 gives: of the tensor it needs now, or `_END`."""
        if self.world.size() == 1:
            return number
        sent = on_wire(torch.tensor([number]), self.world)
        dist.broadcast(sent, group=self.world, group_src=0)
        return int(sent)

    def serve(self) -> None:
        """Send the parts of this rank that rank 0 asks for, until `_END`."""
        keys = list(self.entries)
        where = on_wire(torch.empty(0), self.world).device
        while (number := self.announce(_END)) != _END:
            for _, values in self._own_parts(keys[number]):
                data = values.to(where).contiguous().reshape(-1).view(torch.uint8)
                dist.send(data, group=self.world, group_dst=0)

    def _own_parts(self, key: str) -> Iterator[tuple[Sequence[int], Tensor]]:
        if key in self.mine:
            tensor = self.mine[key]
            yield from ((piece.offset, piece.data.to(tensor.dtype)) for piece in tensor.pieces)

    def _collect(self, number: int) -> Tensor:
        """Return a complete tensor in host memory, on rank 0."""
        self.announce(number)
        key, entry = list(self.entries.items())[number]
        out = torch.empty(tuple(entry["shape"]), dtype=DTYPES[entry["dtype"]])
        parts = [(offset, values) for offset, values in self._own_parts(key)]
        for rank, offset, shape in entry["parts"]:
            if rank > 0:
                values = torch.empty(tuple(shape), dtype=out.dtype)
                data = on_wire(values.reshape(-1).view(torch.uint8), self.world)
                dist.recv(data, group=self.world, group_src=rank)
                parts.append((offset, data.view(out.dtype).reshape(values.shape)))
        with torch.no_grad():
            for offset, values in parts:
                box = tuple(slice(at, at + n) for at, n in zip(offset, values.shape, strict=True))
                out[box] = values
        return out
