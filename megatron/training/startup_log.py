"""Log lines that rank 0 prints before training."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import TextWrapper

import torch.distributed as dist
from torch import nn

from megatron.core import device
from megatron.core.distributed.distributed_data_parallel_config import is_fully_sharded
from megatron.core.extensions.transformer_engine import unsupported_matrices_reason
from megatron.core.extensions.transformer_engine import unsupported_reason as why_no_engine
from megatron.core.fusions.kernels import kernel_backend
from megatron.core.parallel.collectives import wait_for_ranks
from megatron.core.tensor_parallel.weight_gradient import adds_to_main_grad
from megatron.core.transformer.attention_backends import attention_report, fallback_warning
from megatron.core.transformer.heterogeneous.heterogeneous_config import NO_OP
from megatron.core.transformer.moe.deep_ep import unsupported_reason
from megatron.core.transformer.moe.experts import Experts
from megatron.training.arguments.flat_values import flat_values
from megatron.training.arguments.parser import GIVEN
from megatron.training.arguments.sections import flags_and_defaults
from megatron.training.config.run import RunConfig
from megatron.training.estimates.theoretical_memory import weight_and_optimizer_bytes
from megatron.training.models.attention_request import attention_request, encoder_attention_request
from megatron.training.models.registry import layers_of, model_kind_of
from megatron.training.process.rank_print import (
    is_rank0,
    is_short,
    print_detail,
    print_flags,
    print_rank_0,
)
from megatron.training.runtime.context import RunContext

_NAME_WIDTH = 48
_WIDTH = 100


def print_settings(config: RunConfig) -> None:
    """Print layout, arguments, and how the model will be computed; in a short log, see
    `print_summary`, only what was asked for.
    """
    if is_short():
        if config.logging.print_args:
            print_arguments(flat_values(config))
        return
    print_layout(config)
    print_arguments(flat_values(config))
    print_attention_backends(config)
    print_fused_operations(config)
    model = config.model
    if model.moe_enable_deepep:
        reason = unsupported_reason(model, device.current())
        answer = "yes" if reason is None else f"no, PyTorch dispatches them: {reason}"
        print_rank_0(f"DeepEP dispatches tokens to experts: {answer}")
    print_low_precision(config)


def print_arguments(values: Mapping[str, object]) -> None:
    """Print all arguments on rank 0, in alphabetical order."""
    lines = [
        "------------------------ arguments ------------------------",
        *argument_lines(values),
        "-------------------- end of arguments ---------------------",
    ]
    print_rank_0("\n".join(lines))


def argument_lines(values: Mapping[str, object]) -> list[str]:
    """Return a line for each argument, in alphabetical order."""
    lines = [f"  {name} {'.' * (_NAME_WIDTH - len(name))} {values[name]}" for name in values]
    return sorted(lines, key=str.lower)


def print_summary(run: RunContext) -> None:
    """In a short log, print a screen about the run on rank 0.

    All arguments go to ``arguments.txt`` in the directory of --save.
    """
    if not (is_short() and is_rank0()):
        return
    config = run.config
    values = flat_values(run.config)
    model = config.model
    training = config.training
    data = config.data
    mebibytes = weight_and_optimizer_bytes(config, run.padded_vocab_size) / 2**20
    ranks = "1 rank" if config.world_size == 1 else f"{config.world_size:,} ranks"
    layout = (
        f"{ranks} on {device.current().type}: tensor "
        f"{model.tensor_model_parallel_size}, pipeline {model.pipeline_model_parallel_size}, "
        f"context {model.context_parallel_size}, data {config.data_parallel_size}"
    )
    samples = "synthetic" if data.mock_data else _shown(data.data_path or data.train_data_path)
    rows = {
        "model": f"{config.language_model.model_kind}, {model.num_layers} layers, hidden size "
        f"{model.hidden_size}, {model.num_attention_heads} heads, {str(model.params_dtype)[6:]}",
        "layout": layout,
        "memory": f"{mebibytes:,.0f} MiB a rank for weights and optimizer",
        "data": f"{samples}, {config.tokenizer.tokenizer_type}, vocabulary of "
        f"{run.padded_vocab_size:,}, sequences of {data.seq_length:,} tokens",
        "steps": f"{run.train_iters:,} of {training.global_batch_size:,} sequences",
        "kernels": kernel_backend(model.params_dtype),
        "flags": _shown(_given(config.asked)),
    }
    for name, text in rows.items():
        words = TextWrapper(_WIDTH, f"{name:9}", " " * 9)
        words.break_on_hyphens = words.break_long_words = False  # to copy flags from it
        print(words.fill(text))
    hint = "--print-args prints all arguments"
    if config.checkpoint.save is not None:
        path = Path(config.checkpoint.save) / "arguments.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(argument_lines(values)) + "\n")
            hint = f"all arguments are in {path}"
        except OSError as error:
            hint = f"WARNING: {path} cannot be written: {error}"
    print(f"{'':9}{hint}", flush=True)


def print_config_file(args: Namespace) -> None:
    """Print on rank 0 what the file of --config sets, except what the command line overrides."""
    values = vars(args)
    given: Mapping[str, bool] = values.get(GIVEN, {})
    words = _given({name: values[name] for name, is_flag in given.items() if not is_flag})
    if words:
        print_flags(values["yaml_cfg"], words)


def _given(asked: Mapping[str, object]) -> list[str]:
    """Return the flags whose values are not their defaults, with the values."""
    words: list[str] = []
    for dest, (flag, default) in flags_and_defaults().items():
        value = asked.get(dest, default)
        if value != default:
            words.append(flag)
            words += [] if isinstance(value, bool) else [_shown(value)]
    return words


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def print_layout(config: RunConfig) -> None:
    """Print the parallel sizes and the dtype of the parameters on rank 0."""
    model = config.model
    print_rank_0(
        f"using world size: {config.world_size}, "
        f"data-parallel size: {config.data_parallel_size}, "
        f"context-parallel size: {model.context_parallel_size}, "
        f"hierarchical context-parallel sizes: {model.hierarchical_context_parallel_sizes}, "
        f"tensor-model-parallel size: {model.tensor_model_parallel_size}, "
        f"pipeline-model-parallel size: {model.pipeline_model_parallel_size}"
    )
    if model.virtual_pipeline_model_parallel_size is not None:
        print_rank_0(
            "Number of virtual stages per pipeline stage: "
            f"{model.virtual_pipeline_model_parallel_size}"
        )
    print_rank_0(f"using {model.params_dtype} for parameters ...")


def print_attention_backends(config: RunConfig) -> None:
    """Print on rank 0 which attention backends may run, and why the others may not."""
    model = config.model
    if all(layer.attention == NO_OP for layer in layers_of(config)):
        return
    kinds = dict.fromkeys(model.cp_comm_types) if model.context_parallel_size > 1 else ("",)
    if _engine_computes(config):
        print_rank_0(
            "attention: Transformer Engine; PyTorch computes calls that it does not support:"
        )
    requests = {f" with {kind}" if kind else "": attention_request(config, kind) for kind in kinds}
    if model_kind_of(config).reads_images:
        requests[" of the image encoder"] = encoder_attention_request(config)
    for which, request in requests.items():
        print_rank_0(f"attention backends{which}:")
        if warning := fallback_warning(model.attention_backend, request):
            print_rank_0(f"WARNING: {warning}")
        for name, reason in attention_report(model.attention_backend, request).items():
            print_rank_0(f"    {name:8} {reason}")


def _engine_computes(config: RunConfig) -> bool:
    return config.model.transformer_impl != "local" and why_no_engine() is None


def print_fused_operations(config: RunConfig) -> None:
    """Print on rank 0 which kernels compute fused operations."""
    model = config.model
    is_adam = config.optimizer.optimizer == "adam"
    backend = kernel_backend(model.params_dtype)
    print_rank_0(f"fused operations: {backend}")
    is_split = backend.startswith("kernels") and model.bf16 and is_adam
    if is_split and not is_fully_sharded(config.ddp):
        print_rank_0("    fp32 main parameters: each bf16 weight and a 16-bit remainder")


def print_gradient_accumulation_fusion(config: RunConfig, chunks: Sequence[nn.Module]) -> None:
    """Print on rank 0 whether GEMMs of weight gradients accumulate into the gradient buffers."""
    if not config.model.gradient_accumulation_fusion:
        return
    params = [p for chunk in chunks for p in chunk.parameters()]
    fused = sum(adds_to_main_grad(p) for p in params)
    answer = f"yes, for {fused} parameters" if fused else "no, this would be slower or impossible"
    print_detail(f"gradient accumulation fused: {answer}")


def print_low_precision(config: RunConfig) -> None:
    """Print on rank 0 whether the device computes fp8 or fp4 matmuls."""
    model = config.model
    if not model.is_quantized:
        return
    dequantized = f"values are dequantized to {model.params_dtype}, at no gain in speed"
    if _engine_computes(config) and unsupported_matrices_reason(model) is None:
        answer = "yes, through Transformer Engine"
    elif model.fp4 is not None or not device.multiplies_fp8(device.current()):
        answer = f"no, {dequantized}"
    elif model.fp8_recipe in ("delayed", "tensorwise"):
        answer = "yes"
    else:
        answer = f"where a block-scaled GEMM takes their sizes, else {dequantized}"
    print_rank_0(f"the device computes matmuls of --{model.format_flag}: {answer}")


def print_expert_waits(chunks: Sequence[nn.Module]) -> None:
    """Warn on rank 0 if the host waits for the GPU in each MoE layer; call it with the model."""
    where = device.current()
    if not device.is_cuda(where):
        return
    modules = [module for chunk in chunks for module in chunk.modules()]
    reasons = {m.wait_reason(where) for m in modules if isinstance(m, Experts)}
    if found := sorted(reason for reason in reasons if reason is not None):
        print_rank_0(
            "WARNING: the host waits in each MoE layer for the number of tokens of each expert: "
            + "; ".join(found)
        )


def print_datetime(label: str) -> None:
    """Print ``label`` and the time on rank 0, after a barrier.  Collective over all ranks."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        wait_for_ranks()
    print_detail(f"[{label}] datetime: {time.strftime('%Y-%m-%d %H:%M:%S')} ")
