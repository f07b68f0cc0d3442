"""The model section of a run that was started from ``--yaml-cfg``, for scripts that ask for it.

A file's values stand in the arguments like the command line's: there is one way to the section.
"""

from __future__ import annotations

from argparse import Namespace

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.compat.arguments import core_transformer_config_from_args


def core_transformer_config_from_yaml(
    args: Namespace, transfomer_key: str = "language_model"
) -> TransformerConfig:
    """As `core_transformer_config_from_args`.  There is one model: its key says nothing new."""
    del transfomer_key
    return core_transformer_config_from_args(args)
