"""Count what a training step asks of a GPU, on the device that stands for one.

    [TRITON_INTERPRET=1] python -m tests.support.host_gpu.counting pretrain_gpt.py \\
        --device cuda FLAGS

Prints, for the step before the last: kernels (operations of torch that compute, and launches of
Triton), the bytes that they read and write if nothing stays in a cache, and how often the host
waits.
The operations with the most bytes follow, then what waits.  An operation of torch is one kernel
here; on a GPU a few need more, and what NCCL does is left out.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from tests.support import host_gpu

_SHOWN = 25  # operations
_NO_KERNEL = ("empty", "_local_scalar_dense", "detach", "alias", "resize_", "set_", "_unsafe_view")


class _Step:
    """The counts of one step."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.waits = 0
        self.waiting: Counter[str] = Counter()  # by the function of this project that waits

    def note(self, name: str, tensors: list[Any]) -> None:
        """Count a kernel that touches ``tensors``, each once."""
        device = {id(t): t for t in tensors if t.is_cuda}
        if device:
            self.calls[name] += 1
            self.bytes[name] += sum(t.numel() * t.element_size() for t in device.values())

    def report(self) -> str:
        """Return the table."""
        total = f"{sum(self.calls.values())} kernels, {sum(self.bytes.values()):,} bytes"
        rows = [f"{total}, {self.waits} waits of the host", "", "| kernel | calls | bytes |"]
        rows.append("|---|---|---|")
        for name, count in self.bytes.most_common(_SHOWN):
            rows.append(f"| {name} | {self.calls[name]} | {count:,} |")
        rows += [f"the host waits {n} times in {place}" for place, n in self.waiting.items()]
        return "\n".join(rows)


def main() -> None:
    """Run the script and print the counts of a step."""
    script, *arguments = sys.argv[1:]
    os.environ[host_gpu.ASKED] = str(host_gpu.build(Path("build/host_gpu").resolve()))
    host_gpu.load()
    sys.argv = [script, *arguments]
    steps = _watch()
    runpy.run_path(script, run_name="__main__")
    print(steps[-2].report() if len(steps) > 1 else "give two --train-iters or more")


def _caller() -> str:
    """Return the innermost function of this project on the stack."""
    frames = [frame for frame in traceback.extract_stack() if "/megatron/" in frame.filename]
    own = [frame for frame in frames if not frame.filename.endswith("async_host_copy.py")]
    return f"{Path(own[-1].filename).name}:{own[-1].name}" if own else "another library"


def _watch() -> list[_Step]:
    """Count every step of the training loop from now on."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
    from torch.utils._pytree import tree_leaves

    from megatron.core import device
    from tests.support.host_gpu import torch_cuda

    loop: Any = importlib.import_module("megatron.training.step.train_step")
    steps: list[_Step] = []

    def tensors_in(*found: Any) -> list[Tensor]:
        return [x for x in tree_leaves(found) if isinstance(x, Tensor)]

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> object:
            before = torch_cuda.waits()
            out = func(*args, **(kwargs or {}))
            if torch_cuda.waits() > before:
                steps[-1].waiting[_caller()] += torch_cuda.waits() - before
            name = func._schema.name.removeprefix("aten::")
            computes = not func.is_view and not name.startswith(_NO_KERNEL)
            if computes and "empty" not in name and not name.startswith("c10d"):
                steps[-1].note(name, tensors_in(args, kwargs, out))
            return out

    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreter: Any = importlib.import_module("triton.runtime.interpreter")
        launch = interpreter.GridExecutor.__call__

        adam: Any = importlib.import_module("megatron.core.fusions.triton.adam")
        update = adam._launch

        def update_counted(updated: Any, *given: Any) -> None:
            steps[-1].note("Triton _update", tensors_in(updated))  # a table has their addresses
            update(updated, *given)

        adam._launch = update_counted

        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            if steps and self.fn.__name__ != adam._update.fn.__name__:
                steps[-1].note(f"Triton {self.fn.__name__}", tensors_in(args, kwargs))
            before = torch_cuda.waits()
            with _disable_current_modes():
                done = launch(self, *args, **kwargs)
            if steps:  # the interpreter copies the tensors to the host and back
                steps[-1].waits -= torch_cuda.waits() - before
            return done

        interpreter.GridExecutor.__call__ = counted
    wait_for = device.wait_for

    def waits_for(event: Any) -> None:
        before = torch_cuda.waits()
        wait_for(event)
        if steps and torch_cuda.waits() > before:
            steps[-1].waiting[_caller()] += 1

    device.wait_for = waits_for
    train_step = loop.train_step

    def step(run: Any) -> Any:
        steps.append(_Step())
        before = torch_cuda.waits()
        with Operations():
            done = train_step(run)
        steps[-1].waits += torch_cuda.waits() - before
        return done

    loop.train_step = step
    return steps


if __name__ == "__main__":
    main()
