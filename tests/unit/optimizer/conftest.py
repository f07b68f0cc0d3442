"""Fixtures of this directory."""

from tests.unit.distributed.alone import alone as alone
