"""The end of the threads of process groups."""

from __future__ import annotations

import atexit
import gc


def end_group_threads_at_exit() -> None:
    """Free destroyed process groups before the interpreter finalizes, which ends gloo's threads.

    Such a thread may hold the last reference to a tensor of the last collective.  If it drops the
    reference after finalization has begun, Python ends the thread inside a C++ destructor, and the
    process aborts: "terminate called without an active exception".  Destroying the groups does not
    free them, because the objects of a run refer to each other.
    """
    atexit.unregister(gc.collect)
    atexit.register(gc.collect)
