"""Measure the two threads of `pass_interleaving`: starting them, and each switch between them.

    python -m benchmarks.pass_interleaving

2026-11-22, 2 cores (AMD EPYC, also busy with other work), torch 2.13: 60 us for a pair of passes,
12 us for each switch.
"""

from __future__ import annotations

import threading
import time

from megatron.core.pipeline_parallel.pass_interleaving import interleave, yield_to_peer

_SWITCHES, _REPEATS = 2000, 40


def microseconds_of_pair(num_switches: int) -> float:
    """Return the best time of two passes that only switch, ``num_switches`` times each."""

    def switch() -> None:
        for _ in range(num_switches):
            yield_to_peer()

    rounds = []
    for _ in range(_REPEATS):
        started_s = time.perf_counter()
        interleave(switch, switch)
        rounds.append(time.perf_counter() - started_s)
    return 1e6 * min(rounds)


def main() -> None:
    alone = microseconds_of_pair(0)
    per_switch = (microseconds_of_pair(_SWITCHES) - alone) / (2 * _SWITCHES)
    print(f"pair of passes: {alone:.0f} us; each switch: {per_switch:.1f} us")
    print(f"threads left: {threading.active_count() - 1}")


if __name__ == "__main__":
    main()
