"""Base class of modules, and the wrapper that runs a model in bf16 or fp16."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from megatron.core.config.rule import CheckedConfig
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.module_state import ShardedModule
from megatron.core.params.param_init import initialize_parameters
from megatron.core.transformer.transformer_config import TransformerConfig

WithBias = tuple[Tensor, Tensor | None]  # output, and a bias that the caller has to add


class MegatronModule(ShardedModule):
    """Base class of modules that are built from a TransformerConfig."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        if isinstance(config, CheckedConfig):  # a project's module may have none
            config.check()
        self.config = config

    @property
    def model_comm_pgs(self) -> Any:
        """The process groups of a module that has some, by Megatron Core's name for them."""
        return self.pg_collection

    def fill_parameters(self) -> None:
        """Initialize all parameters, which have names, with the seed of the config."""
        config = self.config
        initialize_parameters(self, config.init_seed, random=config.perform_initialization)

    def state_dict_for_save_checkpoint(
        self, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, object]:
        """Return the state dict that a checkpoint saves (Megatron-LM's name for it)."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)


def before_reading(module: nn.Module) -> None:
    """Run the forward pre-hooks of ``module``: call it before reading parameters without forward.

    A data-parallel wrapper all-gathers sharded parameters in these hooks; without them a caller
    would read values of the last step.
    """
    for hook in module._forward_pre_hooks.values():
        hook(module, ())


def is_replaced(module: nn.Module, name: str) -> bool:
    """Whether a project has defined method ``name`` in the module's class, or has assigned it."""
    method = getattr(type(module), name)
    return name in vars(module) or not method.__module__.startswith("megatron.core.")


def is_plain(module: nn.Module) -> bool:
    """Whether calling ``module`` is nothing but its class's forward pass.

    The hooks in which a data-parallel wrapper gathers parameters do not count (`before_reading`).
    """
    if is_replaced(module, "forward") or module._forward_hooks or module._backward_hooks:
        return False
    gathers = ("megatron.core.", "torch.")
    before = module._forward_pre_hooks.values()
    return all(getattr(hook, "__module__", "").startswith(gathers) for hook in before)


def frozen_models(chunks: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the models that run beside those of ``chunks`` and are not trained.

    They are in a tuple ``frozen`` of a module, and are not its submodules.
    """
    for chunk in chunks:
        for module in chunk.modules():
            yield from vars(module).get("frozen", ())


def _convert(value: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``convert`` to the float tensors in nested tuples, lists and dicts.

    `tree_map` visits exactly these types and registered ones; `one` handles their subclasses.
    """

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return convert(leaf) if leaf.is_floating_point() else leaf
        if isinstance(leaf, dict):
            return {key: _convert(v, convert) for key, v in leaf.items()}
        if isinstance(leaf, (tuple, list)):
            return type(leaf)(_convert(v, convert) for v in leaf)
        return leaf

    return tree_map(one, value)


def fp32_to_float16(val: Any, float16_convertor: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``float16_convertor`` to the float32 tensors in nested tuples, lists and dicts."""
    return _convert(val, lambda t: float16_convertor(t) if t.dtype.itemsize == 4 else t)


def float16_to_fp32(val: Any) -> Any:
    """Convert the float tensors in nested tuples, lists and dicts to float32."""
    return _convert(val, lambda t: t.float())


class Float16Module(MegatronModule):
    """Wrapper that converts a model to bf16 or fp16.

    The first pipeline stage casts float32 inputs to that dtype, the last one casts outputs to
    float32.
    """

    def __init__(self, config: TransformerConfig, module: nn.Module) -> None:
        super().__init__(config)
        assert config.fp16 != config.bf16, "exactly one of fp16 and bf16"
        self.dtype = torch.float16 if config.fp16 else torch.bfloat16
        for param in module.parameters():
            param.data = param.data.to(self.dtype)
        self.module = module  # buffers stay float32: updates of an expert bias are too small
        parts = vars(module)
        self.pre_process: bool = parts.get("pre_process", True)
        self.post_process: bool = parts.get("post_process", True)
        self.vp_stage: int | None = parts.get("vp_stage")

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """Set the previous pipeline stage's output as the model's input."""
        self.module.set_input_tensor(input_tensor)  # type: ignore[operator]

    def forward(self, *inputs: object, **kwargs: object) -> object:
        """Run the model; cast inputs on the first stage and outputs on the last."""
        if self.pre_process:
            inputs = fp32_to_float16(inputs, lambda t: t.to(self.dtype))
        outputs = self.module(*inputs, **kwargs)
        return float16_to_fp32(outputs) if self.post_process else outputs

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the wrapped model, without the prefix ``module.``."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the state dict of the wrapped model."""
        return self.module.load_state_dict(*args, **kwargs)

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> ShardedStateDict:
        """Return the entries of the wrapped model, without the prefix ``module.``."""
        found: ShardedStateDict = self.module.sharded_state_dict(prefix, *args, **kwargs)  # type: ignore[operator]
        return found
