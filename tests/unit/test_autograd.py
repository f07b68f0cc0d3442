"""A value per thread that backward passes find."""

from __future__ import annotations

import ctypes
import sys

import pytest
import torch

from megatron.core import autograd
from megatron.core.autograd import ThreadLocal


class _Borrowed:
    """torch 2.11's thread-local state: it releases a reference that it has not taken."""

    def __init__(self) -> None:
        self.address: dict[str, int] = {}

    def stash(self, key: str, value: object) -> None:
        released = self.address.get(key)
        self.address[key] = id(value)
        if released is not None:
            ctypes.pythonapi.Py_DecRef(ctypes.c_void_p(released))


@pytest.mark.parametrize("is_borrowed", [False, True], ids=["of this torch", "of torch 2.11"])
def test_each_value_has_one_reference_while_it_is_set(
    is_borrowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_borrowed:
        monkeypatch.setattr(torch._C, "_stash_obj_in_tls", _Borrowed().stash)
    value = object()
    local = ThreadLocal[object](f"test {is_borrowed}")
    before = sys.getrefcount(value)
    with monkeypatch.context() as patch:
        patch.setattr(
            autograd, "_stash_owns_its_object", autograd._stash_owns_its_object.__wrapped__
        )
        for _ in range(3):
            local.set(value)
            assert sys.getrefcount(value) == before + 1
        local.set(None)
    assert sys.getrefcount(value) == before


def test_a_backward_pass_finds_the_value_of_its_thread() -> None:
    local = ThreadLocal[str]("test backward")
    assert local.get() is None
    local.set("value")
    found = []
    x = torch.ones((), requires_grad=True)
    x.register_hook(lambda grad: found.append(local.get()))
    x.backward()
    local.set(None)
    assert found == ["value"]
    assert local.get() is None
