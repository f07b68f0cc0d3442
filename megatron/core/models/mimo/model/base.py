"""MimoModel: a language model whose input has the embeddings of other modalities.

``b`` rows of ``s`` tokens, ``h`` hidden size of the language model.  A row has one placeholder
token for each embedding of its images, sounds and so on; the first pipeline stage holds the
encoders and replaces placeholders by embeddings, in the order of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.config.errors import ConfigError, DataError
from megatron.core.models.mimo.config.base_configs import MimoModelConfig
from megatron.core.models.mimo.submodules.base import ModalitySubmodules
from megatron.core.models.multimodal.context_parallel import held_positions, split_over_ranks
from megatron.core.packed_seq_params import AttentionMask
from megatron.core.params.param_info import info_of, name_parameters, prefix_names, set_info
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module, get_module

TEXT = "text"  # key of the embeddings of all other tokens


class MimoModel(MegatronModule):
    """One pipeline stage of a language model with encoders of other modalities.

    ``reads_values``: whether the host reads ids.  The planner, whose tensors have no values, clears
    it.
    """

    reads_values = True

    def __init__(self, mimo_config: MimoModelConfig) -> None:
        """Build the language model and, on its first stage, the modules of all modalities.

        All parameters that were created with a `ParamInfo` get initial values by their names in
        this model; load other weights afterwards.  Raises ConfigError for a modality without a
        special token, or named "text".
        """
        spec = mimo_config.language_model_spec
        config: Any = spec.params["config"]
        super().__init__(config)
        self.mimo_config = mimo_config
        self.special_token_ids = dict(mimo_config.special_token_ids)
        modalities = mimo_config.modality_submodules_spec
        if wrong := {*modalities} - {*self.special_token_ids} | {TEXT} & {*modalities}:
            raise ConfigError(
                f"special_token_ids {self.special_token_ids} has no token for the modality "
                f'{min(wrong)}: give the id of its placeholders; "{TEXT}" names all other tokens'
            )
        # The sequence is complete, and can be split, only after encoders have added to it.
        scatters = {"scatter_embedding_sequence_parallel": False}
        self.language_model = build_module(spec, offered=scatters)
        self.pre_process: bool = self.language_model.pre_process
        self.post_process: bool = self.language_model.post_process
        self.vp_stage: int | None = self.language_model.vp_stage
        self.pg_collection = self.language_model.pg_collection
        self.modality_submodules = nn.ModuleDict()
        if self.pre_process:
            for name, each in modalities.items():
                submodules_class: Any = get_module(each)
                self.modality_submodules[name] = submodules_class.from_spec(each)
        self._finalize_parameters()

    def _finalize_parameters(self) -> None:
        """Put the names of the parts before the names that these have assigned; initialize."""
        for kind, parts in self.modality_submodules.named_children():
            for name, part in _parts_of(parts):
                if not all(info_of(param).name for param in part.parameters()):
                    name_parameters(part)
                prefix_names(part, f"modality_submodules.{kind}.{name}.")
                _mark_copies(part, kind, self.pg_collection.tp)
        prefix_names(self.language_model, "language_model.")
        self.fill_parameters()

    def freeze(
        self, *, language_model: bool = False, encoders: bool = False, projections: bool = False
    ) -> None:
        """Exclude parts from training: their parameters get no gradients and no optimizer state.

        ``encoders`` and ``projections`` are those of all modalities, decoders included.
        """
        if language_model:
            self.language_model.requires_grad_(False)
        for parts in self.modality_submodules.values():
            for name, part in _parts_of(parts):
                is_projection = name.startswith(("input_projections.", "output_projections."))
                if projections if is_projection else encoders:
                    part.requires_grad_(False)

    def shared_embedding_or_output_weight(self) -> nn.Parameter | None:
        """Return the language model's shared embedding weight."""
        weight: nn.Parameter | None = self.language_model.shared_embedding_or_output_weight()
        return weight

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """Set the hidden states that the previous stage sent."""
        self.language_model.set_input_tensor(input_tensor)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: AttentionMask | None = None,
        loss_mask: Tensor | None = None,
        labels: Tensor | None = None,
        modality_inputs: Mapping[str, Mapping[str, Mapping[str, Any]] | None] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Map ids [b, s] to the losses of tokens [b, s], or logits, and the loss mask [b, s].

        ``modality_inputs``: modality -> encoder -> arguments of the encoder's forward.  Stages
        before the last return hidden states.  An encoder whose tensors have no rows encodes one
        row of zeros that no token gets, because its collectives, and the reduction of its
        gradients, need all ranks; a modality that is absent or None runs no encoder.  With context
        parallelism the arguments are complete rows, and the results have this rank's positions.

        Raises DataError if a modality has another number of embeddings than the ids have
        placeholders (on a CPU; on a GPU the comparison would wait for the device).
        """
        combined: Tensor | None = None
        if self.pre_process:
            found = self._modality_embeddings(modality_inputs or {})
            text = self._embedded(input_ids, position_ids, self.special_token_ids)
            combined = self._merged(text, found, input_ids, self.special_token_ids)
            combined = split_over_ranks(combined, self.config, self.pg_collection)
        cp = self.pg_collection.cp
        output = self.language_model(
            None,
            None,
            attention_mask,
            decoder_input=combined,
            labels=None if labels is None else held_positions(labels, cp),
        )
        return output, None if loss_mask is None else held_positions(loss_mask, cp)

    def get_text_embeddings(
        self, input_ids: Tensor, position_ids: Tensor | None, special_token_ids: Mapping[str, int]
    ) -> Tensor:
        """Return the embeddings [n, h] of the n tokens of ids [b, s] that are no placeholders."""
        embedded = self._embedded(input_ids, position_ids, special_token_ids)
        return embedded[~_is_special(input_ids, special_token_ids)]

    def align_embeddings_by_token_positions(
        self,
        modality_embeddings: Mapping[str, Tensor],
        input_ids: Tensor,
        special_token_ids: Mapping[str, int],
    ) -> Tensor:
        """Return the embeddings [s, b, h] of ids [b, s].

        ``modality_embeddings`` [n, h] of each modality replace its n placeholders, row by row; the
        key "text" has those of all other tokens.  Raises DataError for other numbers.
        """
        if not modality_embeddings:
            raise DataError("no embeddings are given: give at least those of one modality")
        found = dict(modality_embeddings)
        like = next(iter(found.values()))
        text = like.new_zeros(*input_ids.shape, like.shape[-1])
        if TEXT in found:
            is_text = ~_is_special(input_ids, special_token_ids)
            text = _placed(TEXT, text, found.pop(TEXT), is_text)
        return self._merged(text, found, input_ids, special_token_ids).transpose(0, 1).contiguous()

    def _merged(
        self,
        text: Tensor,
        found: Mapping[str, Tensor],
        input_ids: Tensor,
        special: Mapping[str, int],
    ) -> Tensor:
        """Replace the embeddings of placeholders in ``text`` [b, s, h]."""
        for name, embeddings in found.items():
            if name not in special:
                raise DataError(f"special_token_ids has no token for the modality {name}")
            is_there = input_ids == special[name]
            text = _placed(name, text, embeddings, is_there, checks=self.reads_values)
        return text

    def _modality_embeddings(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        if unknown := inputs.keys() - self.modality_submodules.keys():
            raise DataError(
                f"modality_inputs has {min(unknown)}; the model has the modalities "
                f"{', '.join(self.modality_submodules)}"
            )
        found = {
            name: parts(given)
            for name, parts in self.modality_submodules.items()
            if (given := inputs.get(name)) is not None
        }
        return {name: each for name, each in found.items() if each is not None}

    def _embedded(
        self, input_ids: Tensor, position_ids: Tensor | None, special_token_ids: Mapping[str, int]
    ) -> Tensor:
        """Return embeddings [b, s, h]; those of placeholders are of token 0."""
        ids = input_ids.masked_fill(_is_special(input_ids, special_token_ids), 0)
        embedded: Tensor = self.language_model.embedding(ids, position_ids).transpose(0, 1)
        return embedded


def _parts_of(submodules: nn.Module) -> Sequence[tuple[str, nn.Module]]:
    """Return the name and module of each encoder, decoder and projection of a modality."""
    if not isinstance(submodules, ModalitySubmodules):
        return [("", submodules)]
    return [
        (f"{kind}.{name}", part)
        for kind, parts in submodules.named_children()
        for name, part in parts.named_children()
    ]


def _mark_copies(part: nn.Module, kind: str, tp_group: ProcessGroup) -> None:
    """Mark the shards of ``part`` that other ranks of ``tp_group`` hold too.

    Modules of a modality may have a smaller tensor-parallel size than the language model.  The
    ranks of the first of their groups then count and save the parameters.
    """
    for param in part.parameters():
        info = info_of(param)
        if tp_group.size() % info.shard_count:
            raise ConfigError(
                f"modality {kind}: tensor-parallel size {info.shard_count} does not divide that of "
                f"the language model, {tp_group.size()}: give its modules smaller process groups"
            )
        if info.shard_count > 1:
            set_info(param, replace(info, is_duplicate=tp_group.rank() >= info.shard_count))


def _is_special(input_ids: Tensor, special_token_ids: Mapping[str, int]) -> Tensor:
    found = torch.zeros_like(input_ids, dtype=torch.bool)
    for token in special_token_ids.values():
        found |= input_ids == token
    return found


def _placed(
    name: str, text: Tensor, found: Tensor, is_there: Tensor, *, checks: bool = True
) -> Tensor:
    """Put the rows of ``found`` [n, h] where ``is_there`` [b, s] is true, in reading order."""
    if checks and not device.is_cuda(is_there.device):
        count = int(is_there.sum())
        if count != len(found):
            raise DataError(
                f"the ids have {count} tokens of the modality {name}, and it has {len(found)} "
                "embeddings: give one token for each embedding"
            )
    if not len(found):  # the sum is 0; its gradient reaches an encoder that encoded zeros
        return text + found.sum().to(text.dtype)
    index = (is_there.flatten().cumsum(0) - 1).clamp(0, len(found) - 1).view_as(is_there)
    return torch.where(is_there.unsqueeze(-1), found[index].to(text.dtype), text)
