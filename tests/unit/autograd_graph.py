"""What autograd knows of a result."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def parameters_of_graph(y: Tensor) -> set[nn.Parameter]:
    """Return the parameters that the backward pass of ``y`` visits."""
    found: set[nn.Parameter] = set()
    seen: set[Any] = set()
    left: list[Any] = [y.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [next_node for next_node, _ in node.next_functions]
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            found.add(variable)
    return found
