"""Convert the state of the rerun state machine of a rank to Megatron-LM's form and back.

Megatron-LM saves a dictionary with ``mode`` and ``sharded``, whose objects are of classes of its
module ``megatron.core.rerun_state_machine``.  The state as JSON is saved beside its fields, under
``saved_state``, because it has more of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.config.value_types import JsonObject, StateDict, Unpickled
from megatron.core.dist_checkpointing.megatron_formats.pickler import Named, named

RERUN_SHARDS = "rerun_state_machine_state"  # Megatron-LM's key of the ranks' states in torch_dist
_HOME = "megatron.core.rerun_state_machine"
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
        name: None if injector[name] is None else _object("RerunDiagnostic", injector[name])
        for name in ("error_injection_type", "injected_error_type")
    }
    (message, rank), sequence = ((None, None), None) if suspect is None else suspect["call"]
    caller = None if suspect is None else _object("Caller", message, rank)
    is_pending = saved["state"] == _WILL_RERUN
    result = None if suspect is None else suspect["result"]
    if isinstance(result, list):  # shape and values of a tensor; Megatron-LM's are losses
        result = result[1][0] if len(result[1]) == 1 else None
    return {
        "state": _object("RerunState", saved["state"]),
        "current_iteration": saved["current_iteration"],
        "rerun_requested": is_pending,
        "checkpoint_requested": is_pending,
        "restart_again_requested": False,
        "continue_requested": False,
        "error_injector_checkpoint": {**injector, **kinds},
        "failed_validation_call": None if caller is None else _object("Call", caller, sequence),
        "initial_result": None if result is None else float(result),
        "suspicious_node": None if suspect is None else suspect["place"][1],
        "suspicious_device": None if suspect is None else _number(suspect["place"][2]),
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
        result = sharded["initial_result"]
        result = result.read().double().item() if hasattr(result, "read") else result
        suspect = {
            "call": [list(caller.pickled_args), sequence],
            "result": None if result is None else repr(float(result)),
            "place": [
                caller.pickled_args[1],
                str(sharded["suspicious_node"]),
                str(sharded["suspicious_device"]),
            ],
            "fatal": True,
            "is_shared": False,
            "num_starts": 0,
        }
    injector = sharded["error_injector_checkpoint"]
    return {
        "state": sharded["state"].pickled_args[0],
        "current_iteration": sharded["current_iteration"],
        "suspect": suspect,
        "error_injector_checkpoint": {
            name: value.pickled_args[0] if hasattr(value, "pickled_args") else value
            for name, value in injector.items()
        },
        "large_value_counts": dict(sharded["large_value_counts"]),
        "max_values": dict(sharded["max_values"]),
    }


def _object(name: str, *args: object) -> Named:
    return named(_HOME, name)(args=args)


def _number(device: str) -> int | None:
    return int(device) if device.isdecimal() else None
