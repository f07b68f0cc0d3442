"""The conversations dataset, refused by name: ``--sft``, which needs it, is refused too."""

from __future__ import annotations

from typing import Any, NoReturn

from megatron.core.config import flag_messages
from megatron.core.config.errors import ConfigError
from megatron.core.datasets.megatron_dataset import MegatronDataset


class SFTDataset(MegatronDataset):
    """Importable because scripts name it.  Using it raises ConfigError."""

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> NoReturn:
        """Refuse."""
        _refuse()

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> NoReturn:
        """Refuse."""
        _refuse()


def _refuse() -> NoReturn:
    raise ConfigError(f"SFTDataset: {flag_messages.SFT}")
