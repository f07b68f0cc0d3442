"""Rules about models that read or classify images."""

from __future__ import annotations

import math

from megatron.core.config.rule import first_of, given, rules, where
from megatron.core.models.vision.kinds import KINDS, image_problems
from megatron.core.transformer.config.attention import LINEAR_VARIANTS, SPARSE_VARIANT
from megatron.training.arguments.rules.rule import Settings, refusal
from megatron.training.config.mimo import MODALITIES
from megatron.training.models.encoders import format_problem, image_encoder, whisper_config

_CLASSIFIER = where(
    lambda c: c.kind.classifies_images,
    {
        "{found}": lambda c: list(image_problems("vit", c.img_h, c.img_w, c.patch_dim)),
        "{found[0]} is not available in this program: give {found[1]}": lambda c: [
            (c.shown(flag), available)
            for flag, value, available in (
                ("--num-channels", c.num_channels, 3),
                ("--vision-pretraining-type", c.vision_pretraining_type, "classify"),
                ("--vision-backbone-type", c.vision_backbone_type, "vit"),
            )
            if value != available
        ],
        "{found} leaves no images: give a number over 0, at most 1": given(
            "--classes-fraction --data-per-class-fraction", lambda share: not share
        ),
        "{--position-embedding-type}: an image classifier learns a position for each patch; leave "
        "the flag out": lambda c: c.position_embedding_type != "learned_absolute",
        "--num-experts: an image classifier has no experts; leave the flag out": "--num-experts",
        "--mtp-num-layers: "
        "an image classifier predicts no tokens; leave the flag out": "--mtp-num-layers",
        "{found}: images are no documents; "
        "leave the flag out": "--reset-attention-mask --reset-position-ids --eod-mask-loss",
        "--spec: an image classifier has the layers that other flags describe": lambda c: (
            c.spec is not None
        ),
    },
)


def _encoder_heads(c: Settings) -> int:
    return int(c.vision_num_attention_heads or c.num_attention_heads)


def _find_undivided_width(c: Settings) -> str:
    width = c.vision_hidden_size or c.hidden_size
    heads = _encoder_heads(c)
    return f"{width} is no multiple of the encoder's {heads}" if width % max(1, heads) else ""


def _find_undivided_heads(c: Settings) -> tuple[str, int] | None:
    flag = "--tensor-model-parallel-size" if c.encoder_tp is None else "--encoder-tp"
    heads = _encoder_heads(c)
    return (c.shown(flag), heads) if heads % max(1, c.value(flag)) else None


# Without them a model that reads images has an encoder that cannot be built.
_ENCODER = where(
    lambda c: c.kind.reads_images,
    {
        "{found}": lambda c: list(
            image_problems(c.vision_model_type, c.img_h, c.img_w, c.patch_dim)
        ),
        "--vision-hidden-size {found} attention heads: change one of them": _find_undivided_width,
        "{found[0]} does not divide the encoder's {found[1]} attention heads: change "
        "--vision-num-attention-heads": _find_undivided_heads,
    },
    where(
        lambda c: KINDS[c.vision_model_type].reads_any_size,
        {
            "{found} with {--vision-model-type}, which reads images "
            "of any size: leave {found} out": "--use-tiling --use-tile-tags --pixel-shuffle",
            "--image-grid-pinpoints with {--vision-model-type}, which reads images of any size: "
            "leave --image-grid-pinpoints out": lambda c: bool(c.grids),
            "--vision-projection-type affine with {--vision-model-type}, which reads images of "
            "any size: leave --vision-projection-type out": "--vision-projection-type affine",
        },
    ),
    where(
        lambda c: c.pixel_shuffle and not KINDS[c.vision_model_type].reads_any_size,
        {
            "--pixel-shuffle merges 2 x 2 patches of a square: give --disable-vision-class-token, "
            "--img-w equal to --img-h, and an even number of patches in each direction": lambda c: (
                c.img_h // c.patch_dim % 2 == 1
                or c.img_h != c.img_w
                or not c.disable_vision_class_token
            ),
        },
    ),
    where(
        "--deepstack-visual-indexes",
        {
            "{--deepstack-visual-indexes}: give layers of the encoder in ascending order, below "
            "--vision-num-layers": lambda c: (
                [*c.deepstack_visual_indexes]
                != sorted({*c.deepstack_visual_indexes} & {*range(c.vision_num_layers or 1)})
            ),
            "--deepstack-visual-indexes adds features between layers, which --cpu-offloading runs "
            "at once: leave --cpu-offloading out": "--cpu-offloading",
        },
    ),
    where(
        lambda c: KINDS[c.vision_model_type].has_position_table,
        {
            "{--vision-num-position-embeddings}: the table of positions is a square; give a square "
            "number": lambda c: (
                math.isqrt(c.vision_num_position_embeddings) ** 2
                != c.vision_num_position_embeddings
            ),
        },
    ),
    where(
        lambda c: KINDS[c.vision_model_type].ends_rows,
        {
            "{--image-row-end-tokens}: two tokens are needed, one that ends a row of an image and "
            "one that ends the last row": lambda c: len(c.image_row_end_tokens) != 2,
        },
    ),
    where(
        lambda c: KINDS[c.vision_model_type].is_pooled,
        {
            "{--pooled-image-embeddings}: patches of {--img-h} and {--img-w} cannot be "
            "averaged to them: give the square of a divisor of the patches of a side": lambda c: (
                c.img_h != c.img_w
                or c.img_h // c.patch_dim % max(1, math.isqrt(c.pooled_image_embeddings))
                or math.isqrt(c.pooled_image_embeddings) ** 2 != c.pooled_image_embeddings
            ),
            "{found} with {--vision-model-type}, whose images are one tile: leave {found} out": (
                "--use-tiling --use-tile-tags --pixel-shuffle"
            ),
            "--image-grid-pinpoints with {--vision-model-type}, whose images are one tile: leave "
            "--image-grid-pinpoints out": lambda c: bool(c.grids),
        },
    ),
    where(
        "--image-grid-pinpoints",
        {
            "{--image-grid-pinpoints}: {found} numbers are no pairs of height and width: add or "
            "remove one": lambda c: (count := len(c.image_grid_pinpoints)) % 2 and count,
            "{--image-grid-pinpoints}: {found} are no multiples of {--img-h} and {--img-w}, the "
            "size of a tile": lambda c: ", ".join(
                f"{h} {w}" for h, w in c.grids if h % c.img_h or w % c.img_w
            ),
            "{--image-grid-pinpoints} arranges the patches of square tiles: give --img-w equal to "
            "--img-h, and --disable-vision-class-token": lambda c: (
                c.img_h != c.img_w
                or (KINDS[c.vision_model_type].has_class_token and not c.disable_vision_class_token)
            ),
            "{--image-grid-pinpoints} and {found} are two layouts "
            "of tiles: leave one of them out": "--use-tiling --use-tile-tags --pixel-shuffle",
        },
    ),
)

