"""Hugging Face folder as a checkpoint: its tensors under our names, its config.json as flags.

`load_run` and every other reader of checkpoints opens it as `HuggingFaceReader`, in any layout.  A
rank reads the boxes that it holds; nothing is converted beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.config.value_types import JsonObject, Shape
from megatron.core.dist_checkpointing.manifest import Manifest
from megatron.core.dist_checkpointing.plain_values import plain
from megatron.core.dist_checkpointing.reader import CheckpointReader, StoredBox, StoredTensor
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.training.checkpointing.checkpoint_args import LOGGED
from megatron.training.checkpointing.save import CHECKPOINT_VERSION
from megatron.training.conversion import hf, hf_folder
from megatron.training.conversion.quantized import plain_numbers
from megatron.training.conversion.shape import args_of
from megatron.training.conversion.source import default_args, embedding_of
from megatron.training.conversion.tensors import box_of
from megatron.training.conversion.vision import (
    VIT_CLASSIFIER,
    flags_of_classifier,
    import_classifier,
    is_image_classifier,
)
from megatron.training.conversion.vision_language import (
    flags_of,
    import_tensors,
    is_vision_language,
    shape_of_config,
)
from megatron.training.runtime.context import TrainState
from megatron.training.tokenizer import TokenizerSpec, create_tokenizer


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """Content of a Hugging Face folder.

    ``flags``: dest -> value, of the model alone; ``fresh``: names of tensors that the folder lacks.
    """

    architecture: str
    flags: Mapping[str, object]
    tensors: Mapping[str, LazyTensor]
    fresh: Sequence[str] = ()

    @property
    def rows(self) -> int | None:
        """Rows of the embedding of words; None for a classifier of images."""
        if self.architecture == VIT_CLASSIFIER:
            return None
        return embedding_of(self.tensors).shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of most weights: that of the embedding, or of a classifier's head."""
        if self.architecture == VIT_CLASSIFIER:
            return self.tensors["classifier.weight"].dtype
        return embedding_of(self.tensors).dtype

    @property
    def num_weights(self) -> int:
        """Return the number of values in all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    def args(self, tokenizer: Path, kept_at: Path) -> JsonObject:
        """Return the flags of the model, its precision and its tokenizer.

        ``kept_at``: where runs find the tokenizer that is in ``tokenizer``.
        """
        args = {**self.flags, **precision(self.dtype)}
        if self.rows is None:
            return args
        return args | tokenizer_args(tokenizer, kept_at, self.rows) | {"vocab_extra_ids": None}


def read_folder(folder: Path) -> ModelFolder:
    """Read config.json and the headers of the weights; each tensor is read when it is used.

    Raises CheckpointError unless each of their tensors is used once and each of ours is complete.
    """
    config = hf_folder.read_config(folder)
    weights = hf_folder.read_weights(folder)
    if is_image_classifier(config):
        return ModelFolder(
            architecture=VIT_CLASSIFIER,
            flags=flags_of_classifier(config),
            tensors=import_classifier(config, weights),
        )
    if is_vision_language(config):
        images = shape_of_config(config)
        return ModelFolder(
            architecture=images.family.architecture,
            flags=flags_of(images),
            tensors=import_tensors(images, plain_numbers(weights, config)),
        )
    model = hf.import_model(config, weights)
    return ModelFolder(
        architecture=model.family.architecture,
        flags=args_of(model.shape),
        tensors=model.tensors,
        fresh=model.fresh,
    )


def precision(dtype: torch.dtype) -> dict[str, bool]:
    """Return the flags of weights in ``dtype``."""
    return {"bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}


def tokenizer_args(folder: Path, kept_at: Path, rows: int) -> dict[str, object]:
    """Return the arguments of the tokenizer in ``folder``, or of a NullTokenizer if it has none.

    If the embedding has more ``rows`` than the tokenizer has tokens, padded_vocab_size keeps them.
    """
    if not hf_folder.has_tokenizer(folder):
        return {"tokenizer_type": "NullTokenizer", "vocab_size": rows - 1}  # it adds EOD
    found: dict[str, object] = {
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": str(kept_at.resolve()),
    }
    here = TokenizerSpec(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    if create_tokenizer(here).vocab_size == rows:
        return found
    return {**found, "padded_vocab_size": rows, "pad_vocab_in_loss": True}


class HuggingFaceReader(CheckpointReader):
    """Reader of a Hugging Face folder, as a checkpoint of weights without training state."""

    def __init__(self, folder: Path) -> None:
        """Open ``folder``.  Raises CheckpointError if it holds no model that is known here."""
        self.folder = folder
        self.manifest = Manifest(iteration=0, layout={}, files={})
        files = (
            path
            for pattern in ("*.json", "*.safetensors", "*.bin")
            for path in folder.glob(pattern)
        )
        stamps = sorted((path.name, path.stat().st_mtime_ns) for path in files)
        self.model, self._args = _read_once(folder.resolve(), tuple(stamps))
        self.tensors = {
            key: StoredTensor(t.shape, t.dtype, (StoredBox((0,) * len(t.shape), t.shape),))
            for key, t in self.model.tensors.items()
        }

    def common(self) -> JsonObject:
        """Return the content of a checkpoint of a run that has not begun."""
        return {
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": 0,
            "counters": TrainState().to_dict(),
            "args": dict(self._args),
        }

    def rank_state(self, rank: int) -> None:
        """Return None: a model folder has no state of ranks."""

    def close(self) -> None:
        """Do nothing: files are mapped while a box is read."""

    def read_box(self, key: str, offset: Shape, out: Tensor) -> None:
        """Fill ``out`` with the box of its shape at ``offset``, converting to its dtype."""
        self._stored(key)
        with torch.no_grad():
            out.copy_(box_of(self.model.tensors[key], offset, tuple(out.shape)))


@lru_cache(maxsize=4)
def _read_once(folder: Path, stamps: tuple[tuple[str, int], ...]) -> tuple[ModelFolder, JsonObject]:
    """Read ``folder`` and its command line; ``stamps`` tell whether its files have changed."""
    model = read_folder(folder)
    # Settings of a run, which the folder does not contain, are left out.
    defaults = {name: value for name, value in default_args().items() if name not in LOGGED}
    args = defaults | model.args(folder, folder)
    return model, {name: plain(value) for name, value in args.items()}
