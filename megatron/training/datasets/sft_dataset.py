"""SFTDataset (--sft): importable, but refused on use."""

from __future__ import annotations

from typing import Any, NoReturn

from megatron.core.config import flag_messages
from megatron.core.config.errors import ConfigError
from megatron.core.datasets.megatron_dataset import MegatronDataset


class SFTDataset(MegatronDataset):
    """Placeholder for scripts that import the name; using it raises ConfigError."""

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> NoReturn:
        """Raise ConfigError: --sft is not supported."""
        _refuse()

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> NoReturn:
        """Raise ConfigError: --sft is not supported."""
        _refuse()


def _refuse() -> NoReturn:
    raise ConfigError(f"SFTDataset: {flag_messages.SFT}")
