"""Checks of MiMo models."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.errors import ConfigError
from megatron.core.models.vision.kinds import KINDS
from megatron.training.config.mimo import MODALITIES
from megatron.training.config.run import RunConfig
from megatron.training.models.audio_encoder import whisper_config
from megatron.training.models.image_checks import image_reader_problems
from megatron.training.models.image_encoder import image_encoder


def mimo_problems(run: RunConfig) -> Iterator[str]:
    """Yield why the encoders cannot be built, or cannot feed the language model."""
    found = list(image_reader_problems(run))
    yield from found
    mimo = run.mimo
    vision = run.vision
    model = run.model
    if not found:
        of_image = image_encoder(run).num_embeddings
        if mimo.image_seq_length not in (None, of_image):
            yield (
                f"--image-seq-length {mimo.image_seq_length}: the encoder gives {of_image} "
                "embeddings of an image; leave the flag out, or change --img-h, --img-w or "
                "--patch-dim"
            )
    if (vision.dataloader_seq_length or 1) < 1:
        yield (
            f"--total-seq-length {vision.row_length} has no place for text beside the embeddings "
            "of an image (and a sound): raise it"
        )
    for word in mimo.hf_assign_unused_tokens or ():
        name, _, number = word.rpartition(",")
        if name not in MODALITIES or not number.isdecimal():
            yield (
                f"--hf-assign-unused-tokens {word}: give NAME,ID, where NAME is "
                f"{' or '.join(MODALITIES)}"
            )
    ids = mimo.special_token_ids
    if len({*ids.values()}) < len(ids):
        yield (
            f"--image-token-id {ids['images']} is the placeholder of sound too: set another one "
            "by --hf-assign-unused-tokens <audio>,ID"
        )
    if KINDS[vision.vision_model_type].reads_any_size:
        yield (
            f"--vision-model-type {vision.vision_model_type}: the encoders of MiMo models read "
            "images of one size; use another one, or pretrain_vlm.py"
        )
    if vision.image_grid_pinpoints:
        yield (
            "--image-grid-pinpoints: a MiMo model has one placeholder for each embedding of a tile "
            "and no others; use --use-tiling, or pretrain_vlm.py"
        )
    if vision.use_packed_sequence:
        yield "--use-packed-sequence: a row of a MiMo model is one sample; use pretrain_vlm.py"
    if KINDS[vision.vision_model_type].reads_any_size:
        yield (
            f"--vision-model-type {vision.vision_model_type}: the images of a MiMo model have one "
            "size; use another encoder, or pretrain_vlm.py"
        )
    if mimo.encoder_tp is not None:
        if model.tensor_model_parallel_size % mimo.encoder_tp:
            yield (
                f"--encoder-tp {mimo.encoder_tp} does not divide --tensor-model-parallel-size "
                f"{model.tensor_model_parallel_size}: give a divisor"
            )
        elif model.attention_dropout or model.hidden_dropout:
            yield (
                "--encoder-tp: copies of an encoder would drop out different values; set "
                "--attention-dropout 0 and --hidden-dropout 0"
            )
    if mimo.audio_encoder_model is not None:
        try:
            whisper_config(mimo.audio_encoder_model)
        except ConfigError as error:
            yield str(error)
    if run.ddp.init_model_with_meta_device and (
        mimo.language_model_checkpoint or mimo.audio_encoder_model
    ):
        yield (
            "--init-model-with-meta-device: --language-model-checkpoint and --audio-encoder-model "
            "are read into parameters with memory; leave it out"
        )
