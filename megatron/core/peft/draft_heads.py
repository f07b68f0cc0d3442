"""Draft heads on a frozen model: Medusa (arXiv 2401.10774) and EAGLE-3 (arXiv 2503.01840).

The generation engine lets the heads guess tokens, which the model then verifies in one pass.  The
heads are the module ``draft`` of the last pipeline stage.  Training changes them alone: the model
runs without dropout and has no gradients.

Medusa: head k (from 1) maps the final hidden state x of token t to x + silu(W x + b), and its
output layer, which starts with the weight of the model's, predicts token t + k + 1.  Its
cross-entropy has the weight 0.8^(k - 1).

    draft.heads.<k - 1>.linear.{weight,bias}     [h, h], [h]; zero at the start
    draft.heads.<k - 1>.output_layer.weight      [v, h]

EAGLE-3: ``fc`` joins the hidden states of three layers of the model.  One Llama layer reads them
and the embedding of the next token; an output layer of its own with ``d`` of the ``v`` tokens
predicts the token after that one.  In generation the layer goes on from its own output.  Training
unrolls that (training-time test): step j (from 0) reads at each token t the output of step j - 1
and the embedding of token t + 1 + j, at position t + j.  It attends to the keys of step 0 of the
tokens up to t and to the keys of steps 1 .. j of token t.  Each step has a loss: the KL divergence
to the model's prediction of the same token among the d tokens.

    draft.fc.weight                              [h, 3 h]
    draft.{input_layernorm,hidden_norm}.weight   [h] of the embedding and of the hidden state
    draft.self_attention.linear_qkv.weight       input 2 h; otherwise as in a layer of the decoder
    draft.{post_attention_layernorm,norm}.weight, draft.mlp.linear_fc1.weight, ...
    draft.output_layer.weight                    [d, h]
    draft.d2t                                    [d] ids of the tokens, if there are fewer than v

``s`` tokens, ``b`` sequences, ``h`` hidden size, ``x/tp`` this rank's part.  Collectives: in
the layers; Medusa `tokens_ahead` over cp; EAGLE-3 a reduce-scatter of rows [d, h] over tp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core import device
from megatron.core.aux_loss import AuxLosses
from megatron.core.config.errors import ConfigError
from megatron.core.enums import AttnMaskType
from megatron.core.packed_seq_params import AttentionMask, PackedBounds, PackedSeqParams
from megatron.core.parallel.context_parallel_partition import row_lengths, sequence_ends
from megatron.core.params.param_info import info_of, set_info
from megatron.core.params.param_init import Init
from megatron.core.tensor_parallel.cross_entropy import kl_divergence
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_first_dim,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.kv_cache import KVCache
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule, before_reading
from megatron.core.transformer.multi_token_prediction import (
    ShiftedTargets,
    attach_losses,
    shifted,
    tokens_ahead,
)
from megatron.core.transformer.norms import Norm, summed
from megatron.core.transformer.transformer_config import TransformerConfig

_NUM_STEPS = 4  # of the training-time test
_DECAY = 0.8  # of the weights of the losses of later heads or steps
_MTP = "mtp."
_HEADS = "draft."


def attach_draft_heads(model: Any, settings: Any, drafted: Tensor | None = None) -> None:
    """Freeze ``model`` and add heads to its last stage; or train its layers of MTP alone.

    ``settings``: the flags ``export_...`` of heads, and ``has_eagle``.  ``drafted``: ids, in order,
    of the tokens that EAGLE-3 drafts; default: the lowest ones.
    The heads' parameters are initialized by `initialize_parameters`, and by `begin_heads` once the
    model has its weights.  No communication.
    """
    frozen = tuple(f"{_MTP}layers.{i}." for i in settings.export_freeze_mtp)
    num_medusa = settings.export_num_medusa_heads or 0
    is_mtp = not (num_medusa or settings.has_eagle)
    for param in model.parameters():
        info = info_of(param)
        is_trained = is_mtp and info.name.startswith(_MTP) and not info.name.startswith(frozen)
        param.requires_grad_(is_trained)
        set_info(param, replace(info, is_new=is_trained))
    model.is_frozen = True
    if is_mtp or not model.post_process:
        return
    if settings.has_eagle:
        sizes = settings.export_draft_vocab_size, settings.export_eagle_ffn_hidden_size
        model.draft = EagleHead(model, *sizes, drafted)
    else:
        model.draft = MedusaHeads(model, num_medusa)
    for param in model.draft.parameters():
        set_info(param, replace(info_of(param), is_new=True))


def begin_heads(chunks: Iterable[nn.Module], loaded: Iterable[str] = ()) -> None:
    """Set initial values of heads that depend on the weights of the model.

    Heads among the ``loaded`` tensors keep their values.  Collective over tp.
    """
    if any(name.startswith(_HEADS) for name in loaded):
        return
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, MedusaHeads | EagleHead):
                module.begin()


class DraftHeads(MegatronModule):
    """Heads on ``model``, which contains them.

    ``begin()`` sets initial values that depend on the weights of the model.  In generation
    ``predict(state, tokens, depth, cache)`` returns the state [N, 1, h] of ``depth`` (from 0) from
    that of the depth before, or from `features`, and tokens [N] that are ``depth`` + 1 positions
    ahead; ``logits(state, depth)`` maps it to [1, N, v], gathered over tp.
    """

    title: str  # in the names of losses
    num_losses: int

    def __init__(self, model: Any) -> None:
        super().__init__(model.config)
        self._model = (model,)  # a tuple hides it from those who look for submodules
        self.aux_losses = AuxLosses(self.config.num_layers)

    @property
    def model(self) -> Any:
        """The model that has these heads."""
        return self._model[0]

    def token_losses(
        self,
        hidden: Tensor,
        depths: list[ShiftedTargets],
        mask: AttentionMask | None,
        packed: PackedSeqParams | None,
    ) -> Iterator[Tensor]:
        """Yield the losses [b, s/cp] of each head or step for the final ``hidden`` states."""
        raise NotImplementedError

    def attach(
        self,
        losses: Tensor,
        hidden: Tensor,
        rows: tuple[Tensor | None, Tensor, Tensor | None],
        mask: AttentionMask | None,
        packed: PackedSeqParams | None,
    ) -> Tensor:
        """Return the model's ``losses`` [b, s/cp] of tokens; their backward pass trains the heads.

        ``hidden``: the model's final hidden states.  ``rows``: tokens, which Medusa does not need,
        labels and loss mask.
        """
        tokens, labels, loss_mask = rows
        if loss_mask is None:
            loss_mask = torch.ones(labels.shape, device=labels.device)
        cp = self.model.cp_group
        lengths = _lengths(packed, labels.shape[1] * cp.size())
        given = (labels if tokens is None else tokens), labels, loss_mask
        depths = tokens_ahead(given, self.num_losses, lengths, cp)
        losses = losses.detach()
        found = self.token_losses(hidden.detach(), depths, mask, packed)
        by_token = self.config.calculate_per_token_loss
        for k, (of_head, ahead) in enumerate(zip(found, depths, strict=True)):
            name = f"{self.title}_{k + 1} loss"
            pair = of_head, ahead
            losses = attach_losses(self.aux_losses, losses, name, pair, _DECAY**k, by_token)
        return losses

    def features(self, hidden: Tensor) -> Tensor:
        """Map the final hidden states [N, 1, h] to the input of the first draft."""
        return hidden


class MedusaHead(MegatronModule):
    """One residual block and the output layer behind it."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.config)
        hidden = self.config.hidden_size
        zeros = Init("zeros")
        self.linear = ReplicatedLinear(
            hidden, hidden, config=self.config, init_method=zeros, bias=True
        )
        self.output_layer = _output_layer(model, self.config, model.vocab_size, model.num_tokens)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [s, b, h] to the output layer's input."""
        return hidden + F.silu(self.linear(hidden)[0])


