"""Flags for process groups and their communication backend."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import option
from megatron.core.config.parse import strict_bool

_training = partial(option, group="training")
_distributed = partial(option, group="distributed")


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    high_priority_stream_groups: tuple[str, ...] = _training(
        (),
        "Process groups (tp, dp_cp, ep and so on) whose NCCL kernels run on high-priority streams.",
        nargs="*",
    )
    device: str = option(
        "auto",
        "Device to train on: cpu, cuda, or auto, which is cuda if a GPU is visible.",
        group="device and checks",
        choices=("auto", "cpu", "cuda"),
    )
    distributed_backend: str | None = _distributed(
        None,
        "Backend of torch.distributed; nccl on GPUs and gloo on CPUs if not given.",
        choices=("nccl", "gloo"),
    )
    distributed_timeout_minutes: int = _distributed(
        10,
        "Timeout of collectives in minutes.",
        at_least=1,
        at_most=365 * 24 * 60,  # libraries count nanoseconds in 64 bits
    )
    virtual_ranks: int | None = _distributed(
        None,
        "Run this many ranks as threads of one process on the CPU, to debug a parallel layout.",
        at_least=1,
    )
    local_rank: int = _distributed(
        0,
        "Rank within the node; the environment variable LOCAL_RANK takes precedence.",
        at_least=None,
    )
    lazy_mpu_init: bool | None = _distributed(
        None,
        "Let the program make process groups later.",
        parse=strict_bool,
        ignored="process groups are made at start-up",
    )
    nccl_communicator_config_path: str | None = _distributed(
        None,
        "YAML file that maps names of process groups to NCCL settings: cga_cluster_size, min_ctas,"
        " max_ctas, net_name, is_high_priority_stream.",
    )
    use_tp_pp_dp_mapping: bool = _distributed(
        False,
        "Use the rank order tp-cp-ep-pp-dp instead of tp-cp-ep-dp-pp: pipeline stages are on "
        "adjacent ranks.",
    )
