"""Images and videos."""

from __future__ import annotations

from megatron.core.models.mimo.submodules.base import ModalitySubmodules


class VisionModalitySubmodules(ModalitySubmodules):
    """Encoders of images or videos, decoders into images, and their projections."""