class MedusaHeads(DraftHeads):
    """Heads that each predict one further token from the final hidden state."""

    title = "medusa"

    def __init__(self, model: Any, num_heads: int) -> None:
        super().__init__(model)
        self.num_losses = num_heads
        self.heads = nn.ModuleList(MedusaHead(model) for _ in range(num_heads))

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the weight of the model's output layer."""
        weight = _output_weight(self.model)
        for head in self.heads:
            head.output_layer.weight.copy_(weight)  # type: ignore[operator,union-attr]

    def token_losses(
        self,
        hidden: Tensor,
        depths: list[ShiftedTargets],
        mask: AttentionMask | None,
        packed: PackedSeqParams | None,
    ) -> Iterator[Tensor]:
        """Yield the cross-entropy of each head."""
        for head, ahead in zip(self.heads, depths, strict=True):
            yield self.model.token_losses(head(hidden), ahead.labels, head.output_layer)

    def predict(self, state: Tensor, tokens: Tensor, depth: int, cache: KVCache) -> Tensor:
        """Return ``state``: every head reads the final hidden state."""
        return state

    def logits(self, state: Tensor, depth: int) -> Tensor:
        """Return the logits of head ``depth``."""
        head: Any = self.heads[depth]
        found: Tensor = self.model.logits(head(state), gather=True, layer=head.output_layer)
        return found


class EagleAttention(SelfAttention):
    """Attention whose input is an embedding beside a hidden state."""

    input_parts = 2


