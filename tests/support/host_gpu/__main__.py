"""Run a script, or pytest, where a GPU of the host is found: see the package."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from tests.support import host_gpu
from tests.support.program_end import end, status_of


def main() -> None:
    """The script in this process; pytest's ranks in theirs."""
    script, *arguments = sys.argv[1:]
    os.environ[host_gpu.ASKED] = str(host_gpu.build(Path("build/host_gpu").resolve()))
    if script == "pytest":
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])
    host_gpu.load()
    sys.argv = [script, *arguments]
    # Autograd's thread of the device may free the last backward pass at any time; objects of Python
    # in it need the interpreter, and abort a process that has finalized it.
    end(status_of(lambda: runpy.run_path(script, run_name="__main__")))


main()
