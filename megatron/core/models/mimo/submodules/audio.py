"""Sound."""

from __future__ import annotations

from megatron.core.models.mimo.submodules.base import ModalitySubmodules


class AudioModalitySubmodules(ModalitySubmodules):
    """Encoders of sound, decoders into sound, and their projections."""
