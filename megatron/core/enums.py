"""Names for choices that several rooms share.  Torch-free."""

from __future__ import annotations

import enum


class ModelType(enum.Enum):
    """What kind of stack a model provider builds."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2
    retro_encoder = 3
    retro_decoder = 4


class AttnBackend(enum.Enum):
    """Which implementation of the attention core may run."""

    flash = 1
    fused = 2
    unfused = 3
    local = 4
    auto = 5


class AttnMaskType(enum.Enum):
    """Which keys a query may see."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5


class AttnType(enum.Enum):
    """Where keys and values come from."""

    self_attn = 1
    cross_attn = 2


class LayerType(enum.Enum):
    """What a slot of a pipeline layout holds."""

    embedding = 1
    loss = 2
    encoder = 3
    decoder = 4
    mtp = 5
