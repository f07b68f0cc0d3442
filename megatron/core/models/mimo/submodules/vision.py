"""Images and videos."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.core.models.mimo.submodules.base import ModalitySubmodules
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.multimodal_projector import pixel_shuffle


class VisionModalitySubmodules(ModalitySubmodules):
    """Encoders of images or videos, decoders into images, and their projections."""


class PatchFeatures(CLIPViTModel):
    """A vision transformer whose output is what a projector reads."""

    def __init__(
        self,
        *args: Any,
        drop_class_token: bool = False,
        merges_neighbours: bool = False,
        **kwargs: Any,
    ) -> None:
        """``drop_class_token``: no embedding of class tokens; ``merges_neighbours``: pixel shuffle.

        The other arguments are those of `CLIPViTModel`.
        """
        super().__init__(*args, **kwargs)
        self.drop_class_token = drop_class_token
        self.merges_neighbours = merges_neighbours

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Encode images [t, 3, H, W], or videos of f frames [t, f, 3, H, W]: [.., n, h].

        Collective over the tensor-parallel group.
        """
        found = super().forward(x.flatten(0, -4), attention_mask)
        if self.drop_class_token:
            found = found[:, self.class_token_len :]
        return pixel_shuffle(found) if self.merges_neighbours else found
