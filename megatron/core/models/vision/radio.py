"""RADIO: a vision transformer for images of any size, by one large table of positions.

``b`` images of ``H`` x ``W`` pixels, ``p`` the side of a patch, ``n`` embeddings of an image (class
and register tokens, then patches row by row), ``h`` hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.models.common.vision_module.vision_module import VisionModule
from megatron.core.models.vision.clip_vit_model import (
    EmbeddingTable,
    PatchProjection,
    replicated,
)
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


class RADIOViTModel(VisionModule):
    """Maps images of one size per batch to embeddings of class tokens and patches."""

    @library_call()
    def __init__(
        self,
        transformer_config: TransformerConfig,
        transformer_layer_spec: ModuleSpec,
        class_token_len: int = 8,
        patch_dim: int = 16,
        max_img_h: int = 2048,
        max_img_w: int = 2048,
        embedder_bias: bool = False,
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        """``class_token_len``: class and register tokens.  ``max_img_h``, ``max_img_w``: what the
        table of positions covers; of other sizes positions are interpolated.

        Raises ConfigError if patches do not fill the largest image.
        """
        if max_img_h % patch_dim or max_img_w % patch_dim:
            raise ConfigError(
                f"the largest image, {max_img_h} x {max_img_w} pixels, is not a multiple of "
                f"--patch-dim {patch_dim}"
            )
        super().__init__(transformer_config)
        config = transformer_config
        self.patch_dim = patch_dim
        self.class_token_len = class_token_len
        self.num_rows = max_img_h // patch_dim
        self.num_columns = max_img_w // patch_dim
        self.embedder = PatchProjection(config, patch_dim, has_bias=embedder_bias)
        self.position_embeddings = EmbeddingTable(config, self.num_rows * self.num_columns)
        tokens = (1, class_token_len, config.hidden_size)
        self.class_token = replicated(config, tokens, config.init_method)
        self.build_layers(transformer_layer_spec, pg_collection)
        self.finalize_parameters()

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Encode normalized images: [b, 3, H, W] -> [b, n, h].

        ``attention_mask``: True for pairs of patches that do not attend to each other.  Collective
        over the tensor-parallel group.  Raises DataError if patches do not fill the images.
        """
        height, width = x.shape[-2:]
        if height % self.patch_dim or width % self.patch_dim:
            raise DataError(
                f"images of {height} x {width} pixels are not a multiple of --patch-dim "
                f"{self.patch_dim}: resize them"
            )
        patches = self.embedder(x)
        patches = patches + self.get_pos_enc(height // self.patch_dim, width // self.patch_dim)
        tokens = self.class_token.expand(len(x), -1, -1)
        return self.run_layers(torch.cat([tokens, patches], 1), attention_mask)

    def get_pos_enc(self, rows: int, columns: int) -> Tensor:
        """Return the embeddings of the places in an image: [rows columns, h].

        The table is interpolated to a square with the longer side of the image, of which the upper
        left part is taken, as RADIO was trained.
        """
        grid = self.position_embeddings.weight.view(self.num_rows, self.num_columns, -1)
        side = max(rows, columns)
        if (side, side) != (self.num_rows, self.num_columns):
            planes = grid.permute(2, 0, 1).unsqueeze(0)
            wide = planes.to(torch.promote_types(planes.dtype, torch.float32))
            found = F.interpolate(wide, (side, side), mode="bilinear", align_corners=False)
            grid = found[0].permute(1, 2, 0).to(grid.dtype)
        return grid[:rows, :columns].flatten(0, 1)
