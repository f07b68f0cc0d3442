"""Run the cases of the judge on either library: python library_cases.py OUTPUT [CASE ...].

`tools/dev/library_judge.py` starts it with the library, and tests/support/megatron_core_cases as
`cases`, on the path.  Each rank writes a file with the values of its cases.
"""

from __future__ import annotations

import os
import sys
import warnings
from datetime import timedelta
from typing import Any

import emulated_cuda  # beside this file
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

warnings.filterwarnings("ignore")
emulated_cuda.emulate()  # before NVIDIA's modules bind functions of torch
from cases import CASES, run_cases  # noqa: E402


def main(folder: str, names: list[str]) -> None:
    """Run the cases, in as many processes as each wants."""
    for ranks in sorted({CASES[name][0] for name in names or CASES}):
        mp.spawn(run_rank, (ranks, names, folder), nprocs=ranks)


def run_rank(rank: int, world_size: int, names: list[str], folder: str) -> None:
    """Run the cases of this number of ranks, and write their values."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/{world_size}.store", world_size)
    limit = timedelta(seconds=60)  # a rank that fails leaves the others in a collective
    dist.init_process_group("gloo", None, limit, world_size, rank, store)
    torch.save(_detached(run_cases(rank, world_size, names)), f"{folder}/{world_size}.{rank}.pt")
    dist.barrier()
    os._exit(0)


def _detached(value: Any) -> Any:
    """Return values without the attributes of parameters."""
    if torch.is_tensor(value):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _detached(entry) for key, entry in value.items()}
    return [*map(_detached, value)] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
