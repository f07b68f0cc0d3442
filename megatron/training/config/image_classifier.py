"""Flags of pretrain_vision_classify.py: the classes, and which images of them train the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import option

_vision = partial(option, group="vision")


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
    data_sharding: bool = _vision(
        True,
        "Let every data-parallel rank draw from all images instead of its share.",
        ignored="in every layout the order of images is a function of the seed, and each image is "
        "read once per epoch",
    )
    vision_pretraining: bool = _vision(
        False,
        "Pretrain a vision model.",
        ignored="the entry script, or --model-kind, decides what is trained",
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
