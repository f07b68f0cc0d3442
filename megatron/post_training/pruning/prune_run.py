"""A pruning run: measure importance on calibration samples, choose what is kept, write it.

Collective over all ranks: those of the forward passes and of `Importance.gathered`; then rank 0
writes the checkpoint, and an error is raised on all ranks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel.json_collectives import all_or_none, broadcast_json
from megatron.core.text_files import read_text
from megatron.core.utils import get_attr_wrapped_model
from megatron.post_training.pruning.importance import Importance, Scores
from megatron.post_training.pruning.pruning import Targets, check_targets, choose, prune
from megatron.training.checkpointing.run_checkpoint import load
from megatron.training.data.batch import next_batch
from megatron.training.data.datasets import build_datasets
from megatron.training.data.loaders import chunk_iterators, make_loader
from megatron.training.models.registry import implementation_of
from megatron.training.process.rank_print import print_rank_0
from megatron.training.runtime.runtime import Runtime
from megatron.training.runtime.setup import build_model_chunks, build_stage, setup_tokenizer
from megatron.training.step.train_step import forward_backward

_SIZES = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups num_moe_experts"
).split()


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of pruning to ``parser``."""
    group = parser.add_argument_group("pruning")
    for name in _SIZES:
        flag = name.replace("_", "-")
        group.add_argument(
            f"--target-{flag}",
            type=int,
            help=f"--{flag} of the pruned model; unchanged if not given",
        )
    group.add_argument(
        "--layers-to-drop", type=int, nargs="+", help="numbers of layers to drop, from 1 on"
    )
    group.add_argument(
        "--calib-size", type=int, default=1024, help="calibration samples (default 1024)"
    )
    group.add_argument(
        "--pruning-scores-path",
        help="JSON file of the scores: read if it exists, otherwise measured and written",
    )
    return parser


def prune_checkpoint(run: Runtime) -> None:
    """Prune --load to the sizes of the flags, and write --save.  Collective over all ranks."""
    checkpoint = run.config.checkpoint
    extra = run.config.extra
    for flag in ("load", "save"):
        if getattr(checkpoint, flag) is None:
            raise ConfigError(f"--{flag} is required: the directory of a checkpoint")
    targets = Targets(
        **{name: extra[f"target_{name}"] for name in _SIZES},
        layers_to_drop=tuple(extra["layers_to_drop"] or ()),
    )
    check_targets(run.config, targets)
    path = extra["pruning_scores_path"]
    has_scores = path is not None and Path(path).exists()
    scores: Scores = {}
    if broadcast_json(has_scores, run.groups.world):
        text = read_text(path, f"--pruning-scores-path {path}", DataError)
        scores = _parsed(text, f"--pruning-scores-path {path}")
    else:
        scores = measure(run, extra["calib_size"])
        if path is not None and run.is_rank_0:
            Path(path).write_text(json.dumps(scores), encoding="utf-8")
    kept = choose(run.config, targets, scores)
    print_rank_0(f" layers that are kept: {', '.join(str(i + 1) for i in kept.layers)}")

    def write() -> None:
        if run.is_rank_0:
            assert checkpoint.load is not None
            assert checkpoint.save is not None
            source = Path(checkpoint.load)
            target = Path(checkpoint.save)
            prune(source, target, run.config, kept, checkpoint.ckpt_step)

    all_or_none(write, checkpoint.save, run.groups.world)


def _parsed(text: str, what: str) -> Scores:
    try:
        scores = json.loads(text)
        return {str(name): [float(x) for x in values] for name, values in scores.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(f"{what} has no scores of a pruning run: {error}; remove it") from None


def measure(run: Runtime, num_samples: int) -> Scores:
    """Load the model and return the scores of its parts on training samples.

    Collective over all ranks.
    """
    step = run.config.training.micro_batch_size * run.groups.dp.size()
    if num_samples < step:
        raise ConfigError(
            f"--calib-size {num_samples}: a step has {step} samples, --micro-batch-size times the "
            "data-parallel size: use at least so many"
        )
    setup_tokenizer(run)
    build_model_chunks(run, partial(build_stage, run), wrap=False)
    load(run)
    train, *_ = build_datasets(run, (num_samples, 0, 0))
    data = chunk_iterators(run, make_loader(run, train, 0))
    models = [_gpt_of(chunk) for chunk in run.model_chunks]
    for model in run.model_chunks:
        model.eval()
    importance = Importance(models, run.groups)
    run.forward_step_func = partial(_forward_step, run)
    print_rank_0(f" measuring importance on {num_samples // step * step} samples ...")
    with torch.no_grad():
        forward_backward(
            run, data, num_samples // step, forward_only=True, collect_non_loss_data=True
        )
    importance.close()
    return importance.gathered()


def _gpt_of(chunk: nn.Module) -> GPTModel:
    model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
    assert isinstance(model, GPTModel), "the program builds GPT"
    return model


def _forward_step(
    run: Runtime, data: Iterator[dict[str, Tensor]] | None, model: nn.Module
) -> tuple[Any, Any]:
    batch = next_batch(run, data, model)
    return implementation_of(run.config).apply(model, batch), _nothing


def _nothing(_output: Tensor, *, non_loss_data: bool) -> None:
    assert non_loss_data, "no loss is needed"
