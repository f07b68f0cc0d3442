"""RetroConfig: a TransformerConfig with the sizes of chunks and neighbors.

``m`` tokens in a chunk, ``k`` neighbors of each chunk, ``r`` tokens in a neighbor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

_DERIVED: Any = None


@dataclass(kw_only=True)
class RetroConfig(TransformerConfig):
    """Configuration of the decoder; `encoder_config` returns that of its encoder of neighbors.

    The decoder reads the sizes of chunks and neighbors and the gate, the encoder its own dropout.
    Names and defaults are Megatron-LM's, besides the gate, which has no field there.  Of the
    project, ``retro_project_dir``, ``retro_block_size``, ``retro_neighbor_dirs``,
    ``retro_split_preprocessing`` and ``retro_verify_neighbor_count`` are for the datasets.
    """

    retro_project_dir: str | None = None
    retro_block_size: int | None = None
    retro_chunk_length: int = _DERIVED  # m; by default 64
    retro_encoder_num_layers: int = 2
    retro_encoder_hidden_dropout: float = 0.1
    retro_encoder_attention_dropout: float = 0.1
    retro_neighbor_dirs: dict[str, Any] | None = None
    retro_num_neighbors: int = 2  # k
    retro_num_retrieved_chunks: int = 2  # of a neighbor: itself and its continuation
    retro_retrieved_length: int = _DERIVED  # r
    retro_split_preprocessing: str | None = None
    retro_verify_neighbor_count: bool = True
    retro_attention_gate: float = 1.0  # factor of what tokens read from neighbors; 0: none read

    def derive(self) -> None:
        """Set the lengths of a chunk and of a neighbor."""
        super().derive()
        self.retro_chunk_length = self.retro_chunk_length or 64
        self.retro_retrieved_length = self.retro_num_retrieved_chunks * self.retro_chunk_length

    @property
    def neighbor_tokens(self) -> int:
        """Number of tokens in all neighbors of one chunk."""
        return self.retro_num_neighbors * self.retro_retrieved_length

    def with_whole_sequences(self, **values: Any) -> RetroConfig:
        """Return the config of parts that read complete sequences on every tensor-parallel rank."""
        return self.changed(sequence_parallel=False, tp_comm_overlap=False, **values)

    def encoder_config(self) -> RetroConfig:
        """Return the config of the encoder of neighbors."""
        return self.with_whole_sequences(
            hidden_dropout=self.retro_encoder_hidden_dropout,
            attention_dropout=self.retro_encoder_attention_dropout,
            window_size=None,
        )
