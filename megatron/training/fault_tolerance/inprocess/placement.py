"""Which worker is which rank in an attempt: pure arithmetic.

A worker is a process that the launcher has started; its number is the RANK that the launcher gave
it.  In an attempt ``active[r]`` is the worker that has rank r; the other workers are reserves.
Survivors keep their rank, so that they find their part of an in-memory checkpoint on their node.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

NODE, RANK = "node", "rank"  # granularity: what leaves after a fault


def first_placement(nodes: Sequence[str], size: int, granularity: str) -> list[int]:
    """Return the active workers of the first attempt: the first ``size`` ones.

    ``nodes``: node of each worker.  Raises ValueError with the reason if that is impossible.
    """
    if not 0 < size <= len(nodes):
        raise ValueError(f"{size} active ranks are requested and {len(nodes)} are started")
    active = list(range(size))
    shared = {nodes[w] for w in active} & {nodes[w] for w in range(size, len(nodes))}
    if granularity == NODE and shared:
        raise ValueError(
            f"{size} active ranks divide a node into active ranks and reserves, but a fault "
            "excludes complete nodes: use --inprocess-granularity rank, or a multiple of the ranks "
            "of a node for --inprocess-active-world-size"
        )
    return active


def next_placement(
    active: Sequence[int],
    nodes: Sequence[str],
    lost: Collection[int],
    doubtful: Collection[int],
    granularity: str,
) -> list[int] | None:
    """Return the active workers of the next attempt, None if too few are left.

    ``lost`` workers are excluded; with granularity node, all workers of their nodes are.
    ``doubtful`` workers have failed and are alive: a reserve takes their place if there is one.
    """
    gone = _spread(lost, nodes, granularity)
    doubted = _spread(doubtful, nodes, granularity)
    everyone = range(len(nodes))
    reserves = [w for w in everyone if w not in active and w not in gone]
    reserves.sort(key=lambda w: w in doubted)  # stable: by number among equals
    after = list(active)
    for needed in (True, False):  # first the places that must be filled
        for unit in _units(active, nodes, granularity):
            workers = {active[place] for place in unit}
            if not workers & gone if needed else workers & gone or not workers & doubted:
                continue
            found = _replacement(unit, active, nodes, reserves, granularity)
            if found is None or (not needed and set(found) & doubted):
                if needed:
                    return None
                continue
            reserves = [w for w in reserves if w not in found]
            for place, worker in zip(unit, found, strict=True):
                after[place] = worker
    return after


def _spread(workers: Collection[int], nodes: Sequence[str], granularity: str) -> set[int]:
    if granularity == RANK:
        return set(workers)
    affected = {nodes[w] for w in workers}
    return {w for w, node in enumerate(nodes) if node in affected}


def _units(active: Sequence[int], nodes: Sequence[str], granularity: str) -> list[list[int]]:
    """Return the places that are replaced together."""
    if granularity == RANK:
        return [[place] for place in range(len(active))]
    by_node: dict[str, list[int]] = {}
    for place, worker in enumerate(active):
        by_node.setdefault(nodes[worker], []).append(place)
    return list(by_node.values())


def _replacement(
    unit: Sequence[int],
    active: Sequence[int],
    nodes: Sequence[str],
    reserves: Sequence[int],
    granularity: str,
) -> list[int] | None:
    """Return reserves for the places of ``unit``: of the same node if possible, or a full node."""
    if granularity == RANK:
        near = [w for w in reserves if nodes[w] == nodes[active[unit[0]]]]
        best = (near or list(reserves))[:1]
        return best or None
    by_node: dict[str, list[int]] = {}
    for worker in reserves:
        by_node.setdefault(nodes[worker], []).append(worker)
    return next((ws[: len(unit)] for ws in by_node.values() if len(ws) >= len(unit)), None)
