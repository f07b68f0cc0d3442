"""Loaders of Energon's datasets for models that read images (--dataloader-type external).

`megatron.energon` shuffles, blends and shards the samples among the data-parallel ranks; texts and
images become tensors as those of tar shards do.  Its state, saved with each checkpoint
(--dataloader-save), restores the exact position on as many data-parallel ranks.  No collectives.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import numpy as np
import torch

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.conversations import IMAGE_TOKEN
from megatron.core.datasets.megatron_dataset import Sample
from megatron.core.datasets.samplers import collate
from megatron.core.datasets.tar_shards import IMAGE_SUFFIXES, TarSample
from megatron.core.datasets.utils import Split
from megatron.core.optional import require
from megatron.training.data.loaders import joined_tensors, state_path
from megatron.training.models.registry import implementation_of
from megatron.training.runtime.context import RunContext

logger = logging.getLogger(__name__)

_FLAG = "--dataloader-type external"
_SHUFFLE_BUFFER = 100  # samples, as in Megatron-LM's examples
_UNREADABLE = (OSError, ValueError, KeyError, AssertionError)
_SEQUENCE = 100  # samples that are read from a shard before another one


class EnergonLoader:
    """Micro-batches of an Energon loader, without the keys by which Energon finds a sample."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._loader:
            yield {name: value for name, value in batch.items() if not name.startswith("__")}

    def save_state(self) -> Any:
        """Return the state behind the last micro-batch that was read, as plain values."""
        return _plain(self._loader.save_state_rank())

    def restore(self, path: Path) -> None:
        """Continue behind the micro-batches of the run that wrote ``path``.  Raises DataError."""
        try:
            state = torch.load(path, weights_only=True)["dataloader_state_dict"]
            self._loader.restore_state_rank(_of_energon(state))
        except (*_UNREADABLE, RuntimeError, TypeError, UnpicklingError) as error:
            raise DataError(
                f"{path} restores no loader of this run: {str(error) or repr(error)}; it needs the "
                "--micro-batch-size, --num-workers and number of data-parallel ranks of the run "
                "that wrote it"
            ) from error


# A state consists of numbers, bytes, arrays, dictionaries and classes of these modules.  As plain
# values it is read without running code of the file.
_CLASS = "class of Energon"
_ARRAY = "array of numpy"
_MODULES = "savable_loader", "flavors.webdataset.sample_loader"


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(_plain, state))
    if isinstance(state, np.ndarray):
        return {_ARRAY: torch.from_numpy(state.astype(np.int64)), "dtype": state.dtype.name}
    if is_dataclass(state):
        parts = {f.name: _plain(getattr(state, f.name)) for f in fields(state)}
        return {_CLASS: type(state).__name__, **parts}
    return state


def _of_energon(state: Any) -> Any:
    if isinstance(state, list | tuple):
        return type(state)(map(_of_energon, state))
    if not isinstance(state, dict):
        return state
    if _ARRAY in state:
        return state[_ARRAY].numpy().astype(state["dtype"])
    parts = {name: _of_energon(value) for name, value in state.items()}
    if (name := parts.pop(_CLASS, None)) is None:
        return require("megatron.energon.state", _FLAG).FlexState(parts)
    modules = (require(f"megatron.energon.{module}", _FLAG) for module in _MODULES)
    kinds = {n: kind for m in modules for n, kind in vars(m).items() if is_dataclass(kind)}
    return cast(Any, kinds[name])(**parts)


def build_loaders(
    run: RunContext, config: BlendedMegatronDatasetConfig
) -> tuple[EnergonLoader, EnergonLoader | None, EnergonLoader | None]:
    """Return loaders of the Energon dataset in --data-path, the first one in its saved state.

    Raises ConfigError for flags that need another loader, DataError for a dataset that Energon
    cannot open or a state that is missing.
    """
    energon = require("megatron.energon", _FLAG)
    if config.blend is None or len(config.blend[0]) != 1 or run.config.vision.use_packed_sequence:
        raise ConfigError(
            f"{_FLAG} reads one Energon dataset in --data-path, a prepared folder or a YAML file "
            "that blends several, without --use-packed-sequence"
        )
    ((path,), _) = config.blend
    training = run.config.training
    settings = {
        "batch_size": training.micro_batch_size,
        "task_encoder": _task_encoder(run, config),
        "worker_config": energon.WorkerConfig(
            rank=run.groups.dp.rank(),
            world_size=run.groups.dp.size(),
            num_workers=run.config.data.num_workers,
            seed_offset=training.seed,
            global_error_handler=energon.errors.reraise_exception,
        ),
    }
    try:
        data = energon.get_train_dataset(
            path,
            shuffle_buffer_size=_SHUFFLE_BUFFER,
            max_samples_per_sequence=_SEQUENCE,
            **settings,
        )
        evaluates = run.config.validation.eval_iters > 0
        others = [
            _evaluation_loader(path, part, settings) if evaluates else None
            for part in ("val", "test")
        ]
    except (*_UNREADABLE, _empty()) as error:
        raise DataError(f"--data-path {path}: Energon cannot open it: {error}") from error
    train = EnergonLoader(energon.get_savable_loader(data))
    if run.state.iteration and run.config.data.dataloader_save is not None:
        saved = state_path(run, run.config.data.dataloader_save)
        if not os.path.exists(saved):
            raise DataError(
                f"--dataloader-save has no {saved}, the state of the loader at this checkpoint: "
                "restore it, or leave the flag out to begin with the first sample again"
            )
        train.restore(saved)
    return train, others[0], others[1]


