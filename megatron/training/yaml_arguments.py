"""The model configuration of a run that was started with ``--yaml-cfg``, for scripts.

The arguments hold the values of the file like those of the command line, so the same function reads
both.
"""

from __future__ import annotations

from argparse import Namespace

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.compat.arguments import core_transformer_config_from_args


def core_transformer_config_from_yaml(
    args: Namespace, transfomer_key: str = "language_model"
) -> TransformerConfig:
    """Return the same as `core_transformer_config_from_args`.

    ``transfomer_key`` has no effect: a run has one model.
    """
    del transfomer_key
    return core_transformer_config_from_args(args)
