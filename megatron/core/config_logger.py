"""Write configuration objects as JSON files to --config-logger-dir (API of Megatron Core).

The name of a file is ``{prefix}.rank_{rank}.iter{count}.json``; ``count`` numbers the files with
the same prefix in the order in which this process writes them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from megatron.core.rank_local import each_rank_owns

_counts: dict[str, int] = {}  # path without count -> number of files
each_rank_owns(__name__, "_counts")


def get_config_logger_path(config: object) -> str:
    """Return ``config.config_logger_dir``, or "" if it has none."""
    return str(vars(config).get("config_logger_dir", ""))


def has_config_logger_enabled(config: object) -> bool:
    """Return whether ``config`` has a ``config_logger_dir``."""
    return get_config_logger_path(config) != ""


class JSONEncoderWithMcoreTypes(json.JSONEncoder):
    """JSON encoder: dataclasses as objects, functions and types by name, others as ``str(o)``."""

    def default(self, o: object) -> object:
        if dataclasses.is_dataclass(o) and not isinstance(o, type):
            return {field.name: vars(o)[field.name] for field in dataclasses.fields(o)}
        if isinstance(o, Mapping):
            return dict(o)
        return getattr(o, "__qualname__", None) or str(o)


def log_config_to_disk(
    config: object, dict_data: Mapping[str, object], prefix: str = "", rank_str: str = ""
) -> None:
    """Write ``dict_data`` as a JSON file into ``config.config_logger_dir``.

    The default ``prefix`` is the class name of ``dict_data["self"]``, or "config"; the entries
    "self" and "__class__" are not written.  ``rank_str`` replaces the rank in the file name.
    """
    folder = Path(get_config_logger_path(config))
    folder.mkdir(parents=True, exist_ok=True)
    data = {name: value for name, value in dict_data.items() if name not in ("self", "__class__")}
    if not prefix and "self" in dict_data:
        prefix = type(dict_data["self"]).__name__
    rank = rank_str or str(dist.get_rank() if dist.is_initialized() else 0)
    path = str(folder / f"{prefix or 'config'}.rank_{rank}")
    count = _counts.get(path, 0)
    _counts[path] = count + 1
    text = json.dumps(data, cls=JSONEncoderWithMcoreTypes, indent=2)
    Path(f"{path}.iter{count}.json").write_text(text + "\n", encoding="utf-8")
