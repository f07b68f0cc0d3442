"""Install the SIGTERM handler on import, if the command line has --exit-signal-handler.

A program imports this module on its first line: its other imports take seconds, and during them the
launcher may send SIGTERM or exit (`megatron.training.process.signals`).  If the flag is set
in a --yaml-cfg file, start-up installs the handler later.
"""

from __future__ import annotations

import gc
import sys

from megatron.training.process.signals import catch_stop_signal, end_with_launcher

end_with_launcher()
if "--exit-signal-handler" in sys.argv:
    catch_stop_signal()


def begin_imports() -> None:
    """Switch the garbage collector off during the imports of a program.

    Imports create no garbage, and collections would take a fifth of their time.  Call this only
    under ``__name__ == "__main__"``: an imported module must not change the collector of its
    importer.
    """
    gc.disable()


def end_imports() -> None:
    """Switch the garbage collector on again, and exempt all objects created so far from it."""
    gc.freeze()
    gc.enable()
