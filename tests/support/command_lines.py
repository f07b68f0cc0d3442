"""A command line that can start, for tests that break it in one place; changed defaults."""

from __future__ import annotations

from megatron.core.config.errors import ConfigError
from megatron.training.arguments.parser import parse_args
from megatron.training.arguments.resolve import resolve
from megatron.training.config.run import RunConfig

GOOD: dict[str, str | None] = {
    "--num-layers": "4",
    "--hidden-size": "64",
    "--num-attention-heads": "8",
    "--seq-length": "32",
    "--micro-batch-size": "2",
    "--train-iters": "10",
    "--lr": "0.001",
    "--mock-data": None,
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "100",
}

# Defaults that differ from Megatron-LM's: dest -> reason.
CHANGED_DEFAULTS: dict[str, str] = {
    "ckpt_format": (
        "safetensors_dist loads in any layout, optimizer included, holds no pickle and is written "
        "so that a kill at any moment leaves the previous checkpoint whole"
    ),
    "distributed_backend": "nccl on GPUs and gloo on CPUs, so that a CPU run needs no flag",
}


def argv(words: str = "", without: tuple[str, ...] = ()) -> list[str]:
    """GOOD with ``words`` behind it, less the flags in ``without``."""
    kept = [
        part
        for flag, value in GOOD.items()
        if flag not in without
        for part in (flag, value)
        if part is not None
    ]
    return [*kept, *words.split()]


def run_of(words: str = "", world_size: int = 1, without: tuple[str, ...] = ()) -> RunConfig:
    """What GOOD with ``words`` resolves to."""
    return resolve(parse_args(argv=argv(words, without)), world_size)


def problems_of(words: str, world_size: int = 1, without: tuple[str, ...] = ()) -> list[str]:
    """The sentences with which GOOD plus ``words`` is refused; empty if it is not."""
    try:
        run_of(words, world_size, without)
    except ConfigError as error:
        return [line.removeprefix("  - ") for line in str(error).splitlines()[1:]]
    return []
