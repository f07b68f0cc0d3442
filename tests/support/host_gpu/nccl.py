"""``torch.distributed.ProcessGroupNCCL`` where torch is built without it: names and defaults only.

An attribute that torch's class does not have raises, as there.
"""

from __future__ import annotations

from datetime import timedelta


class NCCLConfig:
    """Fields of ``ncclConfig_t`` that torch exposes."""

    __slots__ = ("blocking", "cga_cluster_size", "max_ctas", "min_ctas", "net_name")


class Options:
    """Options of one process group."""

    __slots__ = (
        *("_timeout", "config", "global_ranks_in_group", "group_name"),
        *("is_high_priority_stream", "split_color", "split_from"),
    )

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = NCCLConfig()
        self._timeout = timedelta(minutes=10)


class ProcessGroupNCCL:
    """Only the classes inside."""

    NCCLConfig = NCCLConfig
    Options = Options
