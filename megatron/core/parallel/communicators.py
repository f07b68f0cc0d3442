"""NCCL settings of each process group, read from --nccl-communicator-config-path.

The names of groups are those of `ProcessGroupCollection`; Megatron-LM's names are aliases.  A
setting changes speed, never the result of a collective.  Also the end of the groups' threads.
"""

from __future__ import annotations

import atexit
import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.config.errors import ConfigError
from megatron.core.text_files import parse_yaml, read_text

_log = logging.getLogger(__name__)
# Megatron-LM's name of a group -> the names in `ProcessGroupCollection`, if they differ.
_ALIASES: dict[str, tuple[str, ...]] = {
    "hcp": ("cp_inner", "cp_outer"),
    "ep_tp": ("expt_tp",),
    "tp_ep_mp": ("tp_ep",),
    "ep_dp": ("expt_dp",),
    "intra_ep_dp": ("intra_expt_dp",),
    "inter_dp_cp": ("inter_dist_opt",),
    "inter_ep_dp": ("inter_dist_opt",),
}
_GROUPS = (
    "tp pp dp cp cp_inner cp_outer mp tp_cp tp_dp tp_dp_cp dp_cp ep expt_tp tp_ep tp_ep_pp expt_dp "
    "intra_dp_cp intra_expt_dp inter_dist_opt intra_dist_opt embd pos_embd stack"
).split()
_NETWORKS = ("ib", "socket")


@dataclass(frozen=True)
class CommunicatorSettings:
    """NCCL settings of one communicator; None keeps NCCL's default."""

    is_high_priority_stream: bool = False
    cga_cluster_size: int | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    net_name: str | None = None

    def torch_options(self, timeout: timedelta | None) -> dist.ProcessGroupNCCL.Options:
        """Return these settings as ``ProcessGroupNCCL.Options``, which only CUDA builds have."""
        options = dist.ProcessGroupNCCL.Options(
            is_high_priority_stream=self.is_high_priority_stream
        )
        nccl = options.config
        for name in ("cga_cluster_size", "min_ctas", "max_ctas", "net_name"):
            value = getattr(self, name)
            if value is not None:
                setattr(nccl, name, value)
        if timeout is not None:
            options._timeout = timeout  # torch warns if it differs from new_group's timeout
        return options


@dataclass(frozen=True)
class Communicators:
    """Factory of process groups: their timeout, and NCCL settings by name of the group."""

    timeout: timedelta | None = None
    settings: Mapping[str, CommunicatorSettings] = field(default_factory=dict)

    @classmethod
    def from_flags(
        cls,
        timeout: timedelta,
        config_path: str | None = None,
        high_priority_groups: Iterable[str] = (),
        warn: Callable[[str], None] = _log.warning,
    ) -> Communicators:
        """Build the factory from the flags; settings are read only if the backend is NCCL.

        Needs an initialized default group.  Calls ``warn`` for each entry that has no effect.
        Raises ConfigError for an invalid file or value, MissingDependency without PyYAML.
        """
        if dist.get_backend() != dist.Backend.NCCL:
            return cls(timeout)
        content = read_settings(config_path) if config_path else {}
        settings, warnings = resolve_settings(content, high_priority_groups)
        for warning in warnings:
            warn(warning)
        return cls(timeout, settings)

    def settings_of(self, name: str) -> CommunicatorSettings | None:
        """Return the settings of group ``name``, or None.

        An ``intra_`` group without settings has those of the group that it is part of.
        """
        return self.settings.get(name) or self.settings.get(name.removeprefix("intra_"))

    def create(self, ranks: Sequence[int], name: str) -> ProcessGroup:
        """Create the group of ``ranks``.  Collective over the world.

        Returns the default group, without creating one, if it has the same ranks and ``name`` has
        no settings.
        """
        settings = self.settings_of(name)
        if settings is None and len(ranks) == dist.get_world_size():
            world = dist.group.WORLD
            assert world is not None, "init_process_group comes before create_process_groups"
            return world
        options = settings and settings.torch_options(self.timeout)
        group: ProcessGroup = dist.new_group(
            list(ranks), timeout=self.timeout, pg_options=options, group_desc=name
        )
        return group


def read_settings(path: str) -> dict[str, Any]:
    """Read the YAML file of --nccl-communicator-config-path.

    Raises ConfigError for an invalid file, MissingDependency without PyYAML.
    """
    flag = f"--nccl-communicator-config-path {path}"
    needed = "a YAML file of settings by group"
    content = parse_yaml(read_text(path, flag, ConfigError, needed), flag, ConfigError)
    if not isinstance(content, dict) or not all(isinstance(v, dict) for v in content.values()):
        raise ConfigError(
            f"{flag}: the file is not a mapping of group names to settings; write one mapping for "
            "each group, for example {dp_cp: {max_ctas: 16}}"
        )
    return content


def resolve_settings(
    content: Mapping[str, Mapping[str, Any]], high_priority_groups: Iterable[str] = ()
) -> tuple[dict[str, CommunicatorSettings], list[str]]:
    """Return settings by group name, and a warning for each entry that has no effect.

    The keys are the names in `ProcessGroupCollection`; ``content`` is the result of
    `read_settings`.  Raises ConfigError for a value that NCCL does not accept.
    """
    settings: dict[str, CommunicatorSettings] = {}
    warnings: list[str] = []
    known = {f.name for f in fields(CommunicatorSettings)}
    for group, values in content.items():
        where = f"--nccl-communicator-config-path, group {group}"
        names = _our_names(str(group))
        if not names:
            warnings.append(f"{where}: there is no such group, its settings have no effect")
        for key in sorted(map(str, values.keys() - known)):
            warnings.append(f"{where}: {key} has no effect; known are {', '.join(sorted(known))}")
        given = {str(k): v for k, v in values.items() if k in known and v is not None}
        for problem in _problems(given):
            raise ConfigError(f"{where}: {problem}")
        settings |= dict.fromkeys(names, CommunicatorSettings(**given))
    for group in high_priority_groups:
        names = _our_names(group)
        if not names:
            warnings.append(f"--high-priority-stream-groups {group}: there is no such group")
        for name in names:
            before = settings.get(name, CommunicatorSettings())
            settings[name] = replace(before, is_high_priority_stream=True)
    return settings, warnings


def _our_names(group: str) -> tuple[str, ...]:
    return (group,) if group in _GROUPS else _ALIASES.get(group, ())


def _problems(values: Mapping[str, object]) -> Iterator[str]:
    for key, value in values.items():
        if key == "is_high_priority_stream":
            if not isinstance(value, bool):
                yield f"{key} is {value!r}; use true or false"
        elif key == "net_name":
            if str(value).lower() not in _NETWORKS:
                yield f"net_name is {value!r}; use {' or '.join(_NETWORKS)}"
        elif isinstance(value, bool) or not isinstance(value, int) or value < 0:
            yield f"{key} is {value!r}; use an integer of at least 0"
    low = values.get("min_ctas")
    high = values.get("max_ctas")
    if isinstance(low, int) and isinstance(high, int) and low > high:
        yield f"min_ctas {low} is larger than max_ctas {high}; lower the first or raise the second"


def end_group_threads_at_exit() -> None:
    """Free destroyed process groups before the interpreter finalizes, which ends gloo's threads.

    Such a thread may hold the last reference to a tensor of the last collective.  If it drops the
    reference after finalization has begun, Python ends the thread inside a C++ destructor, and the
    process aborts: "terminate called without an active exception".  Destroying the groups does not
    free them, because the objects of a run refer to each other.
    """
    atexit.unregister(gc.collect)
    atexit.register(gc.collect)
