"""Fixtures of this directory."""

from tests.support.one_rank_training import alone as alone