class EagleHead(DraftHeads):
    """The layer of EAGLE-3, with ``vocab_size`` tokens of the vocabulary; default: all."""

    title = "eagle"
    num_losses = _NUM_STEPS

    def __init__(
        self,
        model: Any,
        vocab_size: int | None,
        ffn_hidden_size: int | None,
        drafted: Tensor | None = None,
    ) -> None:
        super().__init__(model)
        config = _layer_config(self.config, ffn_hidden_size)
        self.layer_config = config
        groups = model.pg_collection
        hidden = config.hidden_size
        self.fc = ReplicatedLinear(
            3 * hidden, hidden, config=config, init_method=config.init_method
        )
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm, self.norm = (
            Norm(config, hidden, config.layernorm_epsilon) for _ in range(4)
        )
        self.self_attention = EagleAttention(
            config,
            SelfAttentionSubmodules(
                linear_qkv=ColumnParallelLinear,
                core_attention=DotProductAttention,
                linear_proj=RowParallelLinear,
            ),
            self.config.num_layers,  # keys have a place in the cache after the last layer's
            attn_mask_type=AttnMaskType.causal,
            pg_collection=groups,
        )
        matrices = MLPSubmodules(ColumnParallelLinear, RowParallelLinear)
        self.mlp = MLP(config, matrices, tp_group=groups.tp)
        every = model.num_tokens or model.vocab_size
        if vocab_size and vocab_size > every:
            raise ConfigError(
                f"--export-draft-vocab-size {vocab_size}: the vocabulary has {every} tokens; give "
                "a smaller number, or leave the flag out to draft all of them"
            )
        sizes = model.vocab_size, model.num_tokens
        d2t = None
        if vocab_size and vocab_size < every:
            d2t = torch.arange(vocab_size) if drafted is None else drafted
            d2t = d2t.to(device.current())
            sizes = vocab_size, None
        self.d2t: Tensor | None
        self.register_buffer("d2t", d2t)
        self.num_tokens = sizes[1]
        self.output_layer = _output_layer(model, config, *sizes)
        self._read: dict[int, Tensor] = {}  # outputs of the three layers in this pass
        for index in aux_layers(self.config.num_layers):
            model.decoder.layers[index].register_forward_hook(self._keep(index))

    def _keep(self, index: int) -> Callable[..., None]:
        def keep(_layer: nn.Module, _inputs: Any, output: Any) -> None:
            self._read[index] = summed(output[0]).detach()

        return keep

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the rows of the model's output layer."""
        self.output_layer.weight.copy_(self._rows())  # type: ignore[union-attr]

    def _rows(self) -> Tensor:
        """Return the rows of the model's output layer that this rank drafts: [d/tp, h]."""
        weight = _output_weight(self.model)
        if self.d2t is None:
            return weight
        tp = self.model.tp_group
        index = self.d2t - tp.rank() * len(weight)
        is_mine = (index >= 0) & (index < len(weight))
        rows = weight[index.clamp(0, len(weight) - 1)] * is_mine.unsqueeze(1)
        return rows if tp.size() == 1 else reduce_scatter_first_dim(rows, tp)

    def features(self, hidden: Tensor) -> Tensor:
        """Join the hidden states that the three layers gave in this pass: [s, b, h]."""
        read = [self._read[index] for index in aux_layers(self.config.num_layers)]
        self._read.clear()
        joined: Tensor = self.fc(torch.cat(read, -1).to(self.config.params_dtype))[0]
        return joined

    def _layer(self, embedded: Tensor, state: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Run the layer: embeddings and hidden states [s, b, h] -> hidden states."""
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(state)], -1)
        state = state + attend(both)
        out: Tensor = self.mlp(self.post_attention_layernorm(state))[0]
        return state + out

    def token_losses(
        self,
        hidden: Tensor,
        depths: list[ShiftedTargets],
        mask: AttentionMask | None,
        packed: PackedSeqParams | None,
    ) -> Iterator[Tensor]:
        """Yield the KL divergence of each step of the training-time test."""
        model = self.model
        tp = model.tp_group
        num_tokens = depths[0].labels.shape[1]
        lengths = _lengths(packed, num_tokens)
        with torch.no_grad():
            final = model.scaled(hidden)
            if self.config.sequence_parallel:
                final = gather_from_sequence_parallel_region(final, group=tp)
            teacher = model.cap(F.linear(final, self._rows()))
        visible = _visible(mask, lengths, hidden.shape[1], teacher.device)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        state = self.features(hidden)
        for step, ahead in enumerate(depths):

            def attend(x: Tensor, step: int = step) -> Tensor:
                rotary = model.rotary_table(num_tokens, packed, None, None, step)
                query, key, value = self.self_attention.rotated(x, rotary, packed)
                keys.append(key)
                values.append(value)
                if not step:
                    return self.self_attention.attend(query, key, value, mask, None, packed)[0]
                context = _attend_unrolled(query, keys, values, visible)
                return self.self_attention.project_back(context)[0]

            state = self._layer(model.embedding(ahead.tokens, None), state, attend)
            logits, _ = self.output_layer(self.norm(state))
            wanted = shifted(teacher, lengths, step + 1)
            losses = kl_divergence(logits, wanted, tp_group=tp, vocab_size=self.num_tokens)
            yield losses.transpose(0, 1)

    def predict(self, state: Tensor, tokens: Tensor, depth: int, cache: KVCache) -> Tensor:
        """Run the layer on rows of the engine."""
        model = self.model
        rotary = model.rotary_table(len(tokens), None, cache)

        def attend(x: Tensor) -> Tensor:
            out = self.self_attention(x, inference_context=cache, rotary_pos_emb=rotary)
            context: Tensor = out[0]
            return context

        return self._layer(model.embedding(tokens.unsqueeze(0), None), state, attend)

    def logits(self, state: Tensor, depth: int) -> Tensor:
        """Return logits of all tokens, -inf for those that are not drafted."""
        found: Tensor = self.output_layer(self.norm(state), runtime_gather_output=True)[0]
        found = found.transpose(0, 1)
        every = self.model.num_tokens or self.model.vocab_size
        if self.d2t is None:
            return found[..., :every]
        complete = found.new_full((*found.shape[:-1], every), float("-inf"))
        return complete.index_copy(-1, self.d2t, found)


def aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the layers (from 0) whose outputs EAGLE-3 reads: low, middle, high.

    The paper's code reads the same ones; a small model has first, middle and last.
    """
    if num_layers < 7:
        return 0, (num_layers - 1) // 2, num_layers - 1
    return 1, num_layers // 2 - 1, num_layers - 4


def _layer_config(base: TransformerConfig, ffn_hidden_size: int | None) -> TransformerConfig:
    """Return the config of a Llama layer of the sizes and kernels of ``base``."""
    alike = (
        "hidden_size num_attention_heads num_query_groups kv_channels layernorm_epsilon "
        "init_method_std rotary_interleaved apply_rope_fusion attention_backend params_dtype bf16 "
        "fp16 sequence_parallel tensor_model_parallel_size deterministic_mode "
        "gradient_accumulation_fusion bias_swiglu_fusion"
    ).split()
    return TransformerConfig(
        **{name: getattr(base, name) for name in alike},
        num_layers=1,
        ffn_hidden_size=ffn_hidden_size or base.ffn_hidden_size,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )


def _output_layer(
    model: Any, config: TransformerConfig, size: int, num_tokens: int | None
) -> ColumnParallelLinear:
    return ColumnParallelLinear(
        config.hidden_size,
        size,
        config=config,
        init_method=config.init_method,
        tp_group=model.tp_group,
        bias=False,
        unpadded_output_size=num_tokens,
    )


def _output_weight(model: Any) -> Tensor:
    """Return this rank's rows of the weight of the model's output layer."""
    before_reading(model.output_layer)
    weight: Tensor | None = model.output_weight()
    weight = model.output_layer.weight if weight is None else weight
    assert weight is not None, "an untied output layer has a weight"
    return weight.detach()


def _lengths(packed: PackedSeqParams | None, num_tokens: int) -> tuple[int, ...]:
    """Return the lengths of the packed sequences in a row of ``num_tokens``."""
    return row_lengths(None if packed is None else packed.lengths, num_tokens)


def _visible(
    mask: AttentionMask | None, lengths: tuple[int, ...], num_rows: int, where: torch.device
) -> Tensor:
    """Return which keys a query sees, [b or 1, 1, s, s]: its document's up to itself."""
    ends = sequence_ends(lengths, where)
    visible = torch.ones(len(ends), len(ends), dtype=torch.bool, device=where).tril()
    visible = (visible & (ends.unsqueeze(0) == ends.unsqueeze(1)))[None, None]
    if isinstance(mask, PackedBounds):
        mask = mask.hidden(num_rows, len(ends))
    return visible if mask is None else visible & ~mask


def _attend_unrolled(
    query: Tensor, keys: list[Tensor], values: list[Tensor], visible: Tensor
) -> Tensor:
    """Attend to visible keys of step 0, and to the keys of later steps of the query's own token.

    ``query`` [s, b, n, d]; keys and values [s, b, g, d] of each step.  Returns [s, b, n d].
    """
    own = torch.eye(visible.shape[-1], dtype=torch.bool, device=visible.device)
    own = own.expand_as(visible)
    seen = torch.cat([visible, *[own] * (len(keys) - 1)], -1)
    repeats = query.shape[2] // keys[0].shape[2]
    key, value = (
        torch.cat(parts).repeat_interleave(repeats, 2).permute(1, 2, 0, 3)
        for parts in (keys, values)
    )
    out = F.scaled_dot_product_attention(query.permute(1, 2, 0, 3), key, value, attn_mask=seen)
    return out.permute(2, 0, 1, 3).flatten(2)
