"""Qwen2-VL: LLaVA whose encoder reads images of any size, and whose positions are in a grid.

A tile is a block of 2 x 2 patches here, with one embedding: images [t, 4, values] for the t blocks
of all images.  ``image_sizes`` [images, 3] are the patches of each image along time, height, width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.models.multimodal.context_parallel import held_positions
from megatron.core.models.multimodal.llava_model import LLaVAModel
from megatron.core.models.multimodal.splicing import Splice
from megatron.core.models.vision.qwen2_vl import MERGE, Grid, Qwen2VLVisionModel
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


class Qwen2VLModel(LLaVAModel):
    """One pipeline stage of Qwen2-VL; ``img_h`` x ``img_w`` is the area of the largest image."""

    def __init__(self, *args: Any, img_h: int, img_w: int, patch_dim: int, **more: Any) -> None:
        """Build the models; see `LLaVAModel`."""
        self._largest: Grid = (1, img_h // patch_dim, img_w // patch_dim)
        more["pixel_shuffle"] = True  # the projector reads 2 x 2 patches as one
        super().__init__(*args, img_h=img_h, img_w=img_w, patch_dim=patch_dim, **more)
        self.embeddings_per_tile = 1

    def build_encoder(
        self,
        config: TransformerConfig,
        spec: ModuleSpec,
        groups: ProcessGroupCollection,
        **sizes: Any,
    ) -> Qwen2VLVisionModel:
        """Build the encoder of images."""
        return Qwen2VLVisionModel(config, spec, sizes["patch_dim"], pg_collection=groups)

    @property
    def reads_image_sizes(self) -> bool:
        """Whether images need ``image_sizes``."""
        return True

    def image_embeddings(self, images: Tensor, image_sizes: Tensor | None = None) -> Tensor:
        """Encode and project blocks of patches: [t, 4, values] -> [t, h]."""
        assert isinstance(self.vision_model, Qwen2VLVisionModel), "the first stage has the encoder"
        assert self.vision_projection is not None
        merged = self.vision_model(images.flatten(0, 1), self._grids(images, image_sizes))
        projected: Tensor = self.vision_projection(merged)
        return projected

    def _grids(self, images: Tensor, image_sizes: Tensor | None) -> Sequence[Grid]:
        if not self.reads_values:
            _, height, width = self._largest
            blocks = height * width // MERGE**2
            whole = [self._largest] * (len(images) // blocks)
            return [*whole, *[(1, MERGE, MERGE)] * (len(images) % blocks)]
        if image_sizes is None or not len(image_sizes):
            return [(1, MERGE, MERGE)] * len(images)  # a blank image
        return [(t, h, w) for t, h, w in image_sizes.tolist()]

    def blank_images(self, where: torch.device) -> Tensor:
        """Return one block of patches."""
        assert isinstance(self.vision_model, Qwen2VLVisionModel), "the first stage has the encoder"
        values = self.vision_model.conv1.weight.shape[1]
        return torch.zeros((1, MERGE**2, values), device=where)

    def positions(
        self, where: Splice, is_image: Tensor, image_sizes: Tensor | None
    ) -> Tensor | None:
        """Return this rank's positions [3, b, L/cp] with M-RoPE, which follow from the images."""
        if self.language_model.position_embedding_type != "mrope" or image_sizes is None:
            return None
        blocks = image_sizes // image_sizes.new_tensor([1, MERGE, MERGE])
        blocks = torch.cat([blocks.new_zeros(1, 3), blocks])
        number = is_image.flatten().cumsum(0).view_as(is_image).clamp(max=len(blocks) - 1)
        sizes = blocks[number] * is_image.unsqueeze(-1)
        grid = where.grid_positions(sizes)
        cp = self.pg_collection.cp
        return torch.stack([held_positions(each, cp) for each in grid])