_READER = where(
    lambda c: c.kind.reads_images,
    where(
        "--save",
        {
            "--ckpt-format {found}": lambda c: format_problem(c.ckpt_format),
        },
    ),
    {
        "CUDA graphs need equal shapes in every step, and the number of images differs": lambda c: (
            c.uses_graphs
        ),
        "--mtp-num-layers: "
        "a model that reads images does not predict several tokens": "--mtp-num-layers",
        "{--experimental-attention-variant}: a model that reads images has linear attention or "
        "none of these; leave the flag out": lambda c: (
            c.kind.has_linear_attention and c.experimental_attention_variant == SPARSE_VARIANT
        ),
        "--use-packed-sequence: linear attention carries its state from sample to sample; leave it "
        "out": lambda c: (
            c.use_packed_sequence and c.experimental_attention_variant in LINEAR_VARIANTS
        ),
        "{found}: a row of a model that reads "
        "images is one sample; leave the flag out": "--reset-attention-mask --reset-position-ids",
    },
)


def _find_wrong_image_length(c: Settings) -> int:
    """Return the embeddings of an image if --image-seq-length is another number; else 0."""
    if c.image_seq_length is None or any(
        next(rule.problems(c), "") for rule in (*_ENCODER, *_READER)
    ):
        return 0
    length = image_encoder(c.config).num_embeddings
    return 0 if c.image_seq_length == length else length


def _find_unknown_tokens(c: Settings) -> list[str]:
    words = ((word, *word.rpartition(",")) for word in c.hf_assign_unused_tokens or ())
    return [
        word for word, name, _, number in words if name not in MODALITIES or not number.isdecimal()
    ]


_MIMO = where(
    lambda c: c.kind.has_placeholders,
    {
        "{--image-seq-length}: the encoder gives {found} embeddings of an image; leave the flag "
        "out, or change --img-h, --img-w or --patch-dim": _find_wrong_image_length,
        "--total-seq-length {row_length} has no place for text beside the embeddings of an image "
        "(and a sound): raise it": lambda c: (c.dataloader_seq_length or 1) < 1,
        f"--hf-assign-unused-tokens {{found}}: give NAME,ID, where NAME is "
        f"{' or '.join(MODALITIES)}": _find_unknown_tokens,
        "--image-token-id {special_token_ids[images]} is the placeholder of sound too: set "
        "another one by --hf-assign-unused-tokens <audio>,ID": lambda c: (
            len({*c.special_token_ids.values()}) < len(c.special_token_ids)
        ),
        "{--vision-model-type}: MiMo models have no such encoder; use another one, or "
        "pretrain_vlm.py": lambda c: (
            KINDS[c.vision_model_type].reads_any_size or KINDS[c.vision_model_type].is_pooled
        ),
        "--image-grid-pinpoints: a MiMo model has one placeholder for each embedding of a tile "
        "and no others; use --use-tiling, or pretrain_vlm.py": "--image-grid-pinpoints",
        "--use-packed-sequence: "
        "a row of a MiMo model is one sample; use pretrain_vlm.py": "--use-packed-sequence",
    },
    where(
        "--encoder-tp",
        first_of(
            {
                "{--encoder-tp} does not divide {--tensor-model-parallel-size}: "
                "give a divisor": lambda c: c.tensor_model_parallel_size % max(1, c.encoder_tp),
                "--encoder-tp: copies of an encoder would drop out different values; set "
                "--attention-dropout "
                "0 and --hidden-dropout 0": lambda c: c.attention_dropout or c.hidden_dropout,
            },
        ),
    ),
    where(
        "--audio-encoder-model",
        {
            "{found}": lambda c: refusal(whisper_config, c.audio_encoder_model),
        },
    ),
    {
        "--init-model-with-meta-device: --language-model-checkpoint and --audio-encoder-model are "
        "read into parameters with memory; leave it out": lambda c: (
            c.init_model_with_meta_device and (c.language_model_checkpoint or c.audio_encoder_model)
        ),
    },
)

RULES = rules(
    _CLASSIFIER,
    _ENCODER,
    _READER,
    _MIMO,
)
