"""Importable because scripts import it; ``--use-legacy-models``, which needs it, is refused."""

import megatron.core as _core  # noqa: F401  (it adds the modules of this package)
