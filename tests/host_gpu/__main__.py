"""Run a script, or pytest, where a GPU of the host is found: see the package."""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import threading
import traceback
from pathlib import Path

from tests import host_gpu


def main() -> None:
    """The script in this process; pytest's ranks in theirs."""
    script, *arguments = sys.argv[1:]
    os.environ[host_gpu.ASKED] = str(host_gpu.build(Path("build/host_gpu").resolve()))
    if script == "pytest":
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])
    host_gpu.load()
    sys.argv = [script, *arguments]
    _end(_status_of(script))


def _status_of(script: str) -> int:
    """Run the script; return its exit status."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(status: int) -> None:
    """End the process without finalizing Python.

    Autograd's thread of the device may free the last backward pass at any time; objects of Python
    in it need the interpreter, and abort a process that has finalized it.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python's end does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


main()
