"""Ranges of the integers in a Triton kernel's TTIR, for the sizes of one launch.

Triton gives integer arguments below 2^31, program ids and ranges 32 bits, and wraps silently.
`overflows` follows the ranges of values from the grid and the arguments to the addresses, and
returns the 32-bit sums and products that do not fit.  The range of a loaded integer is unknown, and
so is that of what is computed from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

Range = tuple[int, int] | None  # None: unknown

_LINE = re.compile(r"^\s*(?:(%[\w$.\-]+)(?::\d+)?(?:, %[\w$.\-]+)* = )?([\w.]+)(.*)$")
_NAME = re.compile(r"%[\w$.\-]+")
_SAME = {"extsi", "extui", "index_cast", "splat", "broadcast", "expand_dims", "reshape", "trans"}


def overflows(ttir: str, numbers: Mapping[str, int], grid: Sequence[int]) -> list[str]:
    """Return the operations of addresses that exceed 32 bits, with the range of their results."""
    ranges = _Ranges(numbers, grid)
    for line in ttir.splitlines():
        ranges.read(re.sub(r" loc\(.*$", "", line))
    return ranges.too_wide()


class _Ranges:
    def __init__(self, numbers: Mapping[str, int], grid: Sequence[int]) -> None:
        self._grid = (*grid, 1, 1)[:3]
        self._known: dict[str, Range] = {f"%{n}": (v, v) for n, v in numbers.items()}
        self._from: dict[str, list[str]] = {}
        self._narrow: dict[str, str] = {}  # sums and products in 32 bits
        self._offsets: set[str] = set()

    def read(self, line: str) -> None:
        match = _LINE.match(line)
        if match is None or match[1] is None and match[2] != "scf.for":
            return
        name, operation, rest = match.groups()
        if operation == "scf.for":
            self._loop(rest)
            return
        expression, _, kind = rest.rpartition(" : ")
        given = _NAME.findall(expression)
        if operation == "tt.addptr":
            self._offsets.add(given[1])
            return
        short = operation.rpartition(".")[2]
        self._from[name] = [] if short == "load" else given
        self._known[name] = self._range(short, expression, rest, given)
        if short in ("addi", "subi", "muli") and re.search(r"(^|x|\s)i32\b", kind):
            self._narrow[name] = line.strip()

    def too_wide(self) -> list[str]:
        reached: set[str] = set()
        left = list(self._offsets)
        while left:
            name = left.pop()
            if name not in reached:
                reached.add(name)
                left += self._from.get(name, [])
        found = []
        for name in sorted(reached & self._narrow.keys()):
            low, high = self._known[name] or (0, 0)
            if low < -(2**31) or high >= 2**31:
                found.append(f"{self._narrow[name]}: {low} to {high}")
        return found

    def _loop(self, rest: str) -> None:
        bounds = re.search(r"(%[\w$.\-]+) = (%[\w$.\-]+) to (%[\w$.\-]+)", rest)
        assert bounds is not None, rest
        number, first, stop = bounds.groups()
        low = self._known.get(first)
        high = self._known.get(stop)
        self._from[number] = [first, stop]
        self._known[number] = (low[0], max(low[0], high[1] - 1)) if low and high else None

    def _range(self, operation: str, expression: str, rest: str, given: list[str]) -> Range:
        ranges = [self._known.get(name) for name in given]
        if operation == "constant":
            value = re.search(r"^ (?:dense<)?(-?\d+)>? : .*i\d+>?$", rest)
            return (int(value[1]), int(value[1])) if value else None
        if operation == "make_range":
            ends = dict(re.findall(r"(start|end) = (\d+)", rest))
            return int(ends["start"]), int(ends["end"]) - 1
        if operation in ("get_program_id", "get_num_programs"):
            count = self._grid["xyz".index(expression.strip()[0])]
            return (0, count - 1) if operation == "get_program_id" else (count, count)
        if operation in _SAME:
            return ranges[0]
        if operation == "select":
            return _union(ranges[1], ranges[2])
        if operation == "remsi" and ranges[1] is not None:  # offsets are not negative
            return 0, ranges[1][1] - 1
        compute = _OPERATIONS.get(operation)
        if compute is None or len(ranges) != 2 or None in ranges:
            return None
        return _corners(compute, *ranges)


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "addi": lambda a, b: a + b,
    "subi": lambda a, b: a - b,
    "muli": lambda a, b: a * b,
    "divsi": lambda a, b: a // max(b, 1),
    "minsi": min,
    "maxsi": max,
}


def _corners(compute: Callable[[int, int], int], a: Range, b: Range) -> Range:
    """Return the range of a function that is monotonic in each argument."""
    assert a is not None
    assert b is not None
    values = [compute(x, y) for x in a for y in b]
    return min(values), max(values)


def _union(a: Range, b: Range) -> Range:
    if a is None or b is None:
        return None
    return min(a[0], b[0]), max(a[1], b[1])
