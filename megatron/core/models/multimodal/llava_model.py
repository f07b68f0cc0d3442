"""LLaVA: an encoder of images, a projector, and a language model that reads both.

``b`` rows, ``s`` tokens, ``L`` positions after each image token has become the embeddings of its
image, ``t`` tiles (images, or parts of one) in all rows.  The first pipeline stage holds the
encoder; every stage knows the positions, because they follow from ids and numbers of tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core import device
from megatron.core.config.errors import ConfigError, DataError
from megatron.core.models.common.vision_module.vision_module import VisionModule
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.multimodal.context_parallel import (
    bounds_of_samples,
    held_positions,
    mask_of_samples,
    mask_without_images,
    split_over_ranks,
)
from megatron.core.models.multimodal.splicing import IGNORE_INDEX as IGNORE_INDEX
from megatron.core.models.multimodal.splicing import (
    Splice,
    decoder_inputs,
    splice,
    value_of_image,
)
from megatron.core.models.vision.clip_vit_model import (
    KINDS,
    CLIPViTModel,
    EmbeddingTable,
    get_num_image_embeddings,
)
from megatron.core.models.vision.multimodal_projector import MultimodalProjector
from megatron.core.models.vision.multimodal_projector import pixel_shuffle as pixel_shuffle
from megatron.core.packed_seq_params import AttentionMask, PackedBounds, PackedSeqParams
from megatron.core.parallel.context_parallel_partition import sequence_divisor
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import name_parameters, prefix_names
from megatron.core.tile_arrangement import EndedRows, TileArrangement
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

DEFAULT_IMAGE_TOKEN_INDEX = -200
IMAGE_TOKEN = "<image>"  # noqa: S105
VIDEO_TOKEN = "<video>"  # noqa: S105


class LLaVAModel(MegatronModule):
    """One pipeline stage of a vision-language model.

    ``reads_values``: whether the host reads ids and numbers of tiles.  The planner, whose tensors
    have no values, clears it: rows have their maximum length.
    """

    reads_values = True
    num_added = 0  # features of an image beside its embeddings, see `decoder_inputs`

    @library_call(
        unused="allow_missing_vision_projection_checkpoint add_decoder max_num_tiles tokenizer_type"
    )
    def __init__(
        self,
        language_transformer_config: TransformerConfig,
        language_transformer_layer_spec: ModuleSpec,
        language_vocab_size: int,
        language_max_sequence_length: int,
        vision_transformer_config: TransformerConfig,
        vision_transformer_layer_spec: ModuleSpec,
        drop_vision_class_token: bool,
        vision_projection_config: TransformerConfig,
        vision_projection_layer_spec: MLPSubmodules,
        vision_projection_type: str = "mlp",
        *,
        pre_process: bool = True,
        post_process: bool = True,
        add_encoder: bool = True,
        img_h: int = 336,
        img_w: int = 336,
        patch_dim: int = 14,
        image_token_index: int = DEFAULT_IMAGE_TOKEN_INDEX,
        pixel_shuffle: bool = False,
        encoder_options: Mapping[str, Any] | None = None,
        vision_model_subtype: str = "clip",
        row_length: int | None = None,
        has_image_newline: bool = False,
        packs_samples: Literal["no", "mask", "bounds"] = "no",
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
        **of_language: Any,
    ) -> None:
        """Build the models.  The projector's output has the language model's width.

        ``row_length``, by default that of all positions: L with pipeline or expert parallelism, its
        maximum without.  ``has_image_newline``: tiles are arranged in rows that end with an
        embedding of their own, as in LLaVA-NeXT.  ``packs_samples``: a row has several samples,
        whose ``position_ids`` begin at 0 and which do not attend to each other, by a mask or by
        bounds.  ``encoder_options``: of `build_encoder`; averaged embeddings attend to all of their
        image, which needs layers of mask type arbitrary.  ``of_language``: further arguments of
        `GPTModel`, or ``language_`` and their names.  The first stage has the encoder if it should.
        """
        super().__init__(language_transformer_config)
        self.pg_collection = groups = pg_collection
        self.pre_process = pre_process
        self.post_process = post_process
        self.vp_stage = vp_stage
        self.image_token_index = image_token_index
        self.row_length = row_length or language_max_sequence_length
        self.arranges_tiles = self.reads_image_sizes = has_image_newline
        self.packs_samples = packs_samples
        self.language_model = GPTModel(
            language_transformer_config,
            language_transformer_layer_spec,
            language_vocab_size,
            language_max_sequence_length,
            pre_process=pre_process,
            post_process=post_process,
            scatter_embedding_sequence_parallel=False,  # the sequence is complete afterwards
            pg_collection=groups,
            vp_stage=vp_stage,
            **{name.removeprefix("language_"): value for name, value in of_language.items()},
        )
        sizes: dict[str, Any] = {
            **{"img_h": img_h, "img_w": img_w, "patch_dim": patch_dim},
            **{"drop_class_token": drop_vision_class_token, "merges_neighbours": pixel_shuffle},
            **{"model_subtype": vision_model_subtype, **(encoder_options or {})},
        }
        self.embeddings_per_tile = get_num_image_embeddings(
            *(img_h, img_w, patch_dim, vision_model_subtype, drop_vision_class_token, 1),
            *(pixel_shuffle, sizes.get("pooled_embeddings", 0)),
        )
        self.sees_images_whole = KINDS[vision_model_subtype].is_pooled
        self.vision_model: VisionModule | None = None
        self.vision_projection: MultimodalProjector | None = None
        self.image_newline: EmbeddingTable | None = None
        self.deepstack: nn.ModuleList | None = None
        if pre_process and add_encoder:
            layers = vision_transformer_config, vision_transformer_layer_spec
            projector = vision_projection_config, vision_projection_layer_spec
            self._build_images(layers, (*projector, vision_projection_type), sizes)
        self._finalize_parameters()

    def _build_images(
        self,
        layers: tuple[TransformerConfig, ModuleSpec],
        projector: tuple[TransformerConfig, MLPSubmodules, str],
        sizes: Mapping[str, Any],
    ) -> None:
        """Build the encoder of images and the projector."""
        groups = self.pg_collection.without_context_parallelism()
        self.vision_model = self.build_encoder(*layers, groups, **sizes)
        if self.arranges_tiles:
            self.image_newline = EmbeddingTable(projector[0], 1)
        width = layers[0].hidden_size * (4 if sizes["merges_neighbours"] else 1)
        self.vision_projection = MultimodalProjector(*projector, width, tp_group=groups.tp)

    def build_encoder(
        self,
        config: TransformerConfig,
        spec: ModuleSpec,
        groups: ProcessGroupCollection,
        **sizes: Any,
    ) -> VisionModule:
        """Build the encoder of images; ``sizes``: further arguments of its class."""
        return CLIPViTModel(config, spec, pg_collection=groups, **sizes)

    def _finalize_parameters(self) -> None:
        """Put the names of the parts before the global names that each has assigned; initialize."""
        for own in (self.vision_projection, self.image_newline, self.deepstack):
            if own is not None:
                name_parameters(own)
        for name, part in self.named_children():
            prefix_names(part, f"{name}.")
        self.fill_parameters()

    def freeze(
        self,
        freeze_language_model: bool,
        freeze_vision_model: bool,
        freeze_vision_projection: bool,
    ) -> None:
        """Exclude parts from training: their parameters get no gradients and no optimizer state."""
        for part, is_frozen in (
            (self.language_model, freeze_language_model),
            (self.vision_model, freeze_vision_model),
            (self.vision_projection, freeze_vision_projection),
            (self.image_newline, freeze_vision_projection),
            (self.deepstack, freeze_vision_projection),
        ):
            if part is not None and is_frozen:
                part.requires_grad_(False)

    def shared_embedding_or_output_weight(self) -> nn.Parameter | None:
        """Return the language model's shared embedding weight."""
        return self.language_model.shared_embedding_or_output_weight()

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """Set the hidden states that the previous stage sent."""
        self.language_model.set_input_tensor(input_tensor)

    @library_call()
    def forward(
        self,
        images: Tensor | None,
        input_ids: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        inference_context: None = None,
        num_image_tiles: Tensor | None = None,
        image_token_index: int | None = None,
        runtime_gather_output: bool | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        *,
        arrangements: Sequence[TileArrangement | EndedRows] | None = None,
        image_sizes: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Map tiles [t, 3, H, W] and ids [b, s] to losses [b, L] and the loss mask [b, L].

        An id ``image_token_index``, by default the model's, stands for the next image, which has
        the next number of ``num_image_tiles``; these are [b, s] with 0 at text and -1 at padding
        behind it, which no expert computes, or one number per image (default: one tile each).
        ``arrangements``, one per image, order the embeddings of its tiles instead, and give their
        numbers; they follow from ``image_sizes`` [images, 4], the fields of `TileArrangement` but
        the last, whose values the host reads.  Without labels the first result are logits; stages
        before the last return hidden states.  Rows may have no image; every rank runs the encoder
        all the same, because its collectives need all ranks.  With context parallelism the
        arguments are complete rows, of which every rank encodes the images, and the results have
        this rank's L/cp positions.

        Raises DataError if the ids ask for another number of tiles (on a CPU; on a GPU the
        comparison would wait for the device).
        """
        if inference_context is not None:
            raise ConfigError("LLaVAModel: generate by tools/run_text_generation_server.py")
        index = self.image_token_index if image_token_index is None else image_token_index
        is_image = input_ids == index
        if self.arranges_tiles and image_sizes is not None and self.reads_values:
            arrangements = self._arrangements(image_sizes)
        counts = self._counts(is_image, num_image_tiles, arrangements)
        self._check(images, counts, arrangements)
        where = splice(is_image, counts, self._length(is_image, counts))
        combined: Tensor | None = None
        more = self._for_experts(where, num_image_tiles)
        if self.pre_process:
            ids = input_ids.masked_fill(is_image, 0)
            text = self.language_model.embedding(ids, position_ids).transpose(0, 1)
            combined = self._combined(where, text, images, image_sizes, arrangements)
            combined, added = decoder_inputs(combined, text.shape[-1])
            more |= added
        cp = self.pg_collection.cp
        output = self.language_model(
            None,
            self.positions(where, is_image, image_sizes),
            self._mask(where, is_image, position_ids) if attention_mask is None else attention_mask,
            decoder_input=combined,
            labels=None if labels is None else held_positions(where.labels(labels), cp),
            packed_seq_params=packed_seq_params,
            runtime_gather_output=runtime_gather_output,
            extra_block_kwargs=more,
        )
        if loss_mask is None:
            return output, None
        return output, held_positions(where.loss_mask(loss_mask), cp)

    def _mask(
        self, where: Splice, is_image: Tensor, position_ids: Tensor | None
    ) -> AttentionMask | None:
        """Return which keys each position does not attend to; None if only later ones."""
        hidden = self._hidden_samples(where, position_ids)
        if not self.sees_images_whole:
            return hidden
        later = mask_without_images(is_image, where, self.pg_collection.cp)
        assert not isinstance(hidden, PackedBounds), "bounds cannot describe images"
        return later if hidden is None else later | hidden

    def _hidden_samples(self, where: Splice, position_ids: Tensor | None) -> AttentionMask | None:
        """Return which keys are of another sample; None if a row is one sample."""
        if self.packs_samples == "no":
            return None
        assert position_ids is not None, "every stage reads where the samples of a row begin"
        starts = position_ids == 0
        if self.packs_samples == "mask":
            return mask_of_samples(starts, where.token, self.pg_collection.cp)
        if not self.reads_values:  # of the same shape whatever the number of samples
            starts = torch.arange(starts.shape[1], device=starts.device).expand_as(starts) == 0
        return bounds_of_samples(starts, where.token)

    def positions(
        self, where: Splice, is_image: Tensor, image_sizes: Tensor | None
    ) -> Tensor | None:
        """Return the positions of this rank if they are not the places in the row."""
        return None

    def image_embeddings(self, images: Tensor, image_sizes: Tensor | None = None) -> Tensor:
        """Encode and project tiles: [t, 3, H, W] -> [t n, h], for n embeddings of a tile."""
        assert self.vision_model is not None, "the first stage has the encoder"
        assert self.vision_projection is not None
        projected: Tensor = self.vision_projection(self.vision_model(images))
        return projected.flatten(0, 1)

    def rows_of_images(self, images: Tensor, image_sizes: Tensor | None = None) -> Tensor:
        """Return the rows that stand for images in a text, in their order: [t, 3, H, W] -> [n, h].

        ``image_sizes``: as in `forward`.  Collective over the tensor-parallel group.
        """
        has_rows = self.arranges_tiles and image_sizes is not None
        arrangements = self._arrangements(image_sizes) if has_rows else None
        return self._arranged(images, image_sizes, arrangements)

    def _arranged(
        self,
        images: Tensor,
        image_sizes: Tensor | None,
        arrangements: Sequence[TileArrangement | EndedRows] | None,
    ) -> Tensor:
        """Return the embeddings of images, in rows with newlines if there are ``arrangements``.

        Without them, an embedding for newlines is the last row.
        """
        found = self.image_embeddings(images, image_sizes)
        if (ends := self.ends_of_rows(found)) is not None:
            found = torch.cat([found, ends])
        if arrangements is None:
            return found
        rows: list[Tensor] = []
        first = 0
        for each in arrangements:
            order = torch.from_numpy(each.order)
            rows.append(torch.where(order < 0, len(found) + order, order + first))
            first += each.num_tiles * self.embeddings_per_tile
        return found[torch.cat(rows).to(found.device)]

    def ends_of_rows(self, images: Tensor) -> Tensor | None:
        """Return the embeddings that end rows, the last for `NEWLINE`, [.., h]; or None."""
        return None if self.image_newline is None else self.image_newline.weight

    def _combined(
        self,
        where: Splice,
        text: Tensor,
        images: Tensor | None,
        sizes: Tensor | None,
        arrangements: Sequence[TileArrangement | EndedRows] | None,
    ) -> Tensor:
        """Return the embeddings of texts and images: [L, b, h], [L/tp, b, h] if it is split.

        Their width is that of `image_embeddings`; behind h it is 0 at text.
        """
        if self.vision_model is not None:
            seen = images if images is not None and len(images) else self.blank_images(text.device)
            is_blank = seen is not images
            text = F.pad(text, (0, self.num_added * text.shape[-1]))
            found = self._arranged(seen, sizes, None if is_blank else arrangements)
            if is_blank:  # no image in these rows: all gradients are zero, none is missing
                text = text + 0.0 * found.sum()
                found = found[:0]
            text = where.embeddings(text, found)
        return split_over_ranks(text, self.config, self.pg_collection)

    def _for_experts(self, where: Splice, num_image_tiles: Tensor | None) -> dict[str, object]:
        """Return the mask of this rank's positions that experts leave out; none without experts."""
        if self.config.num_moe_experts is None:
            return {}
        is_padding = ~(where.is_image | where.is_text)
        if num_image_tiles is not None and num_image_tiles.shape == where.is_before_image.shape:
            is_padding = is_padding | (num_image_tiles < 0).gather(1, where.token)
        mask = split_over_ranks(is_padding, self.config, self.pg_collection)
        return {"padding_mask": mask.transpose(0, 1)}

    def _arrangements(self, image_sizes: Any) -> Sequence[TileArrangement | EndedRows]:
        count = self.embeddings_per_tile
        return [TileArrangement.of_size(size, count) for size in image_sizes.tolist()]

    def blank_images(self, where: torch.device) -> Tensor:
        """Return one tile, which the encoder reads if no row has an image."""
        assert isinstance(self.vision_model, CLIPViTModel), "the first stage has the encoder"
        size = (1, 3, self.vision_model.img_h, self.vision_model.img_w)
        return torch.zeros(size, device=where)

    def _counts(
        self,
        is_image: Tensor,
        num_image_tiles: Tensor | None,
        arrangements: Sequence[TileArrangement | EndedRows] | None,
    ) -> Tensor:
        """Return the embeddings that each token [b, s] stands for, 0 for text."""
        if arrangements is not None:
            sizes = [len(each.order) for each in arrangements]
            return value_of_image(is_image, torch.tensor(sizes, dtype=torch.int64))
        numbers: Tensor | int = 1
        if num_image_tiles is not None:
            numbers = num_image_tiles
            if numbers.shape != is_image.shape:
                numbers = value_of_image(is_image, numbers.flatten())
        return is_image * numbers * self.embeddings_per_tile

    def _length(self, is_image: Tensor, counts: Tensor) -> int:
        """Return L: stages, and ranks that exchange tokens of experts, need rows of one length.

        The ranks of a row split it evenly.
        """
        limit = self.row_length
        groups = self.pg_collection
        if groups.pp.size() > 1 or groups.ep.size() > 1 or not self.reads_values:
            return limit
        longest = int((counts + ~is_image).sum(1).max())
        parts = sequence_divisor(
            cp=groups.cp.size(),
            tp=groups.tp.size(),
            sequence_parallel=self.config.sequence_parallel,
        )
        return min(limit, -(-longest // parts) * parts)

    def _check(
        self,
        images: Tensor | None,
        counts: Tensor,
        arrangements: Sequence[TileArrangement | EndedRows] | None,
    ) -> None:
        if images is None or device.is_cuda(counts.device) or not self.reads_values:
            return
        if arrangements is not None:
            tiles = sum(each.num_tiles for each in arrangements)
            places = int((counts > 0).sum())
            if places != len(arrangements) or tiles != len(images):
                raise DataError(
                    f"{len(arrangements)} images have {tiles} tiles; the text has places for "
                    f"{places} images, and {len(images)} tiles are given"
                )
            return
        wanted, given = int(counts.sum()), len(images) * self.embeddings_per_tile
        if wanted != given:
            raise DataError(
                f"the text has places for {wanted} embeddings of images, and {len(images)} tiles "
                f"have {given}: give a tile for each image token, or the numbers of tiles"
            )
