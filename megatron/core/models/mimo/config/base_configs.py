"""Configuration of a MiMo model."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.core.transformer.spec_utils import ModuleSpec


@dataclass
class MimoModelConfig:
    """Specs of the parts of a MiMo model.

    ``language_model_spec``: a `GPTModel` or a model with its interface; its params have ``config``.
    ``modality_submodules_spec``: name of a modality -> spec of a `ModalitySubmodules`.
    ``special_token_ids``: name of a modality -> id of the tokens that its embeddings replace.
    """

    language_model_spec: ModuleSpec
    modality_submodules_spec: dict[str, ModuleSpec] = field(default_factory=dict)
    special_token_ids: dict[str, int] = field(default_factory=dict)
