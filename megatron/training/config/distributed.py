"""Process groups and their back end."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config import states
from megatron.core.config.option import option
from megatron.core.config.parse import strict_bool


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Process groups and their back end."""

    enable_gloo_process_groups: bool = option(
        True,
        "Make no gloo groups beside the NCCL ones.",
        group="training",
        flag="--disable-gloo-process-groups",
        ignored="only groups that are used are made",
    )
    high_priority_stream_groups: tuple[str, ...] = option(
        (),
        "Process groups whose communication runs on high-priority GPU streams.",
        group="training",
        nargs="*",
        ignored="communication runs on the streams of the collective library",
    )
    device: str = option(
        "auto",
        "Where to compute: auto takes a GPU if one is visible.",
        group="device and checks",
        choices=("auto", "cpu", "cuda"),
    )
    distributed_backend: str | None = option(
        None,
        "Collective library; nccl on GPUs and gloo on CPUs if not given.",
        group="distributed",
        choices=("nccl", "gloo"),
    )
    distributed_timeout_minutes: int = option(
        10,
        "Minutes after which a collective that does not finish is an error.",
        group="distributed",
    )
    virtual_ranks: int | None = option(
        None,
        "Run so many ranks as threads of this one process, on the CPU: a layout in a debugger.",
        group="distributed",
    )
    local_rank: int = option(
        0,
        "Number of this rank on its node; LOCAL_RANK of the environment goes before it.",
        group="distributed",
    )
    lazy_mpu_init: bool | None = option(
        None,
        "Let the program make process groups later.",
        group="distributed",
        parse=strict_bool,
        ignored="process groups are made at start-up",
    )
    use_sharp: bool = option(
        False,
        "Let the network switches reduce gradients.",
        group="distributed",
        refused="in-network reduction is not in this version; drop the flag, or set "
        "NCCL_COLLNET_ENABLE=1",
    )
    sharp_enabled_group: str | None = option(
        None,
        "Process group that --use-sharp serves.",
        group="distributed",
        choices=("dp", "dp_replica"),
        ignored=states.only_with("--use-sharp"),
    )
    nccl_communicator_config_path: str | None = option(
        None,
        "YAML file of settings for each NCCL communicator.",
        group="distributed",
        refused="settings per communicator are not in this version; use NCCL_* environment "
        "variables",
    )
    use_tp_pp_dp_mapping: bool = option(
        False,
        "Number pipeline stages before replicas, so that stages lie on neighbouring ranks.",
        group="distributed",
    )
