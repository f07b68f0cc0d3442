"""Qwen2-VL, Qwen3-VL, Mistral 3: an encoder of images of any size, and LLaVA with that encoder.

The encoder reads images and videos of any size in one row of patches.  ``N`` patches of all images,
in blocks of 2 x 2 neighbours, ``g`` images or frames, ``p`` the side of a patch, ``f`` frames of a
patch, ``h`` hidden size.  Patches attend to those of their frame.

A tile is a block of 2 x 2 patches here, with one embedding: images [t, 4, values] for the t blocks
of all images.  ``image_sizes`` [images, 3] are the patches of each image along time, height, width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.fusions.rope import RotaryTable
from megatron.core.models.common.vision_module.vision_module import VisionModule
from megatron.core.models.multimodal.context_parallel import held_positions
from megatron.core.models.multimodal.llava_model import LLaVAModel
from megatron.core.models.multimodal.splicing import Splice, value_of_image
from megatron.core.models.vision.clip_vit_model import EmbeddingTable, replicated
from megatron.core.models.vision.kinds import KINDS
from megatron.core.models.vision.multimodal_projector import (
    MultimodalProjector,
    ProjectorSubmodules,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_init import Init
from megatron.core.tile_arrangement import EndedRows, TileArrangement
from megatron.core.transformer.mlp import MLPSubmodules
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
        model_subtype: str = "qwen2_vl",
        num_positions: int = 0,
        taps: Sequence[int] = (),
        pg_collection: ProcessGroupCollection,
    ) -> None:
        """Build the encoder; an image is a video whose frames are the same.

        ``model_subtype``: a key of `KINDS`.  ``num_positions``: of a square table of learned
        positions, 0 without one.  ``taps``: layers whose outputs are returned besides.
        """
        super().__init__(transformer_config)
        config = transformer_config
        kind = KINDS[model_subtype]
        self.taps = taps
        self.has_own_frequencies = kind.ends_rows
        values = _COLORS * frames_per_patch * patch_dim**2
        self.conv1 = PatchMatrix(config, values, has_bias=kind.has_patch_bias)
        self.position_embeddings: EmbeddingTable | None = None
        if kind.has_position_table:
            self.position_embeddings = EmbeddingTable(config, num_positions)
        self.ln_pre, self.ln_post = (
            Norm(config, config.hidden_size, config.layernorm_epsilon, has_partial_gradient=False)
            if is_there
            else None
            for is_there in (kind.has_norm_before, kind.has_norm_after)
        )
        self.build_layers(transformer_layer_spec, pg_collection)
        self.finalize_parameters()

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Encode [N, 3 f p p] -> [1 + taps, N/4, 4 h].  Collective over the tensor-parallel group.

        Raises DataError if ``grids`` have another number of patches, or odd heights or widths.
        """
        count = sum(t * h * w for t, h, w in grids)
        if count != len(patches) or any(h % MERGE or w % MERGE for _, h, w in grids):
            raise DataError(
                f"{len(patches)} patches do not fill images of {list(grids)} patches (time, height "
                "and width): give all patches, and even heights and widths"
            )
        hidden = self.conv1(patches)
        if self.position_embeddings is not None:
            table = self.position_embeddings.weight
            hidden = hidden + torch.cat([interpolated(table, grid) for grid in grids])
        if self.ln_pre is not None:
            hidden = self.ln_pre(hidden)
        lengths = [h * w for t, h, w in grids for _ in range(t)]
        ends = torch.tensor([0, *lengths], device=patches.device).cumsum(0).to(torch.int32)
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
        tapped: list[Tensor] = []

        def keep(states: Tensor) -> Tensor:
            tapped.append(states.squeeze(1))
            return states

        hidden = self.run_layers(
            hidden.unsqueeze(0),
            None,
            rotary_pos_emb=self._table(grids, patches.device),
            packed_seq_params=packed,
            visit=dict.fromkeys(self.taps, keep) or None,
        ).squeeze(0)
        if self.ln_post is not None:
            hidden = self.ln_post(hidden)
        return torch.stack([hidden, *tapped]).reshape(1 + len(tapped), count // MERGE**2, -1)

    def _table(self, grids: Sequence[Grid], where: torch.device) -> RotaryTable:
        """Return the rotation of each patch: half of the pairs by its row, half by its column.

        Both have the same frequencies, or with ``has_own_frequencies`` every other one of a head.
        """
        config = self.config
        positions = torch.cat([patch_positions(grid, where) for grid in grids])
        if self.has_own_frequencies:
            frequencies = base_frequencies(config.kv_channels, _BASE).view(-1, 2).t().to(where)
        else:
            frequencies = base_frequencies(config.kv_channels // 2, _BASE).to(where)
        angles = (positions.unsqueeze(-1) * frequencies).flatten(1)[:, None, None]
        dtype = config.params_dtype
        return RotaryTable(angles.cos().to(dtype), angles.sin().to(dtype))


class PatchMatrix(nn.Module):
    """A linear layer over the values of each patch."""

    def __init__(self, config: TransformerConfig, num_values: int, *, has_bias: bool) -> None:
        super().__init__()
        shape = config.hidden_size, num_values
        self.weight = replicated(config, shape, config.init_method)
        self.bias: nn.Parameter | None = None
        if has_bias:
            self.bias = replicated(config, shape[:1], Init("zeros"))

    def forward(self, patches: Tensor) -> Tensor:
        """Project [N, values] -> [N, h]."""
        return F.linear(patches.to(self.weight.dtype), self.weight, self.bias)


def interpolated(table: Tensor, grid: Grid) -> Tensor:
    """Return the embedding of each patch of an image, in blocks of 2 x 2: [t h w, c].

    ``table`` [n, c] has the embeddings of a square, whose corners are those of the image.
    """
    t, h, w = grid
    side = math.isqrt(len(table))
    planes = table.view(1, side, side, -1).permute(0, 3, 1, 2)
    wide = planes.to(torch.promote_types(planes.dtype, torch.float32))
    found = F.interpolate(wide, (h, w), mode="bilinear", align_corners=True)[0].permute(1, 2, 0)
    blocks = found.view(h // MERGE, MERGE, w // MERGE, MERGE, -1).transpose(1, 2)
    return blocks.reshape(h * w, -1).repeat(t, 1).to(table.dtype)


def patch_positions(grid: Grid, where: torch.device | None = None) -> Tensor:
    """Return row and column of each patch of an image, in blocks of 2 x 2: [t h w, 2]."""
    t, h, w = grid
    cells = torch.cartesian_prod(torch.arange(h, device=where), torch.arange(w, device=where))
    blocks = cells.view(h // MERGE, MERGE, w // MERGE, MERGE, 2).transpose(1, 2)
    return blocks.reshape(-1, 2).repeat(t, 1)


class Qwen2VLModel(LLaVAModel):
    """One pipeline stage of Qwen2-VL; ``img_h`` x ``img_w`` is the area of the largest image.

    Qwen3-VL adds ``taps`` of the encoder to the hidden states after the first layers (DeepStack).
    ``row_ends``: tokens that end rows of embeddings, and the last of them (Mistral 3).
    """

    def __init__(
        self,
        *args: Any,
        img_h: int,
        img_w: int,
        patch_dim: int,
        row_ends: Sequence[int] = (),
        **more: Any,
    ) -> None:
        """Build the models; see `LLaVAModel`."""
        options = more.get("encoder_options") or {}
        self.num_added = len(options.get("taps", ()))
        self._row_ends = tuple(row_ends)
        self._largest: Grid = (1, img_h // patch_dim, img_w // patch_dim)
        more["pixel_shuffle"] = True  # the projector reads 2 x 2 patches as one
        super().__init__(*args, img_h=img_h, img_w=img_w, patch_dim=patch_dim, **more)
        self.embeddings_per_tile = 1
        self.reads_image_sizes = True
        self.arranges_tiles = bool(row_ends)

    def _build_images(
        self,
        layers: tuple[TransformerConfig, ModuleSpec],
        projector: tuple[TransformerConfig, MLPSubmodules, str],
        sizes: Mapping[str, Any],
    ) -> None:
        super()._build_images(layers, projector, sizes)
        if self.num_added > len(self.language_model.decoder.layers):
            raise ConfigError(
                f"--deepstack-visual-indexes: {self.num_added} features are added after the first "
                f"layers, and the first pipeline stage has "
                f"{len(self.language_model.decoder.layers)}: give it more layers"
            )
        config, spec, kind = projector
        spec = ProjectorSubmodules(spec.linear_fc1, spec.linear_fc2, Norm)
        width = MERGE**2 * layers[0].hidden_size
        if self.num_added:
            self.deepstack = nn.ModuleList(
                MultimodalProjector(config, spec, kind, width, tp_group=self.pg_collection.tp)
                for _ in range(self.num_added)
            )

    def build_encoder(
        self,
        config: TransformerConfig,
        spec: ModuleSpec,
        groups: ProcessGroupCollection,
        **sizes: Any,
    ) -> Qwen2VLVisionModel:
        """Build the encoder of images."""
        names = ("patch_dim", "frames_per_patch", "model_subtype", "num_positions", "taps")
        own = {name: sizes[name] for name in names if name in sizes}
        return Qwen2VLVisionModel(config, spec, pg_collection=groups, **own)

    def ends_of_rows(self, images: Tensor) -> Tensor | None:
        """Return the word embeddings of the tokens that end rows: [2, h]."""
        if not self._row_ends:
            return None
        ids = torch.tensor([self._row_ends[::-1]], device=images.device)
        ends: Tensor = self.language_model.embedding(ids, None)
        return ends.squeeze(1)

    def _arrangements(self, image_sizes: Any) -> Sequence[TileArrangement | EndedRows]:
        return [EndedRows(h // MERGE, w // MERGE) for _, h, w in image_sizes.tolist()]

    def image_embeddings(self, images: Tensor, image_sizes: Tensor | None = None) -> Tensor:
        """Encode and project blocks of patches: [t, 4, values] -> [t, (1 + taps) h]."""
        assert isinstance(self.vision_model, Qwen2VLVisionModel), "the first stage has the encoder"
        assert self.vision_projection is not None
        merged = self.vision_model(images.flatten(0, 1), self._grids(images, image_sizes))
        projectors = (self.vision_projection, *(self.deepstack or ()))
        return torch.cat([each(x) for each, x in zip(projectors, merged, strict=True)], -1)

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
