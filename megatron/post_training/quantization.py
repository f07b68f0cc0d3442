"""Calibrate a checkpoint in the layout of the run, and write the quantized checkpoint (PTQ).

An entry program parses its flags with `add_flags` and calls `quantize_checkpoint`:

    config = configure(add_flags, defaults); connect(config); quantize_checkpoint(config)

Calibration samples come from --data-path (or --sft, --mock-data), in the order of training, or are
rows of --calib-data, a file of texts.  The written checkpoint is an ordinary one of the run's
--ckpt-format, without optimizer state, with the scales of each quantized layer.

Order of collectives: building the data sets, loading, `calibrate`, saving.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.quantization.calibrate import calibrate
from megatron.core.quantization.formats import RECIPES
from megatron.core.quantization.observers import OBSERVERS
from megatron.core.quantization.quantizer import attach_quantizers
from megatron.core.text_files import read_text
from megatron.post_training.reference import score
from megatron.training.config.quantization import QuantizationFlags
from megatron.training.config.run import RunConfig
from megatron.training.data.datasets import build_datasets
from megatron.training.data.loaders import make_loader
from megatron.training.initialize import create_context, install_groups
from megatron.training.models.registry import model_kind_of
from megatron.training.process.rank_print import print_rank_0
from megatron.training.runtime.context import RunContext
from megatron.training.runtime.setup import build_model_chunks, build_stage
from megatron.training.step.run import ModelRun


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of calibration to ``parser``."""
    group = parser.add_argument_group("calibration")
    group.add_argument(
        "--calib-size", type=int, default=512, help="calibration samples (default 512)"
    )
    group.add_argument(
        "--calib-data",
        metavar="FILE",
        help="JSON lines with a key text, from which rows of --seq-length tokens are read; by "
        "default the samples come from --data-path",
    )
    group.add_argument(
        "--calib-observer",
        choices=OBSERVERS,
        default="max",
        help="how the range of inputs with a static scale is found (default max)",
    )
    return parser


def quantize_checkpoint(config: RunConfig, *, uses_all_experts: bool = False) -> None:
    """Calibrate the model of --load by --export-quant-cfg, and write --save.

    ``uses_all_experts``: calibration sends each token to all experts.  Collective over all ranks.
    Raises ConfigError or DataError.
    """
    recipes = config.quantization.recipes
    missing = [name for name in ("load", "save") if getattr(config.checkpoint, name) is None]
    if missing:
        raise ConfigError(f"--{missing[0]} is required: the directory of a checkpoint")
    if recipes is None:
        raise ConfigError(
            f"--export-quant-cfg is required: one of {', '.join(RECIPES)}; or give "
            "--kitchen-config-file"
        )
    experts = config.model.num_moe_experts
    if uses_all_experts and experts is None:
        raise ConfigError("--force-all-expert-routing: the model has no experts; leave it out")
    groups = install_groups(config)
    num_samples = config.extra["calib_size"]
    step = config.training.micro_batch_size * groups.dp.size()
    if num_samples < step:
        raise ConfigError(
            f"--calib-size {num_samples}: a step has {step} samples, --micro-batch-size times the "
            "data-parallel size: use at least so many"
        )
    # The model is loaded before it has quantizers, whose scales the checkpoint lacks.
    loaded = replace(config, quantization=QuantizationFlags())
    if uses_all_experts:
        loaded = replace(loaded, model=config.model.changed(moe_router_topk=experts))
    context = create_context(loaded, groups)
    chunks = build_model_chunks(context, partial(build_stage, context), wrap=False)
    run = ModelRun(**vars(context), model_chunks=chunks, forward_step_func=score)
    run.load()
    for chunk in chunks:
        rounds_cache = config.quantization.export_kv_cache_quant
        attach_quantizers(chunk, recipes, rounds_cache=rounds_cache)
    data = _samples(run, num_samples)

    def run_forward() -> None:
        score(run, make_loader(run, data, 0), num_samples // step, lambda _batch, _output: {})

    print_rank_0(f" calibrating on {num_samples // step * step} samples ...")
    calibrate(chunks, run_forward, groups, observer=config.extra["calib_observer"])
    saved = replace(config.checkpoint, no_save_optim=True, no_save_rng=True)
    run = replace(run, config=replace(config, checkpoint=saved))
    run.checkpoints.publish(run, run.parts, run.state.to_dict())


def _samples(run: RunContext, num_samples: int) -> Any:
    path = run.config.extra["calib_data"]
    if path is None:
        train, *_ = build_datasets(run, (num_samples, 0, 0))
        return train
    kind = model_kind_of(run.config)
    if not kind.writes_text or kind.has_encoder or kind.reads_images:
        raise ConfigError(
            f"--calib-data {path}: rows of text calibrate models like GPT, not {kind.title}; give "
            "training samples by --data-path"
        )
    return TextRows(path, num_samples, run)


class TextRows(Dataset[dict[str, Tensor]]):
    """Rows of --seq-length tokens of the texts of a JSONL file, joined by the end of document."""

    def __init__(self, path: str, num_samples: int, run: RunContext) -> None:
        """Read as many rows.  Raises DataError if the file has fewer."""
        what = f"--calib-data {path}"
        length = run.config.data.seq_length
        tokenizer = run.tokenizer
        end = tokenizer.id_of("eod")
        tokens: list[int] = []
        # A text may contain the other ends of lines that str.splitlines() knows.
        for number, line in enumerate(read_text(path, what, DataError).split("\n"), 1):
            if len(tokens) > num_samples * length:
                break
            if not line.strip():
                continue
            try:
                text = "" + json.loads(line)["text"]  # a TypeError if it is no string
            except (ValueError, KeyError, TypeError):
                raise DataError(f'{what} line {number}: it is no {{"text": ...}}') from None
            tokens += [*tokenizer.tokenize(text), *([] if end is None else [end])]
        if len(tokens) <= num_samples * length:
            raise DataError(
                f"{what} has {max(len(tokens) - 1, 0) // length} rows of --seq-length {length} "
                f"tokens: use --calib-size with so many, or more text"
            )
        self._tokens = torch.tensor(tokens[: num_samples * length + 1])
        self._length = length

    def __len__(self) -> int:
        return len(self._tokens) // self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self._tokens[index * self._length : (index + 1) * self._length + 1]
        return {
            "tokens": row[:-1],
            "labels": row[1:],
            "loss_mask": torch.ones(self._length),
            "position_ids": torch.arange(self._length),
        }
