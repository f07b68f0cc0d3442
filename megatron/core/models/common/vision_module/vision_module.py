"""Base of encoders of images."""

from __future__ import annotations

import torch

from megatron.core.params.param_info import name_parameters
from megatron.core.params.param_init import initialize_parameters
from megatron.core.transformer.module import MegatronModule


class VisionModule(MegatronModule):
    """A model whose input are images.  Its constructor ends with `finalize_parameters`."""

    def finalize_parameters(self) -> None:
        """Assign global names, and initialise with the seed of the config."""
        name_parameters(self)
        seed = self.config.init_seed
        random = self.config.perform_initialization
        initialize_parameters(self, torch.initial_seed() if seed is None else seed, random=random)
