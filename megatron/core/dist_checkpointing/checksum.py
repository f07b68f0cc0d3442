"""`crc32`, the checksum of every block: zlib's, by the processor's own instructions where it can.

The package isal computes the same number about ten times as fast as zlib; without it, saving and
loading spend more than half of their processor time on checksums.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

from megatron.core import optional

if optional.available("isal.isal_zlib"):
    crc32: Callable[..., int] = optional.require("isal.isal_zlib", "checkpoints").crc32
else:
    crc32 = zlib.crc32
