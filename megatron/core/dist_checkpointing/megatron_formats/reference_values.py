"""Convert values other than tensors to Megatron-LM's form; inverse of `common_values`.

The state of the rerun state machine is not converted: Megatron-LM's has other fields.  It is saved
under a key that Megatron-LM does not read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence

import torch

from megatron.core.config.value_types import JsonObject, StateDict
from megatron.core.dist_checkpointing.manifest import RERUN_STATE, Common
from megatron.core.dist_checkpointing.megatron_formats.optimizer_order import numbered_groups
from megatron.core.dist_checkpointing.plain_values import from_json
from megatron.core.enums import AttnBackend, ModelType

RERUN_STATES = "rerun_states"  # JSON text: a list with the state of each rank
FLOPS = "num_floating_point_operations_so_far"
# Entries of a parameter group that torch's AdamW has and this project does not.
_ADAM_GROUP = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}

# Counters that Megatron-LM stores among its arguments.
COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")


def reference_values(common: Common) -> StateDict:
    """Convert `Contents.common`: command line, counters and scheduler, without the optimizer."""
    counters = common["counters"]
    arguments = json.loads(json.dumps(common["args"]))  # no classes of this project in the pickle
    args = {name: _restored(name, value) for name, value in arguments.items()}
    is_both = args.get("model_kind") == "t5"
    kind = ModelType.encoder_and_decoder if is_both else ModelType.encoder_or_decoder
    args |= {
        **{name: counters[name] for name in COUNTERS},
        "iteration": 0,
        "model_type": kind,
        **dict.fromkeys(("do_train", "do_valid", "do_test"), True),
    }
    values = {
        "args": argparse.Namespace(**args),
        "checkpoint_version": common["checkpoint_version"],
        "iteration": common["iteration"],
    }
    if common.get("opt_param_scheduler") is not None:
        values["opt_param_scheduler"] = dict(common["opt_param_scheduler"])
    return values | {FLOPS: counters[FLOPS]}


def is_half(common: Common) -> bool:
    """Return whether the optimizer has fp32 main parameters for a 16-bit model."""
    return bool(common["args"].get("fp16") or common["args"].get("bf16"))


def is_distributed(common: Common) -> bool:
    """Return whether the optimizer state was sharded over data-parallel ranks."""
    return bool(common["args"].get("use_distributed_optimizer"))


def has_two_optimizers(common: Common) -> bool:
    """Return whether experts have a separate optimizer: with expert parallelism."""
    return int(common["args"].get("expert_model_parallel_size") or 1) > 1


def param_groups(
    common: Common, *, with_step: bool = False, is_expert: bool | None = None
) -> list[StateDict]:
    """Return the parameter groups of the optimizer, without parameters.

    ``is_expert`` selects the groups of the experts' optimizer, or of the other; None is all.
    """
    args = common["args"]
    optimizer = common["optimizer"]
    step = {"step": optimizer["step"]} if with_step else {}
    groups = []
    for ours in optimizer["param_groups"]:
        if is_expert in (None, bool(ours.get("is_expert_parallel"))):
            limits = {"max_lr": args.get("lr"), "min_lr": args.get("min_lr")}
            group = {**limits, **ours, **_ADAM_GROUP, **step}
            if "betas" in group:
                group["betas"] = tuple(group["betas"])
            groups.append(group)
    return groups


def grad_scaler(common: Common) -> StateDict:
    """Return the loss scale as an entry of the optimizer; empty if there is none."""
    state = common["optimizer"].get("grad_scaler")
    if not state:
        return {}
    return {"grad_scaler": {**state, "scale": torch.tensor([state["scale"]], dtype=torch.float32)}}


def numbered_optimizer(
    common: Common,
    params: Sequence[tuple[str, int]],
    kinds: Iterable[str],
    state_of: Callable[[str, str], object],
) -> StateDict:
    """Return the entry of an unsharded optimizer, whose state is stored by parameter number.

    ``params``: name and number of dimensions; ``state_of(kind, name)`` returns the value to store.
    """
    members = numbered_groups(param_groups(common), params, common["args"])
    step = torch.tensor(float(common["optimizer"]["step"]))
    state = {
        number: {"step": step.clone(), **{kind: state_of(kind, name) for kind in sorted(kinds)}}
        for group, names in members
        for number, name in zip(group["params"], names, strict=True)
    }
    inner = {"state": state, "param_groups": [group for group, _ in members]}
    if not is_half(common):
        return inner
    mains = [[state_of("fp32_param", name) for name in names] for _, names in members]
    return {"optimizer": inner, **grad_scaler(common), "fp32_from_fp16_params": mains}


def reference_rng(values: JsonObject) -> StateDict:
    """Convert a rank's random states to Megatron-LM's form."""
    states = from_json(values)
    if states["cuda_rng_state"] is None:
        states["cuda_rng_state"] = states["torch_rng_state"]
    return states


def _restored(name: str, value: object) -> object:
    """Return a value of the command line with the type that its parser produces."""
    if name == "attention_backend" and isinstance(value, str):
        return AttnBackend[value]
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."), value)
    return value


def rerun_entry(rank_states: Iterable[JsonObject]) -> StateDict:
    """Return the states of the rerun state machine of all ranks as one value, if there are any."""
    found = [state.get(RERUN_STATE) for state in rank_states]
    return {RERUN_STATES: json.dumps(found)} if any(found) else {}
