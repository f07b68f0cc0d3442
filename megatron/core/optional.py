"""The only place that imports optional packages."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType

from megatron.core.config.errors import MissingDependency

# package -> what `pip install "megatron-train[...]"` brings it
_EXTRA = {
    "transformer_engine": "te",
    "safetensors": "hf",
    "tokenizers": "hf",
    "transformers": "hf",
    "tiktoken": "hf",
    "wandb": "log",
    "gigatoken": "fast",
    "isal.isal_zlib": "fast",
    "zstandard": "data",
    "pyarrow": "data",
    "nltk": "data",
    "boto3": "s3",
    "multistorageclient": "s3",
    "yaml": "yaml",
}


@cache
def why_missing(package: str) -> str | None:
    """None if ``package`` imports, else the reason.

    Exception, not ImportError: an incomplete transformer_engine raises RuntimeError on import.
    """
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        return f"{package} is not installed"
    try:
        importlib.import_module(package)
    except Exception as error:
        return f"{package} does not import: {type(error).__name__}: {str(error).splitlines()[0]}"
    return None


def available(package: str) -> bool:
    """Whether ``package`` imports here."""
    return why_missing(package) is None


def require(package: str, wanted_by: str) -> ModuleType:
    """Import ``package``, or say which flag wanted it and how to get it."""
    reason = why_missing(package)
    if reason is not None:
        extra = _EXTRA.get(package) or _EXTRA.get(package.partition(".")[0])
        cure = f'pip install "megatron-train[{extra}]"' if extra else f"pip install {package}"
        raise MissingDependency(f"{wanted_by}: {reason}; {cure}")
    return importlib.import_module(package)
