"""Checks of data sources."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.errors import ConfigError
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.training.config.run import RunConfig


def one_source_of_data(run: RunConfig) -> Iterator[str]:
    """Refuse several data sources at once."""
    d = run.data
    per_split = {
        "--train-data-path": d.train_data_path,
        "--valid-data-path": d.valid_data_path,
        "--test-data-path": d.test_data_path,
    }
    given = [
        flag
        for flag, value in (
            ("--mock-data", d.mock_data),
            ("--dataset-type", d.dataset_type),
            ("--data-path", d.data_path),
            ("--data-args-path", d.data_args_path),
            (" ".join(f for f, v in per_split.items() if v), any(per_split.values())),
            ("--per-split-data-args-path", d.per_split_data_args_path),
        )
        if value
    ]
    if len(given) > 1:
        yield f"{' and '.join(given)} each set the training data: keep one"


def split_is_three_shares(run: RunConfig) -> Iterator[str]:
    """Require a valid --split, only with --data-path or --data-args-path."""
    d = run.data
    if d.split is None:
        return
    try:
        parse_and_normalize_split(d.split)
    except ConfigError as error:
        yield str(error)
    if d.train_data_path or d.valid_data_path or d.test_data_path or d.per_split_data_args_path:
        yield (
            f"--split {d.split!r} divides the data of --data-path or --data-args-path, and each "
            "split has data of its own: keep --split with --data-path to divide one data set, or "
            "the paths of the splits alone"
        )


def sets_are_evaluated_whole(run: RunConfig) -> Iterator[str]:
    """Require --full-validation for several validation sets, to compare them."""
    v = run.validation
    if v.multiple_validation_sets and not v.full_validation:
        yield "--multiple-validation-sets needs --full-validation: add it"


def documents_are_kept_apart_by_a_mask(run: RunConfig) -> Iterator[str]:
    """Refuse --reset-attention-mask without masks from the data loader.

    Causal attention without a mask does not separate documents.
    """
    d = run.data
    if d.reset_attention_mask and not d.create_attention_mask_in_dataloader:
        yield (
            "--reset-attention-mask and --no-create-attention-mask-in-dataloader exclude each "
            "other: keep the first to mask attention between documents, the second to build no "
            "masks for causal attention"
        )
