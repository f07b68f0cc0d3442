"""Architectures of vision transformers, and how many embeddings they give: without torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.errors import ConfigError


@dataclass(frozen=True)
class VisionKind:
    """What tells vision transformers apart outside of their layers."""

    has_class_token: bool
    has_patch_bias: bool
    has_norm_before: bool  # of the embeddings
    has_norm_after: bool  # of the last layer's output
    reads_any_size: bool = False  # blocks of 2 x 2 patches of an image of any size
    has_position_table: bool = False  # that is interpolated to the size of an image
    # A matrix merges the patches of a block, and tokens of text end rows of embeddings.
    ends_rows: bool = False
    # Embeddings are averaged to a number of them, normed, and attend to all of their image.
    is_pooled: bool = False


KINDS = {
    "clip": VisionKind(True, False, True, False),
    "siglip": VisionKind(False, True, False, True),
    "siglip_without_norm": VisionKind(False, True, False, False),  # as LLaVA reads it
    "internvit": VisionKind(True, True, False, False),
    "internvit300M": VisionKind(True, True, False, False),
    "vit": VisionKind(True, True, False, True),
    "gemma3": VisionKind(False, True, False, True, is_pooled=True),
    "qwen2_vl": VisionKind(False, False, False, True, reads_any_size=True),
    "qwen3_vl": VisionKind(False, True, False, True, reads_any_size=True, has_position_table=True),
    "pixtral": VisionKind(False, False, True, False, reads_any_size=True, ends_rows=True),
}


_UNKNOWN = f"vision model {{}} is unknown; give one of {', '.join(KINDS)}"


def get_num_image_embeddings(
    img_h: int,
    img_w: int,
    patch_dim: int,
    vision_model_type: str,
    disable_vision_class_token: bool,
    class_token_len: int,
    pixel_shuffle: bool = False,
    pooled_embeddings: int = 0,
) -> int:
    """Return the number of embeddings that a language model gets for one image or tile.

    An encoder for images of any size gives so many for one of ``img_h`` x ``img_w``.
    """
    kind = KINDS.get(vision_model_type)
    if kind is None:
        raise ConfigError(_UNKNOWN.format(vision_model_type))
    if kind.is_pooled:
        return pooled_embeddings
    count = (img_h // patch_dim) * (img_w // patch_dim)
    if kind.has_class_token and not disable_vision_class_token:
        count += class_token_len
    ends = img_h // (2 * patch_dim) if kind.ends_rows else 0
    return count // 4 + ends if pixel_shuffle or kind.reads_any_size else count


def check_images(encoder: str, subtype: str, img_h: int, img_w: int, patch_dim: int) -> None:
    """Raise ConfigError with the `image_problems` of ``encoder``, if there are any."""
    if problems := image_problems(subtype, img_h, img_w, patch_dim):
        raise ConfigError("\n  - ".join([f"{encoder} cannot be built:", *problems]))


def image_problems(subtype: str, img_h: int, img_w: int, patch_dim: int) -> list[str]:
    """Return why an encoder cannot be built for images of this size; nothing if it can."""
    problems = [] if subtype in KINDS else [_UNKNOWN.format(subtype)]
    blocks = subtype in KINDS and KINDS[subtype].reads_any_size
    for flag, size in (("--img-h", img_h), ("--img-w", img_w)):
        if blocks and patch_dim > 0 and size % (2 * patch_dim):
            problems.append(f"{flag} {size} is not a multiple of twice --patch-dim {patch_dim}")
        elif patch_dim < 1 or size % patch_dim or size < patch_dim:
            problems.append(f"{flag} {size} is not a multiple of --patch-dim {patch_dim}")
    return problems
