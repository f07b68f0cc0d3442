"""ViT with a classifier: an image is a sequence of patches, the class token predicts its class.

``b`` images, ``H`` and ``W`` their height and width in pixels, ``n`` embeddings of an image (class
token, then patches row by row), ``s`` positions of a sequence (n, or more to divide evenly over
tensor-parallel ranks), ``h`` hidden size, ``c`` classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core import device
from megatron.core.models.bert.bert_lm_head import dense
from megatron.core.models.common.vision_module.vision_module import VisionModule
from megatron.core.models.vision.clip_vit_model import (
    EmbeddingTable,
    PatchProjection,
    check_image_size,
    replicated,
)
from megatron.core.models.vision.kinds import check_images
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import fork_for_tokens
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig


class ViTClassifier(VisionModule):
    """One pipeline stage of a vision transformer that maps images to logits of classes."""

    @library_call()
    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: ModuleSpec,
        num_classes: int,
        *,
        pg_collection: ProcessGroupCollection,
        patch_dim: int = 16,
        img_h: int = 224,
        img_w: int = 224,
        sequence_length: int | None = None,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
    ) -> None:
        """Build the stage.  ``sequence_length``: s, by default n; more positions are padding.

        Raises ConfigError if patches do not fill the image, and with context parallelism.
        """
        check_images("the image classifier", "vit", img_h, img_w, patch_dim)
        super().__init__(config)
        self.check_groups(pg_collection)
        self.img_h = img_h
        self.img_w = img_w
        self.pre_process = pre_process
        self.post_process = post_process
        self.vp_stage = vp_stage
        self.num_embeddings = (img_h // patch_dim) * (img_w // patch_dim) + 1
        self.sequence_length = sequence_length or self.num_embeddings
        if pre_process:
            shape = (1, 1, config.hidden_size)
            self.conv1 = PatchProjection(config, patch_dim, has_bias=True)
            self.class_token = replicated(config, shape, config.init_method)
            self.position_embeddings = EmbeddingTable(config, self.num_embeddings)
        self.decoder = TransformerBlock(
            config,
            transformer_layer_spec,
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )
        if post_process:
            self.classifier = dense(config.hidden_size, num_classes, config)
        self.finalize_parameters()

    def shared_embedding_or_output_weight(self) -> nn.Parameter | None:
        """Return None: no weight is on two stages."""
        return None

    def forward(self, images: Tensor | None) -> Tensor:
        """Map images [b, 3, H, W] to logits [b, c] in float32.

        Stages before the last return hidden states, and those after the first need no images.
        Collective over the tensor-parallel group.  Raises DataError for images of another size.
        """
        embedded: Tensor | None = None
        if self.pre_process:
            assert images is not None, "the first stage reads images"
            embedded = self._embedded(images)
        padding: Tensor | None = None  # mask of keys [1, 1, 1, s], True for padding
        if self.sequence_length > self.num_embeddings:
            places = torch.arange(self.sequence_length, device=device.current())
            padding = (places >= self.num_embeddings)[None, None, None]
        hidden: Tensor = self.decoder(embedded, padding)
        if not self.post_process:
            return hidden
        if self.is_sharded:
            hidden = gather_from_sequence_parallel_region(hidden, False, group=self.tp_group)
        logits: Tensor = self.classifier(hidden[0])[0]
        return logits.float()

    def _embedded(self, images: Tensor) -> Tensor:
        """Return the embeddings [s, b, h], [s/tp, b, h] with sequence parallelism."""
        check_image_size(images, self.img_h, self.img_w)
        first = self.class_token.expand(images.shape[0], -1, -1)
        hidden = torch.cat([first, self.conv1(images)], 1)
        hidden = hidden + self.position_embeddings.weight
        num_padding = self.sequence_length - self.num_embeddings
        hidden = F.pad(hidden, (0, 0, 0, num_padding)).transpose(0, 1).contiguous()
        if self.is_sharded:
            hidden = scatter_to_sequence_parallel_region(hidden, self.tp_group)
        if self.config.fp32_residual_connection:
            hidden = hidden.float()
        if self.training and self.config.hidden_dropout > 0:
            with fork_for_tokens(True, is_sequence_sharded=self.is_sharded):
                hidden = F.dropout(hidden, self.config.hidden_dropout)
        return hidden
