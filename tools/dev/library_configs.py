"""Compare which configs Megatron Core and this library accept.

    python tools/dev/library_configs.py --theirs FOLDER

Starts from valid configs (dense, experts, each parallelism, recomputation, fp8, ...), gives each
field of v0.14 plausible other values, one at a time, and prints where one library accepts the
config and the other refuses it.  FOLDER contains NVIDIA's ``megatron/`` of the release 0.14.0.
"""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

import torch  # noqa: E402

from tools.dev.lib import emulated_cuda  # noqa: E402

sys.path.remove(str(ROOT))  # the library to judge is in PYTHONPATH

CONFIG = "megatron.core.transformer.transformer_config:TransformerConfig"
REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    TypeError,
    ValueError,
)
DENSE = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8}
MOE = {**DENSE, "num_moe_experts": 4, "add_bias_linear": False}
EP = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall", "bf16": True}
FULL = {"recompute_method": "uniform", "recompute_num_layers": 1}
BASES: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "experts": MOE,
    "tensor": {**DENSE, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {**DENSE, "pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32},
    "context": {**DENSE, "context_parallel_size": 2},
    "expert parallel": {**MOE, **EP},
    "overlap": {**MOE, **EP, "overlap_moe_expert_parallel_comm": True},
    "full": {**DENSE, **FULL, "recompute_granularity": "full"},
    "selective": {**DENSE, "recompute_granularity": "selective"},
    "offloading": {**DENSE, "cpu_offloading": True, "cpu_offloading_num_layers": 1},
    "graphs": {**DENSE, "enable_cuda_graph": True},
    "fp8": {**DENSE, "fp8": "hybrid", "bf16": True},
}
NUMBERS = (0, 1, 2, 3, -1, "x")
VALUES: dict[str, tuple[Any, ...]] = {
    "recompute_modules": (["foo"], ["moe"], ["mlp"], ["moe_act"], ["mla_up_proj"]),
    "recompute_granularity": ("full", "selective", "foo"),
    "cp_comm_type": ("foo", "a2a", "all_gather", ["p2p"] * 4, ["p2p"] * 3),
    "pipeline_model_parallel_layout": ("Et|t|t|tL", "Ett|ttL", "Et|tL", "xx"),
    "moe_layer_freq": (2, 0, [1, 0, 1, 0], [1, 0]),
    "no_rope_freq": (2, 3, [0, 0, 0, 1], [1]),
    "moe_router_load_balancing_type": ("none", "sinkhorn", "foo", ["aux_loss", "seq_aux_loss"]),
    "moe_token_dispatcher_type": ("alltoall", "flex", "foo"),
    "moe_router_score_function": ("sigmoid", "foo"),
    "params_dtype": (torch.bfloat16, "float32"),
    "window_size": ((4, 0), (-2, 0), 3),
    "activation_func": (torch.nn.functional.silu, torch.nn.functional.relu, "gelu"),
}


def results() -> dict[str, str]:
    """Return "base | field = value" -> the refusal of the library in PYTHONPATH, or ""."""
    config_class = pkgutil.resolve_name(CONFIG)
    found = {}
    for name, base in BASES.items():
        for field in config_class.__dataclass_fields__.values():
            is_switch = isinstance(field.default, bool)
            given = (not field.default,) if is_switch else VALUES.get(field.name, NUMBERS)
            for value in given:
                shown = getattr(value, "__name__", value)
                try:
                    config_class(**{**base, field.name: value})
                    refusal = ""
                except REFUSALS as error:
                    refusal = f"{type(error).__name__}: {str(error)[:120]}"
                found[f"{name} | {field.name} = {shown}"] = refusal
    return found


def main() -> None:
    """Judge both libraries, and print the differences by field and reason."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--theirs", type=Path, help="folder that contains NVIDIA's megatron/")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write is not None:
        warnings.simplefilter("ignore")
        emulated_cuda.emulate()
        options.write.write_text(json.dumps(results()))
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "transformer_engine.py").write_text("raise ModuleNotFoundError\n")
        both = []
        for library in (options.theirs, ROOT):
            path = os.pathsep.join([folder, str(library)])
            out = Path(folder, "results.json")
            words = [sys.executable, __file__, "--write", str(out)]
            subprocess.run(words, check=True, cwd=folder, env={**os.environ, "PYTHONPATH": path})
            both.append(json.loads(out.read_text()))
    theirs, ours = both
    different: dict[str, list[str]] = defaultdict(list)
    for case in theirs.keys() & ours.keys():
        if bool(theirs[case]) != bool(ours[case]):
            who = "v0.14 refuses" if theirs[case] else "this library refuses"
            base, _, value = case.partition(" | ")
            different[f"{who} {value}: {theirs[case] or ours[case]}"].append(base)
    for line, bases in sorted(different.items()):
        print(f"{line}  [{', '.join(sorted(bases))}]")
    print(f"{len(theirs)} configs, {len(different)} differences")


if __name__ == "__main__":
    main()
