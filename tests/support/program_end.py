"""The end of a program that runs inside a process of tests."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn


def status_of(program: Callable[[], object]) -> int:
    """Run ``program``; return its exit status, after the message that Python would print."""
    try:
        program()
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def end(status: int) -> NoReturn:
    """End the process without finalizing Python."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python's end does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
