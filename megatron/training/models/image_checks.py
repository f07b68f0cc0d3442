"""Checks of models that read images."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.models.vision.kinds import image_problems
from megatron.training.config.run import RunConfig


def format_problem(checkpoint_format: str) -> str | None:
    """Return why a checkpoint format cannot hold a model that reads images, or None."""
    if checkpoint_format in ("safetensors_dist", "torch_dist"):
        return None
    return (
        f"{checkpoint_format} stores the modules of a language model alone, without an encoder of "
        "images: use safetensors_dist or torch_dist"
    )


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
    if heads % model.tensor_model_parallel_size:
        yield (
            f"--tensor-model-parallel-size {model.tensor_model_parallel_size} does not divide the "
            f"encoder's {heads} attention heads: change --vision-num-attention-heads"
        )
    if vision.pixel_shuffle:
        is_odd = vision.img_h // vision.patch_dim % 2 == 1
        if is_odd or vision.img_h != vision.img_w or not vision.disable_vision_class_token:
            yield (
                "--pixel-shuffle merges 2 x 2 patches of a square: give "
                "--disable-vision-class-token, --img-w equal to --img-h, and an even number of "
                "patches in each direction"
            )
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
