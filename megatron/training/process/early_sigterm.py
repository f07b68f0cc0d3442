"""Importing this remembers a SIGTERM from here on, if the command line has --exit-signal-handler.

For the first line of a program: the imports behind it take seconds, and a launcher may want to
stop by then, or may end (`megatron.training.process.launcher_watch`).  Where the flag stands in a
--yaml-cfg file, the handler comes with start-up.

Until `end_of_imports` nobody looks for garbage: imports make none, and looking takes a fifth of
their time.
"""

from __future__ import annotations

import gc
import sys

from megatron.training.process.launcher_watch import end_with_launcher
from megatron.training.process.signals import catch_stop_signal

end_with_launcher()
if "--exit-signal-handler" in sys.argv:
    catch_stop_signal()
_was_enabled = gc.isenabled()
gc.disable()


def end_of_imports() -> None:
    """Look for garbage again, but not among what has been imported."""
    gc.freeze()
    if _was_enabled:
        gc.enable()