def _evaluation_loader(path: str, part: str, settings: dict[str, Any]) -> EnergonLoader | None:
    energon = require("megatron.energon", _FLAG)
    try:
        data = energon.get_val_dataset(path, split_part=part, **settings)
    except _empty():
        return None
    return EnergonLoader(energon.get_loader(data))


def _empty() -> type[Exception]:
    """Return Energon's error for a split without shards."""
    name = "megatron.energon.flavors.webdataset.empty_dataset_error"
    kind: type[Exception] = require(name, _FLAG).EmptyDatasetError
    return kind


def _task_encoder(run: RunContext, config: BlendedMegatronDatasetConfig) -> Any:
    energon: Any = require("megatron.energon", _FLAG)
    decoder: Any = energon.SampleDecoder
    task_encoder: Any = energon.DefaultTaskEncoder
    cls: Any = implementation_of(run.config).datasets[False]
    source = _OneSample()
    fails = replace(config, broken_samples="fail")  # type: ignore[call-arg]
    data = cls(source, "Energon", np.arange(1), None, Split.train, fails)
    joined = joined_tensors(run)
    skips = run.config.vision.broken_samples == "skip"

    class Decoder(decoder):  # type: ignore[misc]
        """Decodes texts; images stay files.  Others would be unpickled, and are left as bytes."""

        def __init__(self) -> None:
            self._config = {"decoder": __name__}

        def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
            return {name: _decoded(name, value) for name, value in sample.items()}

    class Encoder(task_encoder):  # type: ignore[misc]
        decoder = Decoder()
        cookers = (energon.Cooker(energon.stateless(_cook)),)

        @energon.stateless  # type: ignore[untyped-decorator]
        def encode_sample(self, sample: Any) -> Sample:
            """Return the tensors of a sample; leave out one that cannot be used."""
            try:
                source.content = content_of(sample)
                row: Sample = data[0]
            except DataError as error:
                if not skips:
                    raise
                logger.warning("%s; it is left out", error.__cause__ or error)
                raise energon.SkipSample from error
            keys = ("__key__", "__restore_key__")
            return {**row, **{name: getattr(sample, name) for name in keys}}

        @energon.stateless  # type: ignore[untyped-decorator]
        def batch(self, samples: list[Sample]) -> Any:
            """Return a micro-batch."""
            keys = {"__restore_key__": (), "__key__": ""}
            rows = [{n: x for n, x in s.items() if n not in keys} for s in samples]
            return {**collate(rows, joined), **keys}

        def encode_batch(self, batch: Any) -> Any:
            """Return the micro-batch as it is."""
            return batch

    return Encoder()


class _OneSample:
    """A source with one sample, which changes."""

    content = TarSample("")

    def __len__(self) -> int:
        return 1

    def __getitem__(self, idx: int) -> TarSample:
        return self.content


class _Cooked(dict[str, Any]):
    """A sample that Energon does not know more about than its files."""

    __key__ = ""
    __restore_key__: tuple[Any, ...] = ()


def _cook(sample: Mapping[str, Any]) -> _Cooked:
    cooked = _Cooked(sample)
    cooked.__key__ = sample["__key__"]
    cooked.__restore_key__ = sample["__restore_key__"]
    return cooked


def _decoded(name: str, value: Any) -> Any:
    suffix = name.rpartition(".")[2]
    if not isinstance(value, bytes):
        return value
    if suffix == "json":
        return json.loads(value)
    return value.decode("utf-8", "replace") if suffix in ("txt", "text") else value


def content_of(sample: Any) -> TarSample:
    """Return files and text of a sample of Energon's types.  Raises DataError for other types."""
    name = sample.__key__
    if isinstance(sample, dict):
        images = [v for n, v in sample.items() if n.rpartition(".")[2] in IMAGE_SUFFIXES]
        text = sample.get("txt")
        record = json.dumps(sample["json"]).encode() if "json" in sample else None
        return TarSample(name, images, record, None if text is None else text.encode())
    if hasattr(sample, "caption"):
        return TarSample(name, [sample.image], None, str(sample.caption).encode())
    if hasattr(sample, "context") and sample.answers:
        answers = sample.answers
        answer = answers if isinstance(answers, str) else answers[0]
        question = str(sample.context)
        if IMAGE_TOKEN not in question:
            question = f"{IMAGE_TOKEN}\n{question}"
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": str(answer)}]
        return TarSample(name, [sample.image], json.dumps({"conversations": turns}).encode())
    raise DataError(
        f"{name} is a {type(sample).__name__} of Energon: captions (CaptioningSample), questions "
        "with answers (VQASample) and crude samples (jpg, json, txt) are read"
    )
