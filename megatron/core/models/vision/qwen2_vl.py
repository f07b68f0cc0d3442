"""Qwen2-VL's encoder: images and videos of any size in one row of patches.

``N`` patches of all images, in blocks of 2 x 2 neighbours, ``g`` images or frames, ``p`` the side
of a patch, ``f`` frames of a patch, ``h`` hidden size.  Patches attend to those of their frame.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.errors import DataError
from megatron.core.fusions.rope import RotaryTable
from megatron.core.models.common.vision_module.vision_module import VisionModule
from megatron.core.models.vision.clip_vit_model import replicated
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.norms import Norm
from megatron.core.transformer.rope import base_frequencies
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

MERGE = 2  # neighbours in each direction that become one embedding of the language model
_COLOURS = 3
_BASE = 10000.0
Grid = tuple[int, int, int]  # patches of an image or video along time, height and width


class Qwen2VLVisionModel(VisionModule):
    """Maps patches to the input of a projector: one row for each block of 2 x 2 patches."""

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
        values = _COLOURS * frames_per_patch * patch_dim**2
        self.conv1 = PatchMatrix(config, values)
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
        shape = (config.hidden_size, num_values)
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
