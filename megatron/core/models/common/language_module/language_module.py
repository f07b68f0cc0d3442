"""Base of language models: embedding, positions, output layer, loss over the vocabulary.

``s`` tokens, ``b`` sequences, ``h`` hidden size, ``v`` vocabulary, ``x/tp`` this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.enums import ModelType
from megatron.core.fusions.rope import RotaryTable
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    build_multimodal_rotary,
    build_rotary,
)
from megatron.core.packed_seq_params import PackedSeqParams, position_in_sequence, sequence_index
from megatron.core.parallel.context_parallel_partition import held_tokens, row_lengths
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import info_of, name_parameters, set_info
from megatron.core.tensor_parallel.cross_entropy import true_columns, vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.fused_linear_cross_entropy import linear_cross_entropy
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, check_token_ids
from megatron.core.transformer.attention_masks import alibi_bias, alibi_slopes
from megatron.core.transformer.kv_cache import KVCache, PositionBias
from megatron.core.transformer.module import (
    MegatronModule,
    before_reading,
    is_plain,
    is_replaced,
)
from megatron.core.transformer.rope import MultimodalRotaryEmbedding, RotaryEmbedding
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import PaddedSize

# Options in Megatron Core's order, as positional arguments of models.
OPTIONS = (
    "pre_process post_process fp16_lm_cross_entropy parallel_output "
    "share_embeddings_and_output_weights position_embedding_type rotary_percent"
)


class LanguageModule(MegatronModule):
    """Base of models that end in a vocabulary: one pipeline stage of such a model.

    A constructor calls `set_language_options`, builds the submodules and ends with
    `finalize_parameters`.  A model with its own options sets ``pre_process``, ``post_process`` and
    ``share_embeddings_and_output_weights``, and ends with `setup_embeddings_and_output_layer`.
    """

    embedding: LanguageModelEmbedding
    output_layer: ColumnParallelLinear
    position_types: tuple[str, ...]  # values of --position-embedding-type
    pre_process = True
    post_process = True
    share_embeddings_and_output_weights = False
    parallel_output = True
    num_tokens: int | None = None  # vocabulary without padding; None: no row is padding
    vp_stage: int | None = None
    # Replaces `token_losses` (same arguments) at the end of the model's forward pass.
    loss_runner: Callable[[Tensor, Tensor], Tensor] | None = None
    model_type = ModelType.encoder_or_decoder
    _has_seen_positions = False
    _is_finalized = False  # all parameters have names and values

    @library_call("... model_comm_pgs")
    def __init__(self, config: TransformerConfig, *, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config)
        self.pg_collection = pg_collection
        self.tp_group = pg_collection.tp
        self.cp_group = pg_collection.cp
        self.pp_group = pg_collection.pp
        self.rotary_pos_emb: RotaryEmbedding | None = None

    def set_language_options(
        self,
        vocab_size: int,
        max_sequence_length: int,
        *,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "learned_absolute",
        rotary_percent: float = 1.0,
        unpadded_vocab_size: int | None = None,
        vp_stage: int | None = None,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        seq_len_interpolation_factor: float | None = None,
    ) -> None:
        """``vocab_size`` includes padding rows, ``unpadded_vocab_size`` does not.

        ``unpadded_vocab_size`` defaults to the size that ``vocab_size`` was padded from, if it is a
        `PaddedSize`.  Padding never enters a softmax.  Raises ConfigError for a position type that
        ``position_types`` does not contain.
        """
        config = self.config
        if position_embedding_type not in self.position_types:
            raise ConfigError(
                f"--position-embedding-type {position_embedding_type} is not one of "
                f"{', '.join(self.position_types)}"
            )
        if unpadded_vocab_size is None and isinstance(vocab_size, PaddedSize):
            unpadded_vocab_size = vocab_size.true_size
        self.vocab_size, self.num_tokens = vocab_size, unpadded_vocab_size
        self.max_sequence_length = self.max_position_embeddings = max_sequence_length
        self.position_embedding_type = position_embedding_type
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.fp16_lm_cross_entropy, self.parallel_output = fp16_lm_cross_entropy, parallel_output
        self.rotary_percent = rotary_percent
        self.rotary_base = rotary_base
        of_rotary: dict[str, Any] = {
            "rotary_percent": rotary_percent,
            "rotary_base": rotary_base,
            "seq_len_interpolation_factor": seq_len_interpolation_factor,
            "cp_group": self.cp_group,
        }
        # Latent attention always rotates a part of each head; a learned table adds to that.
        if position_embedding_type == "rope" or config.multi_latent_attention:
            of_rotary |= {"rope_scaling": rope_scaling, "rope_scaling_factor": rope_scaling_factor}
            self.rotary_pos_emb = build_rotary(config, max_sequence_length, **of_rotary)
        elif position_embedding_type == "mrope":
            self.mrope_section = config.mrope_section
            self.rotary_pos_emb = build_multimodal_rotary(config, **of_rotary)

    @property
    def has_embedding(self) -> bool:
        """Whether this stage has the embedding, or a copy of the first stage's."""
        return "embedding" in self._modules

    # ---- building --------------------------------------------------------------------------

    def build_embedding(
        self,
        *,
        num_tokentypes: int = 0,
        scatter_to_sequence_parallel: bool = True,
        is_shared: bool | None = None,
    ) -> LanguageModelEmbedding:
        """Build the embedding of words, positions and token types.

        ``is_shared``: other stages have copies of the word embedding, as tied ones do.
        """
        embedding = LanguageModelEmbedding(
            self.config,
            self.vocab_size,
            self.max_sequence_length,
            self.position_embedding_type,
            num_tokentypes,
            tp_group=self.tp_group,
            num_tokens=self.num_tokens,
            scatter_to_sequence_parallel=scatter_to_sequence_parallel,
        )
        if self.share_embeddings_and_output_weights or is_shared:
            mark_as_shared_embedding(embedding.word_embeddings.weight, is_copy=not self.pre_process)
        return embedding

    def build_decoder(
        self,
        spec: ModuleSpec | TransformerBlockSubmodules,
        block: type[TransformerBlock] = TransformerBlock,
    ) -> TransformerBlock:
        """Build the stack of layers, of class ``block``."""
        return block(
            self.config,
            spec,
            pre_process=self.pre_process,
            post_process=self.post_process,
            pg_collection=self.pg_collection,
            vp_stage=self.vp_stage,
        )

    def build_output_layer(self, *, bias: bool = False) -> ColumnParallelLinear:
        """Build the output layer; it has no weight of its own if it is tied to the embedding."""
        is_tied = self.share_embeddings_and_output_weights
        layer = ColumnParallelLinear(
            self.config.hidden_size,
            self.vocab_size,
            config=self.config,
            init_method=(
                self.config.embedding_init_method if is_tied else self.config.vocabulary_init_method
            ),
            tp_group=self.tp_group,
            bias=bias,
            skip_weight_param_allocation=is_tied and self.has_embedding,
            unpadded_output_size=self.num_tokens,
            is_embedding_or_output=True,
        )
        if layer.weight is None:
            self.embedding.word_embeddings.is_tied = True
        elif is_tied:
            mark_as_shared_embedding(layer.weight, is_copy=True)
        return layer

    def finalize_parameters(self) -> None:
        """Assign global names, and initialize with the seed of the config."""
        name_parameters(self, self.renamed_parameters())
        self.fill_parameters()
        self._is_finalized = True

    def renamed_parameters(self) -> dict[str, str]:
        """Return prefixes of local names of parameters -> their global prefixes."""
        renamed = {
            f"{stack}.layers.{i}.": f"{stack}.layers.{layer}."
            for stack, part in self.named_children()
            for i, layer in enumerate(getattr(part, "layer_range", ()))
        }
        if self.share_embeddings_and_output_weights:
            renamed["output_layer.weight"] = "embedding.word_embeddings.weight"
        return renamed

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if self._is_finalized and isinstance(value, nn.Module):  # a project replaces a part
            self._name_new_parts()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Return the entries of `ShardedModule`; a tied output weight is the embedding's copy."""
        entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.share_embeddings_and_output_weights:
            self.tie_embeddings_and_output_weights_state_dict(
                entries, f"{prefix}output_layer.weight", f"{prefix}embedding.word_embeddings.weight"
            )
        return entries

    def tie_embeddings_and_output_weights_state_dict(
        self,
        sharded_state_dict: ShardedStateDict,
        output_layer_weight_key: str,
        first_stage_word_emb_key: str,
    ) -> None:
        """Give the entry of an output layer with a copy of the embedding the embedding's key."""
        if (output := sharded_state_dict.get(output_layer_weight_key)) is not None:
            output.key = first_stage_word_emb_key

    def setup_embeddings_and_output_layer(self) -> None:
        """Name and initialize the parameters of a model with its own options."""
        self._name_new_parts()
        if not self._is_finalized:
            self.finalize_parameters()

    def _name_new_parts(self) -> None:
        """Assign names to parameters without one, and mark the vocabulary's weights."""
        output: Any = self.output_layer if self.post_process else None
        weights = [self.embedding.word_embeddings.weight] if self.has_embedding else []
        weights += [] if getattr(output, "weight", None) is None else [output.weight]
        shared = self.shared_embedding_or_output_weight()
        has_copies = self.config.mtp_num_layers and self.pp_group.size() > 1
        for weight in weights:
            info = info_of(weight)
            if info.init == "own":  # of another kind, such as the layer of a value model
                continue
            set_info(weight, replace(info, is_embedding_or_output=True))
            if weight is shared and (self.share_embeddings_and_output_weights or has_copies):
                mark_as_shared_embedding(weight, is_copy=not self.pre_process)
        name_parameters(self, self.renamed_parameters(), only_new=True)

    def shared_embedding_or_output_weight(self) -> nn.Parameter | None:
        """Return the word embedding, or on the last stage its copy or the output weight."""
        if self.has_embedding:
            return self.embedding.word_embeddings.weight
        return self.output_layer.weight if self.post_process else None

    def output_weight(self) -> Tensor | None:
        """Return the tied weight for the output layer; None if the layer has its own weight."""
        if not self.share_embeddings_and_output_weights:
            return None
        if self.has_embedding:
            return self.embedding.word_embeddings.tied_weight()
        return self.shared_embedding_or_output_weight()

    # ---- positions -------------------------------------------------------------------------

    def rotary_table(
        self,
        num_tokens: int,
        packed: PackedSeqParams | None = None,
        cache: KVCache | None = None,
        position_ids: Tensor | None = None,
        ahead: int = 0,
    ) -> RotaryTable | None:
        """Return rotary angles of this rank's ``num_tokens`` tokens; None without RoPE.

        ``ahead``: number of positions by which the tokens are later, without a cache.
        ``position_ids``: with M-RoPE, [3, b, s/cp] time, height and width of this rank's tokens.
        Other ids are not read: a token's position is its place in its sequence.
        """
        if self.rotary_pos_emb is None:
            return None
        rotary = self.rotary_pos_emb
        dtype = self.config.params_dtype
        cp = self.pg_collection.cp
        if isinstance(rotary, MultimodalRotaryEmbedding) and (
            position_ids is not None and position_ids.dim() == 3
        ):
            return rotary.table_of_grid(position_ids, self.config.mrope_section or (), dtype)
        if cache is not None:
            if is_replaced(rotary, "forward"):
                raise ConfigError(
                    f"{type(rotary).__name__}.forward is replaced, but a pass with a KV cache "
                    "makes its own angles: change inv_freq, or pass no inference_context"
                )
            return rotary.table_at(*cache.positions(num_tokens), dtype)
        total = num_tokens * cp.size()
        if packed is None:
            held = None if cp.size() == 1 else self._held_tokens(num_tokens, None)
            return rotary.table(total, ahead, dtype, held)
        held = self._held_tokens(num_tokens, packed)
        positions = position_in_sequence(packed.ends, total)[held] + ahead
        contexts: Tensor | int = total
        if rotary.reads_context:  # each sequence is a context of its own
            lengths = packed.ends.diff()
            contexts = lengths[sequence_index(packed.ends, total)[held].clamp(max=len(lengths) - 1)]
        return rotary.table_at(positions, contexts, dtype)

    def rotary_angles(
        self,
        num_tokens: int,
        packed: PackedSeqParams | None,
        cache: KVCache | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Return rotary angles as Megatron Core passes them to layers: [s, 1 or b, 1, r].

        They are those of this rank's ``num_tokens`` tokens, but with ``packed`` sequences those of
        the positions of the longest one.
        """
        rotary: Any = self.rotary_pos_emb
        angles: Tensor
        if self.position_embedding_type == "mrope":
            assert position_ids is not None, "M-RoPE reads positions on every stage"
            grid = position_ids if position_ids.dim() == 3 else position_ids.expand(3, -1, -1)
            angles = rotary(grid, self.config.mrope_section)
        elif packed is not None:
            angles = rotary(max(packed.lengths), packed_seq=True)
        else:
            angles = rotary(num_tokens * self.cp_group.size())
        return angles

    def attention_bias(
        self, num_tokens: int, packed: PackedSeqParams | None, cache: KVCache | None
    ) -> Tensor | PositionBias | None:
        """Return the ALiBi bias for this rank's heads and tokens; None without ALiBi.

        With a cache the result is a function of positions.
        """
        if self.position_embedding_type != "alibi":
            return None
        slopes = alibi_slopes(self.config.num_attention_heads, device.current())
        mine = slopes.chunk(self.tp_group.size())[self.tp_group.rank()]
        if cache is not None:
            return lambda start, count, num_keys: alibi_bias(
                mine, torch.arange(start, start + count, device=mine.device), num_keys
            )
        queries = self._held_tokens(num_tokens, packed)
        return alibi_bias(mine, queries, num_tokens * self.pg_collection.cp.size())

    def _held_tokens(self, num_tokens: int, packed: PackedSeqParams | None) -> Tensor:
        """Return the positions of the tokens that this context-parallel rank holds: [s/cp]."""
        cp = self.pg_collection.cp
        lengths = None if packed is None or cp.size() == 1 else packed.lengths
        lengths = row_lengths(lengths, num_tokens * cp.size())
        return held_tokens(lengths, cp.rank(), cp.size(), device.current())

    def check_share(self, position_ids: Tensor | None, cache: KVCache | None) -> None:
        """Raise ConfigError if a sequence is not, or cannot be, split over context-parallel ranks.

        Positions are checked once only, because reading them waits for the device.
        """
        cp = self.pg_collection.cp.size()
        if cp == 1:
            return
        if cache is not None:
            raise ConfigError("generation needs --context-parallel-size 1")
        if self._has_seen_positions or position_ids is None:
            return
        self._has_seen_positions = True
        position_ids = position_ids[0] if position_ids.dim() == 3 else position_ids
        length = position_ids.shape[1]
        is_whole = bool((position_ids == torch.arange(length, device=position_ids.device)).all())
        if is_whole and length * cp > self.max_sequence_length:
            raise ConfigError(
                f"--context-parallel-size {cp}: each rank received the positions 0 to "
                f"{length - 1}, more than its share of {self.max_sequence_length}; shard the "
                "batch by get_batch_on_this_cp_rank()"
            )

    def tokens_in_row(self, input_ids: Tensor | None, received: Tensor | None) -> int:
        """Return the tokens per sequence, also for states that sequence parallelism has split.

        A later stage does not read ``input_ids``: there projects pass ids of another layout.
        """
        if input_ids is not None and (self.pre_process or received is None):
            return input_ids.shape[1]
        assert received is not None, "a later stage needs set_input_tensor"
        cut = self.tp_group.size() if self.config.sequence_parallel else 1
        return received.shape[0] * cut

    # ---- the end ---------------------------------------------------------------------------

    def token_losses(
        self,
        hidden: Tensor,
        labels: Tensor,
        layer: ColumnParallelLinear | None = None,
        is_frozen: bool = False,
    ) -> Tensor:
        """Map hidden states [s, b, h] and labels [b, s] to the loss of each token [b, s], float32.

        Hidden states are [s/tp, b, h] under sequence parallelism.  Equal to the output layer
        followed by `compute_language_model_loss`, which are used if a project has replaced one of
        them, or if the output layer has hooks or another matmul.  ``layer``: that of a draft head.
        ``is_frozen``: no gradient enters the output weight.
        """
        hidden = self.scaled(hidden)
        config = self.config
        weight = self.output_weight() if layer is None and not is_frozen else None
        layer = layer or self.output_layer
        if is_frozen:
            own = self.shared_embedding_or_output_weight() if layer.weight is None else layer.weight
            assert own is not None, "the last stage has the weight of its output layer"
            weight = own.detach()
        cap = config.final_logit_softcapping
        is_usual = (
            type(layer) is ColumnParallelLinear
            and layer.lora is None
            and is_plain(layer)
            and not is_replaced(self, "compute_language_model_loss")
            and (config.loss_chunk_size or (layer.bias is None and cap is None))
        )
        if not is_usual:
            return self.compute_language_model_loss(
                labels, self.cap(layer(hidden, weight, runtime_gather_output=False)[0])
            )
        before_reading(layer)
        weight = layer.weight if weight is None else weight
        assert weight is not None, "a layer without a weight needs that of the embedding"
        padded = weight.shape[0]
        group = self.tp_group
        check_token_ids(labels, self.num_tokens or padded * group.size(), may_ignore=True)
        loss = linear_cross_entropy(
            hidden.flatten(0, 1),
            weight,
            labels.transpose(0, 1).flatten(),
            group=group,
            num_columns=true_columns(padded, self.num_tokens, group),
            sequence_parallel=layer.sequence_parallel,
            is_own=weight is layer.weight,  # no embedding shares it
            bias=layer.bias,
            cap=cap,
            chunk_size=config.loss_chunk_size or 0,
        )
        return loss.view(-1, hidden.shape[1]).transpose(0, 1).contiguous()

    def logits(
        self, hidden: Tensor, *, gather: bool, layer: ColumnParallelLinear | None = None
    ) -> Tensor:
        """Map hidden states [s, b, h] to logits [b, s, v] or [b, s, v/tp], with soft capping.

        Gathered logits have the unpadded vocabulary; in sharded logits padding is -inf.  ``layer``:
        the output layer of a draft head.
        """
        hidden = self.scaled(hidden)
        weight = self.output_weight() if layer is None else None
        layer = layer or self.output_layer
        logits, _ = layer(hidden, weight, runtime_gather_output=gather)
        logits = self.cap(logits).transpose(0, 1)
        if self.num_tokens is None:
            return logits.contiguous()
        if gather or self.tp_group.size() == 1:
            return logits[..., : self.num_tokens].contiguous()
        columns = true_columns(logits.shape[-1], self.num_tokens, self.tp_group)
        is_padding = torch.arange(logits.shape[-1], device=logits.device) >= columns
        return logits.masked_fill(is_padding, float("-inf"))

    def sharded_logits(self, hidden: Tensor, weight: Tensor | None) -> Tensor:
        """Map `scaled` hidden states [s, b, h] to logits [s, b, v/tp] with soft capping.

        ``weight``: `output_weight`.  Padding columns are not masked.
        """
        logits, _ = self.output_layer(hidden, weight, runtime_gather_output=False)
        return self.cap(logits)

    def generated_logits(
        self, hidden: Tensor, cache: KVCache | None, gather: bool | None
    ) -> Tensor:
        """Return `logits`; with a cache gathered ones, of the rows that it selects.

        ``gather`` None: as ``parallel_output`` requests.
        """
        if cache is not None:
            hidden = cache.output_rows(hidden)
            gather = True
        return self.logits(hidden, gather=not self.parallel_output if gather is None else gather)

    def scaled(self, hidden: Tensor) -> Tensor:
        """Scale the hidden states for the output layer."""
        scale = self.config.output_scale
        if scale is None:
            return hidden
        return hidden * (self.config.hidden_size**-0.5 if scale == 0 else scale)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Map labels [b, s] and logits [s, b, v/tp] to the loss of each token [b, s] in float32."""
        loss = vocab_parallel_cross_entropy(
            logits, labels.transpose(0, 1), tp_group=self.tp_group, vocab_size=self.num_tokens
        )
        return loss.transpose(0, 1).contiguous()

    def cap(self, logits: Tensor) -> Tensor:
        """Apply soft capping to +-``final_logit_softcapping``, if it is set."""
        limit = self.config.final_logit_softcapping
        return logits if limit is None else limit * torch.tanh(logits / limit)


def mark_as_shared_embedding(weight: Tensor, *, is_copy: bool, over: str = "embd") -> None:
    """Mark ``weight`` as shared by the stages of group ``over``; ``is_copy`` unless on the first.

    ``over`` "embd": the weight is word embedding and output layer.
    """
    set_info(weight, replace(info_of(weight), is_duplicate=is_copy, shared_over=over))
