"""Checks of models that read images."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.models.vision.kinds import KINDS, image_problems
from megatron.training.config.run import RunConfig


def format_problem(checkpoint_format: str) -> str | None:
    """Return why a checkpoint format cannot hold a model that reads images, or None."""
    if checkpoint_format in ("safetensors_dist", "torch_dist"):
        return None
    return (
        f"{checkpoint_format} stores the modules of a language model alone, without an encoder of "
        "images: use safetensors_dist or torch_dist"
    )


def image_classifier_problems(run: RunConfig) -> Iterator[str]:
    """Yield why an image classifier cannot be built, or read images, as the flags describe it."""
    vision = run.vision
    classes = run.image_classifier
    yield from image_problems("vit", vision.img_h, vision.img_w, vision.patch_dim)
    for flag, given, available in (
        ("--num-channels", classes.num_channels, 3),
        ("--vision-pretraining-type", classes.vision_pretraining_type, "classify"),
        ("--vision-backbone-type", classes.vision_backbone_type, "vit"),
    ):
        if given != available:
            yield f"{flag} {given} is not available in this program: give {available}"
    for flag, share in (
        ("--classes-fraction", classes.classes_fraction),
        ("--data-per-class-fraction", classes.data_per_class_fraction),
    ):
        if not share:
            yield f"{flag} {share} leaves no images: give a number over 0, at most 1"
    if run.language_model.position_embedding_type != "learned_absolute":
        yield (
            f"--position-embedding-type {run.language_model.position_embedding_type}: an image "
            "classifier learns a position for each patch; leave the flag out"
        )
    if run.model.num_moe_experts is not None:
        yield "--num-experts: an image classifier has no experts; leave the flag out"
    if run.model.mtp_num_layers is not None:
        yield "--mtp-num-layers: an image classifier predicts no tokens; leave the flag out"
    for flag, is_on in (
        ("--reset-attention-mask", run.data.reset_attention_mask),
        ("--reset-position-ids", run.data.reset_position_ids),
        ("--eod-mask-loss", run.data.eod_mask_loss),
    ):
        if is_on:
            yield f"{flag}: images are no documents; leave the flag out"
    if run.language_model.spec is not None:
        yield "--spec: an image classifier has the layers that other flags describe"


def _balance_problems(run: RunConfig) -> Iterator[str]:
    """Yield why --balance-image-tiles cannot count the tiles of samples."""
    data = run.data
    for flag, is_on in (
        ("--mock-data", data.mock_data),
        ("--dataset-type", data.dataset_type is not None),
        ("--dataloader-type cyclic", data.dataloader_type == "cyclic"),
        ("--dataloader-type external", data.dataloader_type == "external"),
        ("--rampup-batch-size", run.training.rampup_batch_size is not None),
    ):
        if is_on:
            yield (
                f"--balance-image-tiles with {flag}: global batches of one size from image-text "
                "shards can be balanced; leave one of the flags out"
            )


def _any_size_problems(run: RunConfig) -> Iterator[str]:
    """Yield which flags contradict an encoder for images of any size."""
    vision = run.vision
    kind = f"--vision-model-type {vision.vision_model_type}"
    for flag, is_on in (
        ("--use-tiling", vision.use_tiling),
        ("--use-tile-tags", vision.use_tile_tags),
        ("--pixel-shuffle", vision.pixel_shuffle),
        ("--image-grid-pinpoints", bool(vision.grids)),
        ("--vision-projection-type affine", vision.vision_projection_type == "affine"),
    ):
        if is_on:
            yield f"{flag} with {kind}, which reads images of any size: leave {flag.split()[0]} out"


def _grid_problems(run: RunConfig) -> Iterator[str]:
    """Yield why --image-grid-pinpoints cannot be used."""
    vision = run.vision
    sides = vision.image_grid_pinpoints
    if not sides:
        return
    given = f"--image-grid-pinpoints {' '.join(map(str, sides))}"
    if len(sides) % 2:
        yield f"{given}: {len(sides)} numbers are no pairs of height and width: add or remove one"
    wrong = [f"{h} {w}" for h, w in vision.grids if h % vision.img_h or w % vision.img_w]
    if wrong:
        yield (
            f"{given}: {', '.join(wrong)} are no multiples of --img-h {vision.img_h} and --img-w "
            f"{vision.img_w}, the size of a tile"
        )
    has_class_token = KINDS[vision.vision_model_type].has_class_token
    if vision.img_h != vision.img_w or (has_class_token and not vision.disable_vision_class_token):
        yield (
            f"{given} arranges the patches of square tiles: give --img-w equal to --img-h, and "
            "--disable-vision-class-token"
        )
    for flag, is_on in (
        ("--use-tiling", vision.use_tiling),
        ("--use-tile-tags", vision.use_tile_tags),
        ("--pixel-shuffle", vision.pixel_shuffle),
    ):
        if is_on:
            yield f"{given} and {flag} are two layouts of tiles: leave one of them out"


def image_reader_problems(run: RunConfig) -> Iterator[str]:
    """Yield why the encoder of images cannot be built as the flags describe it."""
    vision = run.vision
    model = run.model
    sizes = vision.img_h, vision.img_w, vision.patch_dim
    yield from image_problems(vision.vision_model_type, *sizes)
    heads = vision.vision_num_attention_heads or model.num_attention_heads
    width = vision.vision_hidden_size or model.hidden_size
    if width % heads:
        yield (
            f"--vision-hidden-size {width} is no multiple of the encoder's {heads} attention "
            "heads: change one of them"
        )
    size, flag = model.tensor_model_parallel_size, "--tensor-model-parallel-size"
    if run.mimo.encoder_tp is not None:
        size = run.mimo.encoder_tp
        flag = "--encoder-tp"
    if heads % size:
        yield (
            f"{flag} {size} does not divide the "
            f"encoder's {heads} attention heads: change --vision-num-attention-heads"
        )
    if KINDS[vision.vision_model_type].reads_any_size:
        yield from _any_size_problems(run)
    elif vision.pixel_shuffle:
        is_odd = vision.img_h // vision.patch_dim % 2 == 1
        if is_odd or vision.img_h != vision.img_w or not vision.disable_vision_class_token:
            yield (
                "--pixel-shuffle merges 2 x 2 patches of a square: give "
                "--disable-vision-class-token, --img-w equal to --img-h, and an even number of "
                "patches in each direction"
            )
    yield from _grid_problems(run)
    if vision.balance_image_tiles:
        yield from _balance_problems(run)
    ckpt = run.checkpoint
    if ckpt.save and (problem := format_problem(ckpt.ckpt_format)):
        yield f"--ckpt-format {problem}"
    if model.uses_graphs:
        yield "CUDA graphs need equal shapes in every step, and the number of images differs"
    if model.mtp_num_layers is not None:
        yield "--mtp-num-layers: a model that reads images does not predict several tokens"
    for flag, is_on in (
        ("--reset-attention-mask", run.data.reset_attention_mask),
        ("--reset-position-ids", run.data.reset_position_ids),
    ):
        if is_on:
            yield f"{flag}: a row of a model that reads images is one sample; leave the flag out"
