"""Process groups and their back end."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option
from megatron.core.config.parse import strict_bool


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Process groups and their back end."""

    enable_gloo_process_groups: bool = option(
        True,
        "",
        group="training",
        flag="--disable-gloo-process-groups",
    )
    high_priority_stream_groups: tuple[str, ...] = option((), "", group="training", nargs="*")
    device: str = option(
        "auto",
        "Where to compute: auto takes a GPU if one is visible.",
        group="device and checks",
        choices=("auto", "cpu", "cuda"),
    )
    distributed_backend: str | None = option(
        None, "", group="distributed", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = option(10, "", group="distributed")
    local_rank: int = option(0, "", group="distributed")
    lazy_mpu_init: bool | None = option(None, "", group="distributed", parse=strict_bool)
    use_sharp: bool = option(False, "", group="distributed")
    sharp_enabled_group: str | None = option(
        None,
        "",
        group="distributed",
        choices=("dp", "dp_replica"),
    )
    nccl_communicator_config_path: str | None = option(None, "", group="distributed")
    use_tp_pp_dp_mapping: bool = option(False, "", group="distributed")
