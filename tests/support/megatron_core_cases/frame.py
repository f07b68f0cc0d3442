"""What the cases share: their register, tiny configurations, inputs and gradients."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

Values = dict[str, Any]
CASES: dict[str, tuple[int, Callable[[], Values]]] = {}  # name -> ranks, function

if not hasattr(moe_utils, "te_general_gemm"):  # NVIDIA's router reads it without the package
    moe_utils.te_general_gemm = None


def case(ranks: int = 1) -> Callable[[Callable[[], Values]], Callable[[], Values]]:
    """Register a case, which runs on each of ``ranks`` processes."""

    def register(function: Callable[[], Values]) -> Callable[[], Values]:
        CASES[function.__name__] = ranks, function
        return function

    return register


def run_cases(rank: int, world_size: int, names: Collection[str] = ()) -> Values:
    """Run the cases of this number of ranks one after the other, in one process per rank."""
    values: Values = {}
    for name, (ranks, function) in CASES.items():
        if ranks == world_size and name in (names or CASES):
            parallel_state.destroy_model_parallel()
            try:
                values[f"{name}.{rank}"] = function()
            except Exception:
                values[f"{name}.{rank}"] = traceback.format_exc()
    return values


def config(**more: Any) -> Any:
    """Return a small configuration."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    off = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cpu_initialization": True}
    kind = MLATransformerConfig if "kv_lora_rank" in more else TransformerConfig
    return kind(**{**sizes, **off, **more})


def start(**sizes: int) -> None:
    """Create the groups and the random number streams."""
    parallel_state.initialize_model_parallel(**sizes)
    tensor_parallel.model_parallel_cuda_manual_seed(123)


def fill(module: torch.nn.Module, seed: int = 1) -> None:
    """Set each parameter to values that depend on its name and shape alone."""
    with torch.no_grad():
        for name, param in module.named_parameters():
            own = random.Random(f"{seed} {name} {tuple(param.shape)}").getrandbits(40)
            noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(own)) * 0.05
            param.copy_(noise + (1 if "norm" in name and name.endswith("weight") else 0))


def tokens(length: int = 16, rows: int = 2, vocab: int = 100) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens [b, s], positions [b, s] and a causal mask [1, 1, s, s]."""
    values = torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(5))
    places = torch.arange(length)[None].expand(rows, -1)
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    return values, places, mask


def noise(*shape: int, seed: int = 7) -> Tensor:
    """Return values that require a gradient."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.requires_grad_()


def with_gradients(function: Callable[..., Any], *inputs: Any) -> Values:
    """Return the output of ``function`` and the gradients of its inputs."""
    output = function(*inputs)
    first = output[0] if isinstance(output, tuple) else output
    weights = torch.linspace(-1, 1, first.numel()).view(first.shape)
    (first.float() * weights).sum().backward()
    grads = {f"gradient {i}": x.grad for i, x in enumerate(inputs) if torch.is_tensor(x)}
    return {"output": output, **{name: grad for name, grad in grads.items() if grad is not None}}


def trained(model: torch.nn.Module, *inputs: Any, **kwargs: Any) -> Values:
    """Fill the model, run it and return its losses and the gradients by name."""
    fill(model)
    loss = model(*inputs, **kwargs)
    loss.mean().backward()
    return {"loss": loss, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def gpt(settings: Any, spec: Any = None, **more: Any) -> Any:
    """Build a GPT of the local layers."""
    spec = spec or get_gpt_layer_local_spec()
    return GPTModel(settings, spec, vocab_size=100, max_sequence_length=64, **more)


def scheduled(chunks: list[Any], microbatches: int) -> Values:
    """Fill the chunks, run the schedule of the layout; return losses and the gradients by name."""
    ids, places, mask = tokens()

    def forward_step(data: Any, chunk: Any) -> Any:
        output = chunk(ids, places, mask, labels=ids.roll(-1, 1), loss_mask=torch.ones(ids.shape))
        return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

    for chunk in chunks:
        fill(chunk)
    reported = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(range(microbatches)) for _ in chunks],
        model=chunks,
        num_microbatches=microbatches,
        seq_length=16,
        micro_batch_size=2,
        forward_only=False,
    )
    named = ((i, n, p.grad) for i, chunk in enumerate(chunks) for n, p in chunk.named_parameters())
    grads = {f"{i} {name}": grad for i, name, grad in named if grad is not None}
    return {"reported": [r["loss"] for r in reported], **grads}
