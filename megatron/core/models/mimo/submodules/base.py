"""Encoders, decoders and projections of one modality.

``n`` embeddings of all inputs of a micro-batch, ``h`` their width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, get_module


class ModalitySubmodules(nn.Module):
    """Modules that turn the inputs of a modality into embeddings of a language model, and back.

    Each encoder maps its arguments to [.., h].  Embeddings of several encoders follow each other.
    """

    def __init__(
        self,
        encoders: Mapping[str, nn.Module] | None = None,
        decoders: Mapping[str, nn.Module] | None = None,
        input_projections: Sequence[nn.Module] | None = None,
        output_projections: Sequence[nn.Module] | None = None,
        **kwargs: Any,
    ) -> None:
        """Take the modules.  ``kwargs`` are for subclasses.

        Raises ConfigError for several projections in one direction, or several decoders: which of
        them applies would be undefined.
        """
        super().__init__()
        self.encoders = nn.ModuleDict(encoders)
        self.decoders = nn.ModuleDict(decoders)
        self.input_projections = nn.ModuleList(input_projections)
        self.output_projections = nn.ModuleList(output_projections)
        for name in ("decoders", "input_projections", "output_projections"):
            if (count := len(getattr(self, name))) > 1:
                raise ConfigError(f"{type(self).__name__}: {name} has {count}; give one")

    @classmethod
    def from_spec(cls, module_spec: ModuleSpec) -> ModalitySubmodules:
        """Build the modules of a spec.

        Its ``submodules`` have specs under the names of the constructor's arguments, its ``params``
        further arguments.
        """
        specs: Mapping[str, Any] = module_spec.submodules or {}
        built: dict[str, Any] = {}
        for name in ("encoders", "decoders"):
            built[name] = {key: build_module(spec) for key, spec in specs.get(name, {}).items()}
        for name in ("input_projections", "output_projections"):
            built[name] = [build_module(spec) for spec in specs.get(name, ())]
        made = get_module(module_spec)(**built, **module_spec.params)
        assert isinstance(made, ModalitySubmodules), f"{made} is built by from_spec()"
        return made

    def encode(self, encoders_data_batch: Mapping[str, Mapping[str, Any]]) -> list[Tensor]:
        """Return the embeddings [n, h] of each encoder that has arguments in the batch.

        Raises DataError for arguments of an encoder that the modality does not have.
        """
        if unknown := encoders_data_batch.keys() - self.encoders.keys():
            raise DataError(
                f"the batch has inputs of the encoder {min(unknown)}; the modality has "
                f"{', '.join(self.encoders)}"
            )
        return [
            encoder(**encoders_data_batch[name]).flatten(0, -2)
            for name, encoder in self.encoders.items()
            if name in encoders_data_batch
        ]

    def decode(self, embeddings: Tensor, data_batch: Mapping[str, Mapping[str, Any]]) -> Tensor:
        """Project embeddings [n, h] of the language model and decode them.

        ``data_batch``: further arguments of the decoder, under its name.
        """
        if not self.decoders:
            raise ConfigError(f"{type(self).__name__} has no decoder: give decoders")
        ((name, decoder),) = self.decoders.items()
        projected = self.project_embeddings([embeddings], is_input=False)
        decoded: Tensor = decoder(projected, **data_batch.get(name, {}))
        return decoded

    def combine_embeddings(self, embeddings: Sequence[Tensor]) -> Tensor:
        """Concatenate the embeddings [n, h] of all encoders.  Raises DataError without any."""
        if not embeddings:
            raise DataError("no embeddings are given: give at least those of one encoder")
        return embeddings[0] if len(embeddings) == 1 else torch.cat(list(embeddings))

    def project_embeddings(self, embeddings: Sequence[Tensor], is_input: bool = True) -> Tensor:
        """Concatenate embeddings and project them: [n, h] -> [n, width of the projection].

        ``is_input``: to the width of the language model, else from it.
        """
        combined = self.combine_embeddings(embeddings)
        for projection in self.input_projections if is_input else self.output_projections:
            combined = projection(combined)
        return combined

    def forward(self, encoder_inputs: Mapping[str, Mapping[str, Any]]) -> Tensor | None:
        """Return the embeddings [n, width] of the inputs, in the order of the encoders.

        An encoder whose tensors have no rows encodes one row of zeros, of which no embedding is
        returned: its collectives need all ranks, and its parameters get gradients of zero.  None
        if there are no encoders or no inputs.
        """
        if not self.encoders or not encoder_inputs:
            return None
        batch = dict(encoder_inputs)
        blank = set()
        for name, inputs in encoder_inputs.items():
            tensors = {key: x for key, x in inputs.items() if isinstance(x, Tensor)}
            if not all(map(len, tensors.values())):
                zeros = {key: x.new_zeros(1, *x.shape[1:]) for key, x in tensors.items()}
                batch[name] = {**inputs, **zeros}
                blank.add(name)
        encoded = self.encode(batch)
        projected = self.project_embeddings(encoded)
        if not blank:
            return projected
        names = [name for name in self.encoders if name in batch]
        kept = [torch.full((len(e),), n not in blank) for e, n in zip(encoded, names, strict=True)]
        return projected[torch.cat(kept).nonzero().flatten().to(projected.device)]
