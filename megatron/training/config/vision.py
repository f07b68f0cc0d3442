"""Flags of models that read images: the encoder, the projector, the layout of samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core.config import flag_messages
from megatron.core.config.option import MAX_LAYERS, option

_vision = partial(option, group="vision")
ENCODERS = (
    *("clip", "siglip", "siglip_without_norm", "internvit", "internvit300M", "vit", "gemma3"),
    *("qwen2_vl", "qwen3_vl", "pixtral"),
)
# The library has RADIO; no run trains with it.
_RADIO = dict.fromkeys(("radio", "radio-g", "cradio-g"), flag_messages.RADIO)


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    img_h: int = _vision(
        224,
        "Height of images in pixels; with --vision-model-type qwen2_vl, qwen3_vl or pixtral they "
        "keep their shape, and --img-h times --img-w is their largest area, or with pixtral both "
        "are their longest sides.",
        at_least=1,
    )
    img_w: int = _vision(224, "Width of images in pixels; see --img-h.", at_least=1)
    patch_dim: int = _vision(16, "Side of an image patch in pixels.", at_least=1)
    vision_model_type: str = _vision(
        "clip",
        "Architecture of the encoder outside its layers. If given, its layers have this "
        "architecture's activation and norm, and the projector GELU, biases and one width; else "
        "both have those of the language model.",
        default=None,
        choices=(*ENCODERS, *_RADIO),
        refused_values=_RADIO,
    )
    vision_num_layers: int | None = _vision(
        None,
        "Layers of the encoder of images; --encoder-num-layers if not given.",
        at_least=1,
        at_most=MAX_LAYERS,
    )
    vision_hidden_size: int | None = _vision(
        None, "Width of the encoder of images; --hidden-size if not given.", at_least=1
    )
    vision_ffn_hidden_size: int | None = _vision(
        None,
        "MLP width of the encoder of images; that of the language model if not given, 4 times "
        "--vision-hidden-size if that is given.",
        at_least=1,
    )
    vision_num_attention_heads: int | None = _vision(
        None,
        "Attention heads of the encoder of images; --num-attention-heads if not given.",
        at_least=1,
    )
    vision_projection_type: str = _vision(
        "mlp",
        "Projector between the encoder and the language model: mlp (two layers) or affine.",
        choices=("mlp", "affine"),
    )
    disable_vision_class_token: bool = _vision(
        False, "Drop the encoder's class token before the projector."
    )
    pixel_shuffle: bool = _vision(
        False, "Merge each 2 x 2 patches into one embedding before the projector."
    )
    pooled_image_embeddings: int = _vision(
        256,
        "Embeddings of an image with --vision-model-type gemma3, a square number: squares of "
        "neighbors are averaged.",
        at_least=1,
    )
    vision_num_position_embeddings: int = _vision(
        2304,
        "Learned positions of --vision-model-type qwen3_vl, a square number; they are interpolated "
        "to the size of each image.",
        at_least=1,
    )
    deepstack_visual_indexes: tuple[int, ...] = _vision(
        (),
        "Layers of the encoder of --vision-model-type qwen3_vl, from 0, whose outputs are "
        "projected and added to the hidden states after the first layers of the language model "
        "(DeepStack).",
        nargs="+",
        at_least=0,
    )
    image_row_end_tokens: tuple[int, ...] = _vision(
        (12, 13),
        "Ids of the tokens that end a row of embeddings of an image, and the last row, with "
        "--vision-model-type pixtral.",
        nargs="+",
        at_least=0,
    )
    freeze_LM: bool = _vision(  # noqa: N815  Megatron-LM's name
        False, "Do not train the language model.", flag="--freeze-LM"
    )
    freeze_ViT: bool = _vision(  # noqa: N815
        False, "Do not train the encoder of images.", flag="--freeze-ViT"
    )
    recompute_vision: bool = _vision(
        False, "Recompute each layer of the encoder of images in backward, to save its activations."
    )
    dataloader_seq_length: int | None = _vision(
        None,
        "Tokens of a sample's text, in which an image is one token; --seq-length if not given.",
        at_least=1,
    )
    use_tiling: bool = _vision(
        False, "Cut images into tiles, in the grid that is closest to their aspect ratio."
    )
    max_num_tiles: int = _vision(
        1,
        "Largest number of tiles that --use-tiling cuts an image into, without the thumbnail.",
        at_least=1,
    )
    use_thumbnail: bool = _vision(
        False, "Add the complete image as the last tile of an image of several tiles."
    )
    use_area_weighted_aspect_ratio: bool = _vision(
        False, "Choose the grid of tiles by the area that it keeps, too."
    )
    image_grid_pinpoints: tuple[int, ...] = _vision(
        (),
        "Heights and widths in pixels, as pairs, to the best of which each image is padded, as "
        "LLaVA-NeXT does: its tiles of --img-h x --img-w are read row by row, after the complete "
        "image, and rows end with a learned embedding.",
        nargs="+",
        at_least=1,
    )
    use_tile_tags: bool = _vision(
        False, "Name each tile before its embeddings, as NVLM does: <tile_1>, <tile_2> and so on."
    )
    caption_prompt: str = _vision(
        "", "Question before an image whose sample has a caption instead of a conversation."
    )
    prompt_path: str | None = _vision(
        None,
        "JSON file of questions before an image whose sample has a caption: the list llava, or "
        "raw, of CaptioningPretraining. The name of a sample chooses one. Replaces "
        "--caption-prompt.",
    )
    use_loss_scaling: bool = _vision(
        False,
        "Weigh each answer of a conversation by the root of its length, so that long answers "
        "dominate less.",
    )
    broken_samples: str = _vision(
        "skip",
        "What happens to a sample that cannot be used, such as one with a damaged image: skip "
        "replaces it by another one and names it in the log, fail ends the run.",
        choices=("skip", "fail"),
    )
    decoder_tp_comm_overlap: bool = _vision(
        False, "--tp-comm-overlap for the language model; the encoder has none."
    )
    use_packed_sequence: bool = _vision(
        False,
        "Pack several samples of images and text into one row, as many as fit "
        "--dataloader-seq-length tokens and --decoder-seq-length positions; they do not attend to "
        "each other.",
    )
    balance_image_tiles: bool = _vision(
        False,
        "Let data-parallel ranks encode about equal numbers of tiles.",
        ignored="--use-packed-sequence gives ranks rows of about equal length",
    )
    # Positions of a row in every layout, derived; ranks that split it add a few, see --seq-length.
    row_length: int | None = None

    @property
    def max_tiles(self) -> int:
        """Largest number of tiles of an image, with its thumbnail."""
        return largest_number_of_tiles(self)

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """(height, width) of each pair of --image-grid-pinpoints."""
        return grids_of(self)


def grids_of(flags: Any) -> tuple[tuple[int, int], ...]:
    """Return the (height, width) pairs of --image-grid-pinpoints."""
    sides = flags.image_grid_pinpoints
    return tuple(zip(sides[::2], sides[1::2], strict=False))


def largest_image(flags: Any, embeddings_per_tile: int) -> int:
    """Return the positions that an image takes at most, by the flags of a `VisionConfig`."""
    largest = largest_number_of_tiles(flags) * embeddings_per_tile
    rows = [height // max(1, flags.img_h) for height, _ in grids_of(flags)]
    # Each row of embeddings ends with one of its own.
    return largest + max(rows, default=0) * math.isqrt(max(0, embeddings_per_tile))


def largest_number_of_tiles(flags: Any) -> int:
    """Return the largest number of tiles of an image by the flags of a `VisionConfig`."""
    if grids := grids_of(flags):
        tile = max(1, flags.img_h * flags.img_w)  # a check reports 0
        return 1 + int(max(h * w // tile for h, w in grids))
    if not flags.use_tiling:
        return 1
    return int(flags.max_num_tiles + (flags.use_thumbnail and flags.max_num_tiles > 1))


@dataclass(frozen=True, kw_only=True)
class ImageClassifierConfig:
    num_classes: int = _vision(
        1000, "Classes of an image classifier: the size of its output layer.", at_least=1
    )
    num_channels: int = _vision(3, "Channels of images; only 3 (RGB) is available.", at_least=1)
    classes_fraction: float = _vision(
        1.0,
        "Fraction of the classes that is trained on, the first ones in the order of their names, "
        "over 0 to 1.",
        at_most=1,
    )
    data_per_class_fraction: float = _vision(
        1.0,
        "Fraction of each class's images that is trained on, the first ones in the order of their "
        "names, over 0 to 1.",
        at_most=1,
    )
    vision_pretraining_type: str = _vision(
        "classify",
        "Task of vision pretraining; only classify is available.",
        choices=("classify", "inpaint", "dino"),
    )
    vision_backbone_type: str = _vision(
        "vit",
        "Architecture of the image classifier; only vit is available.",
        choices=("vit", "mit", "swin"),
    )
