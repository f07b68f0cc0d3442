"""Flags of RETRO: where neighbors are, how many a chunk has, and the encoder that reads them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import MAX_LAYERS, option

_retro = partial(option, group="retro")


@dataclass(frozen=True, kw_only=True)
class RetroFlags:
    retro_project_dir: str | None = _retro(
        None,
        "Folder that tools/retro/preprocess_data.py wrote. Its config.json sets the data, "
        "tokenizer, sequence length, seed, batch size and number of samples of the run.",
    )
    retro_add_retriever: bool = _retro(
        False,
        "Let tokens attend to retrieved neighbors; without it pretrain_retro.py trains as "
        "pretrain_gpt.py does.",
    )
    retro_chunk_length: int = _retro(
        64,
        "Tokens of a chunk, which has its own neighbors; --retro-project-dir sets it for data.",
        at_least=1,
    )
    retro_cyclic_train_iters: int | None = _retro(
        None,
        "Iterations after which training reads the same samples again; by default it reads new "
        "samples as long as there are some.",
        at_least=1,
    )
    retro_encoder_layers: int = _retro(
        2,
        "Layers of the encoder of neighbors; every third one, from the first on, attends to the "
        "chunk.",
        at_least=1,
        at_most=MAX_LAYERS,
    )
    retro_encoder_hidden_dropout: float = _retro(
        0.1, "Dropout of hidden states in the encoder of neighbors."
    )
    retro_encoder_attention_dropout: float = _retro(
        0.1, "Dropout of attention weights in the encoder of neighbors."
    )
    retro_num_neighbors: int = _retro(
        2, "Neighbors that the tokens after a chunk attend to.", at_least=1
    )
    retro_num_retrieved_chunks: int = _retro(
        2, "Chunks of a neighbor: the one that was found, and its continuation.", at_least=1
    )
    retro_attention_gate: float = _retro(
        1.0,
        "Factor of what tokens read from neighbors. With 0 the model computes what a GPT with its "
        "weights computes, and neighbors are not encoded.",
    )
    retro_verify_neighbor_count: bool = _retro(
        True,
        "Accept data with neighbors for fewer samples than the run reads: the samples that have "
        "them are read again.",
        flag="--retro-no-verify-neighbor-count",
    )

    @property
    def retrieved_length(self) -> int:
        """Number of tokens in a neighbor."""
        return self.retro_num_retrieved_chunks * self.retro_chunk_length
