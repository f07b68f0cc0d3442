"""Linear layers and the word embedding, sharded over a tensor-parallel group.

Shapes: ``s`` tokens, ``b`` sequences, ``i``/``o`` input and output width, ``x/tp`` this rank's
share of ``x``; ``s/tp`` appears only under sequence parallelism (SP).

    column   [s, b, i]    -> [s, b, o/tp]    weight [o/tp, i]
    row      [s, b, i/tp] -> [s, b, o]       weight [o, i/tp]

Collectives, in order: a column layer all-gathers its input before the matmul under SP; backward it
gathers the input again while the input gradient is computed, then reduces that gradient
(all-reduce, or reduce-scatter under SP) while the weight gradient is computed.  A row layer
reduces its output (all-reduce, or reduce-scatter under SP).

A layer of an expert (``is_expert``) does not communicate: the token dispatcher gathers all tokens
of the expert and sums outputs and input gradients over the ranks.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.config.errors import ConfigError, DataError
from megatron.core.device import cpu_kernels
from megatron.core.dist_checkpointing.module_state import ShardedModule
from megatron.core.parallel.default_groups import library_call
from megatron.core.params.param_info import info_of
from megatron.core.params.param_init import InitMethod, new_parameter, param_info_for
from megatron.core.tensor_parallel.linear import (
    Gemms,
    LinearCall,
    Overlap,
    Quantizer,
    linear,
    sum_output,
)
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.quantized_linear import LinearQuantizer, Recipe
from megatron.core.tensor_parallel.tied_embedding import look_up, takes_table


class LayerConfig(Protocol):
    """The config fields that these layers read."""

    @property
    def params_dtype(self) -> torch.dtype: ...
    @property
    def sequence_parallel(self) -> bool: ...


class Adapter(Protocol):
    """A term that a low-rank adapter adds to a layer's output; see `peft.lora`.

    It is computed from the layer's input and, for DoRA, from W x, the output without bias.
    """

    def __call__(self, x: Tensor, y: Tensor | None = None, /) -> Tensor: ...
    def delta(self) -> Tensor: ...


def divide_over_group(size: int, group: ProcessGroup, what: str) -> int:
    """Return ``size`` divided by the size of ``group``; ``what`` names it in the error message."""
    if size % group.size():
        raise ConfigError(
            f"{what} {size} is not a multiple of --tensor-model-parallel-size {group.size()}"
        )
    return size // group.size()


class Linear(ShardedModule):
    """Base of the linear layers.

    A ``quantizer``, if set, computes x W^T + b in place of torch's matmuls.  ``lora``, if
    `peft.lora.attach_adapters` has set it, computes a term of the output on this rank.
    """

    weight: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        self.quantizer: Quantizer | None = None
        self.lora: Adapter | None = None

    def quantize(self, recipe: Recipe, amax_group: ProcessGroup) -> None:
        """Run the layer's GEMMs in the low precision of ``recipe``.

        ``amax_group``: ranks that agree on the scale of a tensor.  The layer must have a weight.
        """
        assert self.weight is not None, "a layer without a weight"
        is_expert = info_of(self.weight).is_expert
        self.quantizer = LinearQuantizer(
            recipe, self.weight, amax_group=amax_group, is_expert=is_expert
        )

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + b on this rank.  No communication."""
        weight = self.weight
        assert weight is not None, "a layer without a weight"
        return self._adapted(x, linear(x, LinearCall(weight, bias), self.quantizer), bias)

    def _adapted(self, x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
        """Add the adapter's term of input ``x`` to ``y``, before a reduction over ranks.

        ``bias``: a term that ``y`` contains.
        """
        if self.lora is None:
            return y
        return y + self.lora(x, y if bias is None else y - bias)

    def base_weight(self) -> Tensor:
        """Return this rank's weight without an adapter, with the values that GEMMs use."""
        weight: Tensor | None = self.weight
        assert weight is not None, "a layer without a weight"
        return self.quantizer.values(weight) if isinstance(self.quantizer, Gemms) else weight

    def effective_weight(self) -> Tensor:
        """Return this rank's weight, an adapter included."""
        weight = self.base_weight()
        return weight if self.lora is None else weight + self.lora.delta()


class _ShardedLinear(Linear):
    """A linear layer with one dimension of its weight sharded over ``tp_group``.

    ``overlap``, if `overlap_layers` has set it, runs GEMM and collective as one.
    """

    overlap: Overlap | None = None
    config: Any  # a LayerConfig; Transformer Engine's layers need a TransformerConfig

    def __init__(
        self, input_size: int, output_size: int, config: LayerConfig, tp_group: ProcessGroup
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.output_size = output_size
        self.config = config
        self.tp_group = tp_group

    def extra_repr(self) -> str:
        """Return the global sizes and this rank's position, for the printed model."""
        tp = self.tp_group
        return f"{self.input_size}, {self.output_size}, rank {tp.rank()} of {tp.size()}"


class ColumnParallelLinear(_ShardedLinear):
    """``y = x W^T + b`` with the output dimension sharded over ``tp_group``.

    Returns (y, bias); the bias is None unless ``skip_bias_add`` leaves its addition to the caller.
    ``blocks`` are the relative heights of matrices that are stacked in one weight (gate and up):
    each of them is sharded separately, so that every rank has matching parts of all.
    With ``skip_weight_param_allocation`` the caller passes the weight to every call.  With
    ``disable_grad_reduce`` the caller reduces the input gradients; under sequence parallelism they
    are reduce-scattered regardless.  ``stride`` is Megatron-LM's number of equal ``blocks``.

    Collectives over ``tp_group``: forward all-gathers x under sequence parallelism; backward
    all-reduces the input gradient, or reduce-scatters it under sequence parallelism.
    """

    @library_call(
        unused="keep_master_weight_for_test embedding_activation_buffer grad_output_buffer "
        "tp_comm_buffer_name"
    )
    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: LayerConfig,
        init_method: InitMethod,
        tp_group: ProcessGroup,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        blocks: tuple[int, ...] = (1,),
        unpadded_output_size: int | None = None,
        is_expert: bool = False,
        is_embedding_or_output: bool = False,
        disable_grad_reduce: bool = False,
        stride: int = 1,
    ) -> None:
        super().__init__(input_size, output_size, config, tp_group)
        blocks = blocks * stride
        sizes = [output_size * block // sum(blocks) for block in blocks]
        local_size = sum(divide_over_group(size, tp_group, "output size") for size in sizes)
        self.output_size_per_partition = local_size
        self.gather_output = gather_output
        self.skip_bias_add = skip_bias_add
        self.is_expert = is_expert
        talks = tp_group.size() > 1 and not is_expert
        self.sequence_parallel = config.sequence_parallel and talks
        reduces = talks and (self.sequence_parallel or not disable_grad_reduce)
        self.grad_group = tp_group if reduces else None
        self.true_output_size = true_size = unpadded_output_size or output_size
        self.dtype = config.params_dtype
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        if not skip_weight_param_allocation:
            info = param_info_for(
                (true_size, input_size),
                init_method,
                over=tp_group,
                blocks=blocks,
                is_expert=is_expert,
                is_embedding_or_output=is_embedding_or_output,
            )
            self.weight = new_parameter((local_size, input_size), config.params_dtype, info)
            vars(self.weight)["partition_stride"] = stride
        if bias:
            info = param_info_for((true_size,), over=tp_group, blocks=blocks, is_expert=is_expert)
            self.bias = new_parameter((local_size,), config.params_dtype, info)

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Multiply: [s, b, i] (SP: [s/tp, b, i]) -> [s, b, o/tp], or [s, b, o] if gathered.

        Also returns the bias with ``skip_bias_add``, otherwise None.  ``runtime_gather_output``
        overrides ``gather_output``.
        """
        own = self.weight
        weight = own if weight is None else weight
        assert weight is not None, "this layer has no weight of its own: pass one"
        bias = None if self.skip_bias_add else self.bias
        is_own = weight is own
        wanted = self.output_size_per_partition, self.input_size
        if not is_own and weight.shape != wanted:
            raise RuntimeError(
                f"supplied weight's shape is {tuple(weight.shape)}, not {wanted} as expected"
            )
        call = LinearCall(
            weight,
            bias,
            is_own,
            self.grad_group,
            self.sequence_parallel,
            overlap=self.overlap if is_own else None,
        )
        quantizer = self.quantizer if is_own or own is None else None
        y = self._adapted(input_, linear(input_, call, quantizer), bias)
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gather:
            y = gather_from_tensor_model_parallel_region(y, self.tp_group)
        return y, self.bias if self.skip_bias_add else None


class RowParallelLinear(_ShardedLinear):
    """``y = x W^T + b`` with the input dimension sharded over ``tp_group``.

    Returns (y, bias); the bias is None unless ``skip_bias_add`` leaves its addition, which follows
    the reduction over ranks, to the caller.

    Collective over ``tp_group``: forward all-reduces y, or reduce-scatters it under sequence
    parallelism, in which case backward all-gathers its gradient.
    """

    weight: nn.Parameter

    @library_call(unused="stride keep_master_weight_for_test tp_comm_buffer_name")
    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: LayerConfig,
        init_method: InitMethod,
        tp_group: ProcessGroup,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        is_expert: bool = False,
    ) -> None:
        super().__init__(input_size, output_size, config, tp_group)
        local_size = divide_over_group(input_size, tp_group, "input size")
        self.input_size_per_partition = local_size
        self.input_is_parallel = input_is_parallel
        self.skip_bias_add = skip_bias_add
        self.is_expert = is_expert
        communicates = tp_group.size() > 1 and not is_expert
        self.sequence_parallel = config.sequence_parallel and communicates
        self.sum_group = tp_group if communicates else None
        if self.sequence_parallel and not input_is_parallel:
            raise RuntimeError("to enable `sequence_parallel`, `input_is_parallel` must be `True`")
        info = param_info_for(
            (output_size, input_size), init_method, over=tp_group, dim=1, is_expert=is_expert
        )
        self.weight = new_parameter((output_size, local_size), config.params_dtype, info)
        self.bias: nn.Parameter | None = None
        if bias:
            # Added after the reduction.  With sequence parallelism each rank's gradient covers its
            # own tokens only; the record makes finalize_model_grads all-reduce it over tp.
            info = param_info_for(
                (output_size,), is_expert=is_expert, sequence_parallel=self.sequence_parallel
            )
            self.bias = new_parameter((output_size,), config.params_dtype, info)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiply: [s, b, i/tp] -> [s, b, o], or [s/tp, b, o] with sequence parallelism.

        Also returns the bias with ``skip_bias_add``, otherwise None.
        """
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, self.tp_group)
        if self.tp_group.size() == 1 and not self.skip_bias_add:
            return self._product(input_, self.bias), None
        y = self.summed_product(input_)
        if self.skip_bias_add or self.bias is None:
            return y, self.bias
        return y + self.bias, None

    def summed_product(self, x: Tensor) -> Tensor:
        """Return x W^T, reduced over the ranks; for an expert the dispatcher reduces instead."""
        group = self.sum_group
        call = LinearCall(
            self.weight,
            output_group=group if self.lora is None else None,
            scatters_output=self.sequence_parallel,
            overlap=self.overlap,
        )
        y = linear(x, call, self.quantizer)
        if self.lora is None or group is None:
            return self._adapted(x, y)
        return sum_output(self._adapted(x, y), group, scatters=self.sequence_parallel)


class ReplicatedLinear(Linear):
    """``y = x W^T + b`` with the complete weight on every tensor-parallel rank.

    ``has_partial_gradient``: the ranks have different tokens, so their weight gradients must be
    added; the default is the config's sequence parallelism.
    """

    weight: nn.Parameter

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: LayerConfig,
        init_method: InitMethod,
        bias: bool = False,
        has_partial_gradient: bool | None = None,
    ) -> None:
        super().__init__()
        if has_partial_gradient is None:
            has_partial_gradient = config.sequence_parallel
        info = param_info_for(
            (output_size, input_size), init_method, sequence_parallel=has_partial_gradient
        )
        self.weight = new_parameter(info.global_shape, config.params_dtype, info)
        self.bias: nn.Parameter | None = None
        if bias:
            info = param_info_for((output_size,), sequence_parallel=has_partial_gradient)
            self.bias = new_parameter(info.global_shape, config.params_dtype, info)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Multiply: [.., i] -> [.., o].  No communication.  No bias is left to the caller."""
        return self._product(x, self.bias), None


def check_token_ids(token_ids: Tensor, num_tokens: int, *, may_ignore: bool = False) -> None:
    """Raise DataError unless all ids are in [0, num_tokens); on a GPU the device asserts later.

    With ``may_ignore`` negative ids are allowed: labels without a loss.
    """
    if token_ids.is_meta or token_ids.numel() == 0 or cpu_kernels.is_recording():
        return  # generation, which is recorded, has checked the prompts
    low, high = torch.aminmax(token_ids)
    fits = high < num_tokens if may_ignore else (low >= 0) & (high < num_tokens)
    if device.is_cuda(token_ids.device):
        torch._assert_async(fits, f"a token id is outside the vocabulary of {num_tokens}")
    elif not fits:
        raise DataError(
            f"token ids from {int(low)} to {int(high)} do not fit a vocabulary of {num_tokens}: "
            "the data was made with another tokenizer, or --vocab-size is too small"
        )


class VocabParallelEmbedding(ShardedModule):
    """Word embedding with the vocabulary sharded over ``tp_group``.

    ``num_embeddings`` includes padding rows, ``num_tokens`` (default: all) does not; an id that is
    not below ``num_tokens`` is an error in every layout.

    Collective over ``tp_group``: each rank looks up the ids in its shard, others give zeros, and
    an all-reduce (or reduce-scatter along the sequence) adds the results.
    """

    @library_call()
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        config: LayerConfig,
        init_method: InitMethod,
        tp_group: ProcessGroup,
        num_tokens: int | None = None,
        reduce_scatter_embeddings: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.tp_group = tp_group
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.num_tokens = num_tokens or num_embeddings
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        size = divide_over_group(num_embeddings, tp_group, "padded vocabulary size")
        self.num_embeddings_per_partition = size
        self.vocab_start_index = tp_group.rank() * size
        self.vocab_end_index = self.vocab_start_index + size
        shape = self.num_tokens, embedding_dim
        info = param_info_for(shape, init_method, over=tp_group, is_embedding_or_output=True)
        self.weight = new_parameter((size, embedding_dim), config.params_dtype, info)
        self.is_tied = False  # whether the output layer uses the weight too, by `tied_weight`
        self.lora: Adapter | None = None  # see `Linear`
        self._table: Tensor | None = None

    def tied_weight(self) -> Tensor:
        """Return the weight for the output layer, in the autograd graph of the last lookup.

        Each lookup's graph is used once: a second call returns the plain parameter.  See
        tied_embedding.py.
        """
        table = self._table
        self._table = None
        return self.weight if table is None else table

    def forward(self, input_: Tensor) -> Tensor:
        """Look up ids: [b, s] -> [b, s, h], with ``reduce_scatter_embeddings`` [s/tp, b, h].

        Raises DataError for an id outside the vocabulary (on a GPU a device-side assertion).
        """
        check_token_ids(input_, self.num_tokens)
        if self.tp_group.size() == 1:
            y = self._look_up(input_)
            return y.transpose(0, 1).contiguous() if self.reduce_scatter_embeddings else y
        local_ids = input_ - self.vocab_start_index
        foreign = (local_ids < 0) | (local_ids >= self.num_embeddings_per_partition)
        y = self._look_up(local_ids.masked_fill(foreign, 0))
        y = y.masked_fill(foreign.unsqueeze(-1), 0)
        if self.reduce_scatter_embeddings:
            y = y.transpose(0, 1).contiguous()
            return reduce_scatter_to_sequence_parallel_region(y, self.tp_group)
        return reduce_from_tensor_model_parallel_region(y, self.tp_group)

    def _look_up(self, ids: Tensor) -> Tensor:
        if self.is_tied and takes_table(self.weight):
            y, self._table = look_up(ids, self.weight)
        else:
            y = F.embedding(ids, self.weight)
        return y if self.lora is None else y + self.lora(ids)

    def extra_repr(self) -> str:
        """Return the global sizes and this rank's position, for the printed model."""
        tp = self.tp_group
        return f"{self.num_tokens} of {self.num_embeddings} rows, rank {tp.rank()} of {tp.size()}"
