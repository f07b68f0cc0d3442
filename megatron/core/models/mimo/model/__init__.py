"""The MiMo model."""

from megatron.core.models.mimo.model.base import MimoModel as MimoModel
