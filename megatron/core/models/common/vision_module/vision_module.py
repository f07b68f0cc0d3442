"""Base of encoders of images."""

from __future__ import annotations

from torch import Tensor

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import name_parameters
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock


class VisionModule(MegatronModule):
    """A model whose input are images: embeddings of their patches, then transformer layers.

    An encoder has all its layers on one pipeline stage; tensor parallelism shards its layers, and
    every rank computes the embeddings.  A constructor calls `build_layers`, or `check_groups` if it
    builds ``decoder`` itself, and ends with `finalize_parameters`.
    """

    decoder: TransformerBlock

    def build_layers(self, spec: ModuleSpec, groups: ProcessGroupCollection) -> None:
        """Build all layers of ``spec``, without a norm behind them; see `check_groups`."""
        self.check_groups(groups)
        self.decoder = TransformerBlock(
            self.config,
            spec,
            post_layer_norm=False,
            pg_collection=groups,
            layer_indices=range(self.config.num_layers),
        )

    def check_groups(self, groups: ProcessGroupCollection) -> None:
        """Set the process groups of the model.

        Raises ConfigError with context parallelism: patches attend to all others.
        """
        if groups.cp.size() > 1:
            raise ConfigError(
                f"--context-parallel-size {groups.cp.size()}: patches attend to all others, so an "
                "encoder of images has no context parallelism; use --context-parallel-size 1"
            )
        self.pg_collection = groups
        self.tp_group = groups.tp
        self.is_sharded = self.config.sequence_parallel and groups.tp.size() > 1

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """Set the hidden states [n, b, h] that replace those of images."""
        self.decoder.set_input_tensor(input_tensor)

    def run_layers(self, embedded: Tensor, attention_mask: Tensor | None, **more: object) -> Tensor:
        """Run the layers: [b, n, h] -> [b, n, h].  Collective over the tensor-parallel group.

        ``more``: further keyword arguments of self attention.  Raises DataError if sequence
        parallelism cannot split n evenly.
        """
        hidden: Tensor = embedded.transpose(0, 1).contiguous()
        if self.is_sharded:
            if len(hidden) % self.tp_group.size():
                raise DataError(
                    f"--sequence-parallel: {len(hidden)} embeddings of an image cannot be split "
                    f"over {self.tp_group.size()} ranks; build the encoder from a config without it"
                )
            hidden = scatter_to_sequence_parallel_region(hidden, self.tp_group)
        hidden = self.decoder(hidden, attention_mask, **more)
        if self.is_sharded:
            hidden = gather_from_sequence_parallel_region(hidden, False, group=self.tp_group)
        return hidden.transpose(0, 1).contiguous()

    def finalize_parameters(self) -> None:
        """Assign global names, and initialize with the seed of the config."""
        layers = enumerate(self.decoder.layer_range)
        name_parameters(self, {f"decoder.layers.{i}.": f"decoder.layers.{n}." for i, n in layers})
        self.fill_parameters()
