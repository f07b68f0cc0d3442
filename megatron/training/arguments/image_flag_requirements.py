"""Requirements of the flags of models that read or classify images; see `flag_requirements`."""

from __future__ import annotations

from megatron.core.config.option import dest_of, options_of
from megatron.training.arguments.requirement import needs, needs_value
from megatron.training.config.image_classifier import ImageClassifierConfig
from megatron.training.config.mimo import MimoConfig
from megatron.training.config.vision import VisionConfig
from megatron.training.models.registry import model_kind

_SHARED = ("img_h", "img_w", "patch_dim", "broken_samples")

OF_IMAGES = (
    needs(
        "pretrain_vlm.py (--model-kind vlm)",
        " ".join(
            name
            for name in (
                dest_of(f, opt)
                for f, opt in options_of(VisionConfig)
                if opt.ignored is None and opt.refused is None
            )
            if name not in _SHARED
        ),
        lambda ns: model_kind(ns.model_kind).reads_images,
    ),
    needs(
        "pretrain_vlm.py (--model-kind vlm) or pretrain_vision_classify.py (--model-kind vit)",
        " ".join(_SHARED),
        lambda ns: (
            model_kind(ns.model_kind).reads_images or model_kind(ns.model_kind).classifies_images
        ),
    ),
    needs(
        "pretrain_vision_classify.py (--model-kind vit)",
        " ".join(dest_of(f, opt) for f, opt in options_of(ImageClassifierConfig)),
        lambda ns: model_kind(ns.model_kind).classifies_images,
    ),
    needs(
        "examples/mimo/train.py (--model-kind mimo)",
        " ".join(dest_of(f, opt) for f, opt in options_of(MimoConfig) if opt.ignored is None),
        lambda ns: model_kind(ns.model_kind).has_placeholders,
    ),
    needs_value("model_provider", "video_llava_vlm", "num_frames"),
    needs_value("model_provider", "llava_avlm", "audio_encoder_model audio_seq_length"),
    needs(
        "an encoder that is trained (no --freeze-ViT)",
        "recompute_vision",
        lambda ns: not ns.freeze_ViT,
    ),
)
