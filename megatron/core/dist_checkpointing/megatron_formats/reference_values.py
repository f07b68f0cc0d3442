"""Convert values other than tensors to Megatron-LM's form; inverse of `common_values`.

Of the rerun state machine Megatron-LM saves a dictionary with ``mode`` and ``sharded``, whose
objects are of classes of its module ``megatron.core.rerun_state_machine``.  The state as JSON is
saved beside its fields, under ``saved_state``, because it has more of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from megatron.core.config.value_types import JsonObject, StateDict, Unpickled
from megatron.core.dist_checkpointing.manifest import Common
from megatron.core.dist_checkpointing.megatron_formats.archive import Named, named
from megatron.core.dist_checkpointing.megatron_formats.optimizer_order import numbered_groups
from megatron.core.dist_checkpointing.plain_values import from_json
from megatron.core.enums import AttnBackend, ModelType

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
        "model_type": named("megatron.core.enums", "ModelType")(kind.value),
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
        backend = AttnBackend[value].value
        return named("megatron.core.transformer.enums", "AttnBackend")(backend)
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."), value)
    return value


RERUN_SHARDS = "rerun_state_machine_state"  # Megatron-LM's key of the ranks' states in torch_dist
RANKS = "ranks"  # global rank -> its state as JSON, in the files of torch, which ranks share
_SAVED = "saved_state"
_WILL_RERUN = 3


def reference_mode() -> StateDict:
    """Return the part of the state that all ranks share."""
    return {"mode": _object("RerunMode", "validate_results")}


def reference_rerun(saved: JsonObject) -> StateDict:
    """Convert the state of a rank to the dictionary ``sharded`` of Megatron-LM."""
    suspect = saved["suspect"]
    injector = saved["error_injector_checkpoint"]
    kinds = {
        name: injector[name] and _object("RerunDiagnostic", injector[name])
        for name in ("error_injection_type", "injected_error_type")
    }
    call = result = node = number = None
    if suspect is not None:
        (message, rank), sequence = suspect["call"]
        call = _object("Call", _object("Caller", message, rank), sequence)
        _, node, device = suspect["place"]
        number = int(device) if device.isdecimal() else None
        result = suspect["result"]
        if isinstance(result, list):  # shape and values of a tensor; Megatron-LM's are losses
            result = result[1][0] if len(result[1]) == 1 else None
    is_pending = saved["state"] == _WILL_RERUN
    return {
        "state": _object("RerunState", saved["state"]),
        "current_iteration": saved["current_iteration"],
        "rerun_requested": is_pending,
        "checkpoint_requested": is_pending,
        "restart_again_requested": False,
        "continue_requested": False,
        "error_injector_checkpoint": {**injector, **kinds},
        "failed_validation_call": call,
        "initial_result": None if result is None else float(result),
        "suspicious_node": node,
        "suspicious_device": number,
        "data_iterator_checkpoints": None,
        "large_value_counts": saved["large_value_counts"],
        "max_values": saved["max_values"],
        _SAVED: saved,
    }


def rerun_state_of(sharded: Mapping[str, Unpickled]) -> JsonObject:
    """Return the state of a rank as JSON from the dictionary ``sharded`` of Megatron-LM."""
    if _SAVED in sharded:
        own: JsonObject = sharded[_SAVED]
        return own
    call = sharded["failed_validation_call"]
    suspect = None
    if call is not None:
        caller, sequence = call.pickled_args
        message, rank = caller.pickled_args
        result = sharded["initial_result"]
        result = result.read().double().item() if hasattr(result, "read") else result
        device = str(sharded["suspicious_device"])
        suspect = {
            "call": [[message, rank], sequence],
            "result": None if result is None else repr(float(result)),
            "place": [rank, str(sharded["suspicious_node"]), device],
            "fatal": True,
            "is_shared": False,
            "num_starts": 0,
        }
    return {
        "state": sharded["state"].pickled_args[0],
        "current_iteration": sharded["current_iteration"],
        "suspect": suspect,
        "error_injector_checkpoint": {
            name: value.pickled_args[0] if hasattr(value, "pickled_args") else value
            for name, value in sharded["error_injector_checkpoint"].items()
        },
        "large_value_counts": dict(sharded["large_value_counts"]),
        "max_values": dict(sharded["max_values"]),
    }


def _object(name: str, *args: object) -> Named:
    return named("megatron.core.rerun_state_machine", name)(*args)
