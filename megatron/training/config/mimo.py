"""Flags of MiMo models: the set of encoders, and the tokens that their embeddings replace."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import option

_mimo = partial(option, group="MIMO")
PROVIDERS = ("mock", "llava_vlm", "video_llava_vlm", "llava_avlm")


@dataclass(frozen=True, kw_only=True)
class MimoConfig:
    model_provider: str = _mimo(
        "mock",
        "Encoders of the model: one of images (mock, llava_vlm), of videos (video_llava_vlm), or "
        "of images and sound (llava_avlm). All but mock are CLIP without class token.",
        choices=PROVIDERS,
    )
    dataset_provider: str | None = _mimo(
        None,
        "Data: mock for --mock-data, another one for the shards of --data-path. The default is "
        "mock without --data-path.",
        choices=PROVIDERS,
    )
    language_model_checkpoint: str | None = _mimo(
        None, "Checkpoint of pretrain_gpt.py with initial weights of the language model."
    )
    audio_encoder_model: str | None = _mimo(
        None,
        "Folder of a Hugging Face Whisper model with the size and initial weights of the encoder "
        "of sound, which otherwise has the size of the encoder of images.",
    )
    hf_assign_unused_tokens: tuple[str, ...] | None = _mimo(
        None,
        'Placeholders of modalities as "NAME,ID", where NAME is <image>, <video> or <audio>. '
        "<image>,ID overrides --image-token-id; the default of <audio> is 32002.",
        nargs="+",
    )
    image_size: int | None = _mimo(
        None, "Height and width of images in pixels, for --img-h and --img-w.", at_least=1
    )
    image_seq_length: int | None = _mimo(
        None, "Embeddings of an image; the flags of the encoder must give this number.", at_least=1
    )
    audio_seq_length: int = _mimo(
        1500, "Embeddings of a sound, one for each 20 ms (llava_avlm).", at_least=1
    )
    num_frames: int = _mimo(1, "Frames of a video (video_llava_vlm).", at_least=1)
    image_token_id: int = _mimo(32000, "Id of the placeholder tokens of images.")
    pad_token_id: int = _mimo(0, "Id of the tokens behind the end of a sample.")
    total_seq_length: int | None = _mimo(
        None,
        "Tokens of a sample, placeholders included; --seq-length if not given.",
        at_least=1,
    )
    encoder_tp: int | None = _mimo(
        None,
        "Tensor-parallel size of encoders and projections, a divisor of "
        "--tensor-model-parallel-size, which is the default.",
        at_least=1,
    )
    packing_buffer_size: int | None = _mimo(
        None,
        "Samples from which Energon packs rows.",
        ignored="a row holds one sample",
    )

    @property
    def has_sound(self) -> bool:
        """Whether the model has an encoder of sound."""
        return self.model_provider == "llava_avlm"

    @property
    def special_token_ids(self) -> dict[str, int]:
        """Return the placeholder of each modality that the model has."""
        ids = {"images": self.image_token_id}
        if self.has_sound:
            ids["audios"] = _AUDIO_TOKEN
        for word in self.hf_assign_unused_tokens or ():
            name, _, number = word.rpartition(",")
            if name in MODALITIES and MODALITIES[name] in ids and number.isdecimal():
                ids[MODALITIES[name]] = int(number)
        return ids


_AUDIO_TOKEN = 32002
MODALITIES = {"<image>": "images", "<video>": "images", "<audio>": "audios"}
