"""Import at first use: optional packages, and exports of a package (PEP 562).

No other module imports optional packages directly.  Programs that prepare data import packages of
``megatron.core`` and ``megatron.training`` without importing torch, and a run imports only the
model kinds and file formats that it uses.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from functools import cache
from textwrap import shorten
from types import ModuleType
from typing import Any

from megatron.core.config.errors import MissingDependency

# package -> the extra of `pip install "megatron-train[...]"` that contains it
_EXTRA = {
    "transformer_engine": "te",
    "huggingface_hub": "hf",
    "safetensors": "hf",
    "tokenizers": "hf",
    "transformers": "hf",
    "tiktoken": "hf",
    "wandb": "log",
    "mlflow": "trackers",
    "trackio": "trackers",
    "comet_ml": "trackers",
    "clearml": "trackers",
    "matplotlib": "plot",
    "gigatoken": "fast",
    "isal.isal_zlib": "fast",
    "zstandard": "data",
    "pyarrow": "data",
    "nltk": "data",
    "datasketch": "data",
    "boto3": "s3",
    "multistorageclient": "s3",
    "yaml": "yaml",
    "nvidia_resiliency_ext": "ft",
    "PIL": "images",
    "megatron.energon": "energon",
    "h11": "serve",
    "jinja2": "serve",
    "llguidance": "serve",
    "prometheus_client": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
    "faiss": "retro",
    "h5py": "retro",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
}
# package that is in no extra -> its name for pip, if that is another one
_PIP_NAME = {"lm_eval": "lm-eval[api]", "pynvml": "nvidia-ml-py"}


@cache
def why_missing(package: str) -> str | None:
    """Return the reason why ``package`` cannot be imported, or None if it can.

    Catches Exception, not ImportError: an incomplete transformer_engine raises RuntimeError.
    """
    top = package.partition(".")[0]
    if importlib.util.find_spec(top) is None:
        return f"{top} is not installed"
    try:
        importlib.import_module(package)
    except Exception as error:
        # One sentence: transformer_engine explains its installation in a paragraph.
        cause = shorten(f"{error}.".splitlines()[0].split(". ")[0].rstrip("."), 160)
        return f"{package} does not import: {type(error).__name__}: {cause}"
    return None


def available(package: str) -> bool:
    """Return whether ``package`` can be imported."""
    return why_missing(package) is None


def require(package: str, wanted_by: str) -> ModuleType:
    """Import and return ``package``.

    Raises MissingDependency, whose message has ``wanted_by`` (a flag) and how to install it.
    """
    reason = why_missing(package)
    if reason is not None:
        top = package.partition(".")[0]
        extra = _EXTRA.get(package) or _EXTRA.get(top)
        name = f"megatron-train[{extra}]" if extra else _PIP_NAME.get(top, top)
        cure = f'pip install "{name}"' if "[" in name else f"pip install {name}"
        raise MissingDependency(f"{wanted_by}: {reason}; {cure}")
    return importlib.import_module(package)


def lazy_exports(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module ``__getattr__`` for ``package`` that imports exports at first use.

    ``homes`` maps each public name to the module that defines it.  If that module has no attribute
    of this name, the export is the module itself.
    """

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = importlib.import_module(homes[name])
        return vars(home).get(name, home)

    return __getattr__
