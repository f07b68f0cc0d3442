"""Vision transformers that read patches of one image size: CLIP, SigLIP, InternViT, plain ViT.

``b`` images, ``H`` and ``W`` their height and width in pixels, ``p`` the side of a patch, ``n``
embeddings of an image (class tokens, then patches row by row), ``h`` hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.errors import DataError
from megatron.core.models.common.vision_module.vision_module import VisionModule
from megatron.core.models.vision.kinds import KINDS as KINDS
from megatron.core.models.vision.kinds import check_images
from megatron.core.models.vision.kinds import get_num_image_embeddings as get_num_image_embeddings
from megatron.core.models.vision.multimodal_projector import average_pool, pixel_shuffle
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_init import Init, InitMethod, new_parameter, param_info_for
from megatron.core.transformer.norms import Norm
from megatron.core.transformer.spec_utils import ModuleSpec, Slot, build_norm
from megatron.core.transformer.transformer_config import TransformerConfig

_COLORS = 3


class CLIPViTModel(VisionModule):
    """Maps images to one embedding for each patch and class token."""

    @library_call("... model_comm_pgs vp_stage", unused="vp_stage")
    def __init__(
        self,
        transformer_config: TransformerConfig,
        transformer_layer_spec: ModuleSpec,
        ln_pre_impl: Slot = Norm,
        ln_post_impl: Slot = Norm,
        add_class_token: bool | None = None,
        class_token_len: int = 1,
        patch_dim: int = 14,
        img_h: int = 336,
        img_w: int = 336,
        model_subtype: str = "clip",
        *,
        drop_class_token: bool = False,
        merges_neighbours: bool = False,
        pooled_embeddings: int = 0,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        """Build the encoder.  ``model_subtype`` is a key of `KINDS`.

        ``class_token_len``: number of class tokens; ``add_class_token`` defaults to what the
        subtype has.  What a projector reads may be asked for: ``drop_class_token``: no embedding of
        class tokens; ``merges_neighbours``: pixel shuffle; ``pooled_embeddings``: number of
        embeddings to average to.  Raises ConfigError if patches do not fill the image.
        """
        check_images("the vision encoder", model_subtype, img_h, img_w, patch_dim)
        super().__init__(transformer_config)
        kind = KINDS[model_subtype]
        config = transformer_config
        h = config.hidden_size
        self.img_h = img_h
        self.img_w = img_w
        self.patch_dim = patch_dim
        self.drop_class_token = drop_class_token
        self.merges_neighbours = merges_neighbours
        self.pooled_embeddings = pooled_embeddings
        has_class_token = kind.has_class_token if add_class_token is None else add_class_token
        self.class_token_len = class_token_len if has_class_token else 0
        self.seq_length = (img_h // patch_dim) * (img_w // patch_dim) + self.class_token_len
        self.conv1 = PatchProjection(config, patch_dim, has_bias=kind.has_patch_bias)
        self.position_embeddings = EmbeddingTable(config, self.seq_length)
        self.class_token: nn.Parameter | None = None
        if has_class_token:
            self.class_token = replicated(config, (1, class_token_len, h), config.init_method)
        self.ln_pre = self._norm(ln_pre_impl) if kind.has_norm_before else None
        self.ln_post = self._norm(ln_post_impl) if kind.has_norm_after else None
        self.build_layers(transformer_layer_spec, pg_collection)
        self.finalize_parameters()

    def _norm(self, spec: Slot) -> nn.Module:
        """Build a norm of embeddings, which every tensor-parallel rank computes completely."""
        width = self.config.hidden_size
        norm: nn.Module = build_norm(spec, self.config, width, has_partial_gradient=False)
        return norm

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Encode images [b, 3, H, W], or videos of f frames [b, f, 3, H, W]: [.., n, h].

        Collective over the tensor-parallel group.  ``attention_mask``: True for pairs of patches
        that do not attend to each other.  Raises DataError for images of another size.
        """
        x = x.flatten(0, -4)
        check_image_size(x, self.img_h, self.img_w)
        hidden: Tensor = self.conv1(x)
        if self.class_token is not None:
            hidden = torch.cat([self.class_token.expand(len(x), -1, -1), hidden], 1)
        hidden = hidden + self.position_embeddings.weight
        if self.ln_pre is not None:
            hidden = self.ln_pre(hidden)
        hidden = self.run_layers(hidden, attention_mask)
        if self.ln_post is not None:
            hidden = self.ln_post(hidden)
        if self.drop_class_token:
            hidden = hidden[:, self.class_token_len :]
        if self.pooled_embeddings:
            return average_pool(hidden, self.pooled_embeddings)
        return pixel_shuffle(hidden) if self.merges_neighbours else hidden


def check_image_size(images: Tensor, img_h: int, img_w: int) -> None:
    """Raise DataError unless images [b, 3, H, W] have the model's height and width."""
    if images.shape[1:] != (_COLORS, img_h, img_w):
        raise DataError(
            f"images of shape {tuple(images.shape[1:])} do not fit an encoder of "
            f"{(_COLORS, img_h, img_w)}: resize them, or set --img-h and --img-w"
        )


class PatchProjection(nn.Module):
    """A linear layer over the pixels of each patch: a convolution whose stride is its width."""

    def __init__(self, config: TransformerConfig, patch_dim: int, *, has_bias: bool) -> None:
        super().__init__()
        self.patch_dim = patch_dim
        shape = (config.hidden_size, _COLORS, patch_dim, patch_dim)
        self.weight = replicated(config, shape, config.init_method)
        self.bias: nn.Parameter | None = None
        if has_bias:
            self.bias = replicated(config, shape[:1], Init("zeros"))

    def forward(self, x: Tensor) -> Tensor:
        """Project: [b, 3, H, W] -> [b, H/p W/p, h]."""
        x = F.conv2d(x.to(self.weight.dtype), self.weight, self.bias, stride=self.patch_dim)
        return x.flatten(2).transpose(1, 2)


class EmbeddingTable(nn.Module):
    """Learned embeddings of the places in an image."""

    def __init__(self, config: TransformerConfig, count: int) -> None:
        super().__init__()
        self.weight = replicated(config, (count, config.hidden_size), config.init_method)


def replicated(config: TransformerConfig, shape: tuple[int, ...], init: InitMethod) -> nn.Parameter:
    """Return a parameter that every tensor-parallel rank has completely."""
    return new_parameter(shape, config.params_dtype, param_info_for(shape, init))
