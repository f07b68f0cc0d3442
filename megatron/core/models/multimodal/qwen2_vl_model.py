"""Qwen2-VL: its encoder, and LLaVA with that encoder and positions in a grid.

The encoder reads images and videos of any size in one row of patches.  ``N`` patches of all images,
in blocks of 2 x 2 neighbours, ``g`` images or frames, ``p`` the side of a patch, ``f`` frames of a
patch, ``h`` hidden size.  Patches attend to those of their frame.

A tile is a block of 2 x 2 patches here, with one embedding: images [t, 4, values] for the t blocks
of all images.  ``image_sizes`` [images, 3] are the patches of each image along time, height, width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.errors import DataError
from megatron.core.fusions.rope import RotaryTable
from megatron.core.models.common.vision_module.vision_module import VisionModule
from megatron.core.models.multimodal.context_parallel import held_positions
from megatron.core.models.multimodal.llava_model import LLaVAModel
from megatron.core.models.multimodal.splicing import Splice, value_of_image
from megatron.core.models.vision.clip_vit_model import replicated
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.norms import Norm
from megatron.core.transformer.rope import base_frequencies
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

MERGE = 2  # neighbours in each direction that become one embedding of the language model
_COLORS = 3
_BASE = 10000.0
Grid = tuple[int, int, int]  # patches of an image or video along time, height and width


class Qwen2VLVisionModel(VisionModule):
    """Maps patches to the input of a projector: one row for each block of 2 x 2 patches."""

    @library_call()
    def __init__(
        self,
        transformer_config: TransformerConfig,
        transformer_layer_spec: ModuleSpec,
        patch_dim: int = 14,
        frames_per_patch: int = 2,
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        """Build the encoder; an image is a video whose frames are the same."""
        super().__init__(transformer_config)
        config = transformer_config
        h = config.hidden_size
        self.conv1 = PatchMatrix(config, _COLORS * frames_per_patch * patch_dim**2)
        self.ln_post = Norm(config, h, config.layernorm_epsilon, has_partial_gradient=False)
        self.build_layers(transformer_layer_spec, pg_collection)
        self.finalize_parameters()

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Encode [N, 3 f p p] -> [N/4, 4 h].  Collective over the tensor-parallel group.

        Raises DataError if ``grids`` have another number of patches, or odd heights or widths.
        """
        count = sum(t * h * w for t, h, w in grids)
        if count != len(patches) or any(h % MERGE or w % MERGE for _, h, w in grids):
            raise DataError(
                f"{len(patches)} patches do not fill images of {list(grids)} patches (time, height "
                "and width): give all patches, and even heights and widths"
            )
        hidden = self.conv1(patches).unsqueeze(0)
        lengths = [h * w for t, h, w in grids for _ in range(t)]
        ends = torch.tensor([0, *lengths], device=patches.device).cumsum(0).to(torch.int32)
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
        table = self._table(grids, patches.device)
        hidden = self.run_layers(hidden, None, rotary_pos_emb=table, packed_seq_params=packed)
        normed: Tensor = self.ln_post(hidden.squeeze(0))
        return normed.reshape(len(patches) // MERGE**2, -1)

    def _table(self, grids: Sequence[Grid], where: torch.device) -> RotaryTable:
        """Return the rotation of each patch: half of the pairs by its row, half by its column."""
        config = self.config
        frequencies = base_frequencies(config.kv_channels // 2, _BASE).to(where)
        positions = torch.cat([patch_positions(grid, where) for grid in grids])
        angles = (positions.unsqueeze(-1) * frequencies).flatten(1)[:, None, None]
        dtype = config.params_dtype
        return RotaryTable(angles.cos().to(dtype), angles.sin().to(dtype))


class PatchMatrix(nn.Module):
    """A linear layer without bias over the values of each patch."""

    def __init__(self, config: TransformerConfig, num_values: int) -> None:
        super().__init__()
        shape = config.hidden_size, num_values
        self.weight = replicated(config, shape, config.init_method)

    def forward(self, patches: Tensor) -> Tensor:
        """Project [N, values] -> [N, h]."""
        return F.linear(patches.to(self.weight.dtype), self.weight)


def patch_positions(grid: Grid, where: torch.device | None = None) -> Tensor:
    """Return row and column of each patch of an image, in blocks of 2 x 2: [t h w, 2]."""
    t, h, w = grid
    cells = torch.cartesian_prod(torch.arange(h, device=where), torch.arange(w, device=where))
    blocks = cells.view(h // MERGE, MERGE, w // MERGE, MERGE, 2).transpose(1, 2)
    return blocks.reshape(-1, 2).repeat(t, 1)


class Qwen2VLModel(LLaVAModel):
    """One pipeline stage of Qwen2-VL; ``img_h`` x ``img_w`` is the area of the largest image."""

    def __init__(self, *args: Any, img_h: int, img_w: int, patch_dim: int, **more: Any) -> None:
        """Build the models; see `LLaVAModel`."""
        self._largest: Grid = (1, img_h // patch_dim, img_w // patch_dim)
        more["pixel_shuffle"] = True  # the projector reads 2 x 2 patches as one
        super().__init__(*args, img_h=img_h, img_w=img_w, patch_dim=patch_dim, **more)
        self.embeddings_per_tile = 1
        self.reads_image_sizes = True

    def build_encoder(
        self,
        config: TransformerConfig,
        spec: ModuleSpec,
        groups: ProcessGroupCollection,
        **sizes: Any,
    ) -> Qwen2VLVisionModel:
        """Build the encoder of images."""
        return Qwen2VLVisionModel(config, spec, sizes["patch_dim"], pg_collection=groups)

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
        return list(map(tuple, image_sizes.tolist()))

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
        grid = where.grid_positions(value_of_image(is_image, blocks))
        cp = self.pg_collection.cp
        return torch.stack([held_positions(each, cp) for each in grid])
