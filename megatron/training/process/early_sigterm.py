"""Importing this remembers a SIGTERM from here on, if the command line has --exit-signal-handler.

For the first line of a program: the imports behind it take seconds, and a launcher may want to
stop by then, or may end (`megatron.training.process.launcher_watch`).  Where the flag stands in a
--yaml-cfg file, the handler comes with start-up.
"""

from __future__ import annotations

import gc
import sys

from megatron.training.process.launcher_watch import end_with_launcher
from megatron.training.process.signals import catch_stop_signal

end_with_launcher()
if "--exit-signal-handler" in sys.argv:
    catch_stop_signal()


def begin_imports() -> None:
    """Switch the garbage collector off, for the imports of a program.

    Imports make no garbage, and collections would take a fifth of their time.  A program calls this
    under ``__name__ == "__main__"``: a module that is imported leaves the collector as it is.
    """
    gc.disable()


def end_imports() -> None:
    """Switch the garbage collector on again; it does not look at what was imported until now."""
    gc.freeze()
    gc.enable()
