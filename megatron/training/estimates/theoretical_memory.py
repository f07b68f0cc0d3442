"""Memory of parameters, optimizer and activations, estimated from the configuration alone.

The log lines call MiB MB, as in Megatron-LM.  Activations follow "Reducing Activation Recomputation
in Large Transformer Models" (arXiv 2205.05198), for 16-bit values; they are reported where its
formula holds: sequence parallelism with selective recomputation, and no encoder of images.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megatron.core import device
from megatron.core.optimizer.mixed_precision import stores_remainders
from megatron.core.optimizer.reduced_precision_state import dtype_of
from megatron.training.config.run import RunConfig
from megatron.training.estimates.parameters import (
    adapter_parameters,
    encoder_parameters,
    head_parameters,
    layer_parameters,
    projector_parameters,
)
from megatron.training.models.registry import model_kind_of

_MIB = 2**20
_BYTES_STORED = {"fp8": 1, "int8": 1, "nvfp4": 0.5625}  # of --lora-base-dtype, scales included


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters of the complete model, and of the rank that holds most of them."""

    layers: int  # without adapters
    embeddings: int  # input and, if untied, output
    images: int  # encoder of images and projector
    most_loaded_shard: float
    trained_of_shard: float  # without frozen parameters


def count_parameters(config: RunConfig, padded_vocab_size: int) -> ParameterCount:
    """Return the number of parameters by formula, without learned position embeddings."""
    model = config.model.changed(tensor_model_parallel_size=1, expert_tensor_parallel_size=1)
    of_rank = replace(config, model=model)
    whole = replace(of_rank, model=model.changed(expert_model_parallel_size=1))
    has_text = not model_kind_of(config).classifies_images
    embedding = config.model.hidden_size * padded_vocab_size * has_text
    num_embeddings = 2 if config.language_model.untie_embeddings_and_output_weights else 1
    pp, tp = config.model.pipeline_model_parallel_size, config.model.tensor_model_parallel_size
    on_first_stage = embedding * (num_embeddings if pp == 1 else 1)
    rest = head_parameters(whole, padded_vocab_size)
    language = ((layer_parameters(of_rank) + rest) / pp + on_first_stage) / tp
    encoder = encoder_parameters(config)
    projector = projector_parameters(config)
    adapters = adapter_parameters(config, padded_vocab_size) / pp / tp  # or a little more
    trained = projector + language * (not config.vision.freeze_LM)
    if config.adapters.lora is not None:
        trained = adapters
    return ParameterCount(
        layers=layer_parameters(whole) + rest,
        embeddings=num_embeddings * embedding,
        images=encoder_parameters(whole) + projector_parameters(whole),
        most_loaded_shard=language + encoder + projector + adapters,
        trained_of_shard=trained + encoder * (not config.vision.freeze_ViT),
    )


def weight_and_optimizer_bytes(config: RunConfig, padded_vocab_size: int) -> float:
    """Return the bytes of weights, gradients and optimizer state on the most loaded rank.

    Per parameter these are the 16-bit weight and, unless it is frozen, the gradient, the main
    parameter and two moments.  The distributed optimizer shards the last three over the
    data-parallel ranks.  With --use-precision-aware-optimizer, and with a fused Adam kernel for
    this device, the main parameter is stored as a 16-bit remainder.
    """
    o = config.optimizer
    dtype = torch.bfloat16 if config.model.bf16 else torch.float16
    main = 2 if stores_remainders(o, torch.empty(0, dtype=dtype, device=device.current())) else 4
    state = main + dtype_of(o.exp_avg_dtype).itemsize + dtype_of(o.exp_avg_sq_dtype).itemsize
    shares = config.data_parallel_size if o.use_distributed_optimizer else 1
    count = count_parameters(config, padded_vocab_size)
    per_trained = dtype_of(o.main_grads_dtype).itemsize + state / shares
    frozen = count.most_loaded_shard - count.trained_of_shard
    per_frozen = _BYTES_STORED.get(config.adapters.lora_base_dtype or "", 2)
    return per_frozen * frozen + (2 + per_trained) * count.trained_of_shard


def activation_bytes(config: RunConfig, padded_vocab_size: int, num_microbatches: int) -> float:
    """Return the bytes of activations on the first stage, for sequence parallelism and 1F1B."""
    model, training = config.model, config.training
    length = config.data.seq_length // model.context_parallel_size
    tokens = length * training.micro_batch_size
    pp = model.pipeline_model_parallel_size
    vp = model.virtual_pipeline_model_parallel_size
    wide = tokens * model.hidden_size
    layers = wide * model.num_layers * (18 + 4 * model.ffn_hidden_size / model.hidden_size)
    # ids and positions (8 bytes each) and the dropout mask of each micro-batch in flight
    total = layers + 8 * tokens * pp + wide * pp
    if vp is not None:
        total *= 1 + (pp - 1) / (pp * vp)
    elif pp > 1:
        total *= min(1.0, num_microbatches / pp)
    # The output layer: its input and fp32 logits.
    if pp == 1 and not model_kind_of(config).classifies_images:
        total += wide * 4 * (1 + padded_vocab_size / model.hidden_size)
    return total / model.tensor_model_parallel_size


def memory_lines(
    config: RunConfig, padded_vocab_size: int, num_microbatches: int, verbose: bool = False
) -> list[str]:
    """Return the lines that `print_memory` prints."""
    count = count_parameters(config, padded_vocab_size)
    lines = []
    if verbose:
        total = count.layers + count.embeddings + count.images
        encoder = f"Number of parameters in image encoder in billions: {count.images / 1e9:.2f}"
        lines = [
            f"Number of parameters in transformer layers in billions: {count.layers / 1e9: .2f}",
            f"Number of parameters in embedding layers in billions: {count.embeddings / 1e9:.2f}",
            *([encoder] if count.images else []),
            f"Total number of parameters in billions: {total / 1e9:.2f}",
            "Number of parameters in most loaded shard in billions: "
            f"{count.most_loaded_shard / 1e9:.4f}",
        ]
    weights = weight_and_optimizer_bytes(config, padded_vocab_size) / _MIB
    text = f"Theoretical memory footprints: weight and optimizer={weights:.2f} MB"
    model = config.model
    is_selective = model.sequence_parallel and model.recompute_granularity == "selective"
    if is_selective and not model_kind_of(config).reads_images:
        activations = activation_bytes(config, padded_vocab_size, num_microbatches) / _MIB
        text += f", activation={activations:.2f} MB, total={weights + activations:.2f} MB"
    return [*lines, text]


def print_memory(
    config: RunConfig, padded_vocab_size: int, num_microbatches: int = 1, verbose: bool = False
) -> None:
    """Print the estimate on this rank."""
    print("\n".join(memory_lines(config, padded_vocab_size, num_microbatches, verbose)), flush=True)
