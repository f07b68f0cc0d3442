"""MiMo: any set of encoders and one language model, composed by specs."""

from megatron.core.models.mimo.config.base_configs import MimoModelConfig as MimoModelConfig
from megatron.core.models.mimo.model.base import MimoModel as MimoModel
from megatron.core.models.mimo.submodules.audio import (
    AudioModalitySubmodules as AudioModalitySubmodules,
)
from megatron.core.models.mimo.submodules.base import ModalitySubmodules as ModalitySubmodules
from megatron.core.models.mimo.submodules.vision import (
    VisionModalitySubmodules as VisionModalitySubmodules,
)
