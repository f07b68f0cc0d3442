"""Which architecture a model in Hugging Face format has."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.core.config.errors import ConfigError
from megatron.core.text_files import read_text

_PREFIX = "hf://"
_KNOWN = ("qwen", "siglip")


def get_hf_model_type(model_path: str) -> str:
    """Return "qwen" or "siglip" for the folder ``model_path``, which may begin with hf://.

    Reads config.json; nothing is downloaded.  Raises ConfigError if there is none,
    NotImplementedError for another architecture.
    """
    path = Path(model_path.removeprefix(_PREFIX)) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{model_path} has no config.json: give the folder of a model")
    content = json.loads(read_text(path, str(path), ConfigError))
    architectures = content.get("architectures") or [""] if isinstance(content, dict) else [""]
    name = str(architectures[0])
    for known in _KNOWN:
        if known in name.lower():
            return known
    raise NotImplementedError(
        f"{path} has the architecture {name or 'none'}, which is none of {', '.join(_KNOWN)}"
    )
