"""--config-logger-dir: write configuration objects as JSON files (Megatron Core's module).

A file is called ``{prefix}.rank_{rank}.iter{count}.json``; ``count`` tells apart objects of one
prefix in the order in which this process wrote them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from megatron.core.rank_local import each_rank_owns

_counts: dict[str, int] = {}  # path -> files written with it
each_rank_owns(__name__, "_counts")


def get_config_logger_path(config: object) -> str:
    """The folder that ``config`` names, "" for none."""
    return str(vars(config).get("config_logger_dir", ""))


def has_config_logger_enabled(config: object) -> bool:
    """Whether ``config`` names a folder."""
    return get_config_logger_path(config) != ""


def get_path_count(path: str) -> int:
    """How often this process has asked for ``path`` before; counts the call."""
    count = _counts.get(path, 0)
    _counts[path] = count + 1
    return count


def get_path_with_count(path: str) -> str:
    """``path`` with a number that no earlier call for it has returned."""
    return f"{path}.iter{get_path_count(path)}"


class JSONEncoderWithMcoreTypes(json.JSONEncoder):
    """Writes dataclasses as objects, functions and types by name, everything else as text."""

    def default(self, o: object) -> object:
        if dataclasses.is_dataclass(o) and not isinstance(o, type):
            return {field.name: vars(o)[field.name] for field in dataclasses.fields(o)}
        if isinstance(o, Mapping):
            return dict(o)
        return getattr(o, "__qualname__", None) or str(o)


def log_config_to_disk(
    config: object, dict_data: Mapping[str, object], prefix: str = "", rank_str: str = ""
) -> None:
    """Write ``dict_data`` below the folder of ``config``.

    Without ``prefix`` the file has the name of the class of ``dict_data["self"]``, which is left
    out; ``rank_str`` replaces the rank.
    """
    folder = Path(get_config_logger_path(config))
    folder.mkdir(parents=True, exist_ok=True)
    data = {name: value for name, value in dict_data.items() if name not in ("self", "__class__")}
    if not prefix and "self" in dict_data:
        prefix = type(dict_data["self"]).__name__
    rank = rank_str or str(dist.get_rank() if dist.is_initialized() else 0)
    path = get_path_with_count(str(folder / f"{prefix or 'config'}.rank_{rank}"))
    text = json.dumps(data, cls=JSONEncoderWithMcoreTypes, indent=2)
    Path(f"{path}.json").write_text(text + "\n", encoding="utf-8")
