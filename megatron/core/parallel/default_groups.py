"""Process groups that a caller leaves out: those of `parallel_state`.

Code of this repository passes its groups, and the types say so.  Projects that use the library as
they use Megatron Core may leave them out, and pass arguments in Megatron Core's order.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.core.parallel.process_groups_config import ProcessGroupCollection, get_installed
from megatron.core.rank_local import each_rank_owns

F = TypeVar("F", bound=Callable[..., Any])

# Name of a parameter -> the group that it stands for; a collection has all groups.
_GROUPS = {
    "pg_collection": "",
    "groups": "",
    "group": "tp",
    "tp_group": "tp",
    "cp_group": "cp",
    "pp_group": "pp",
    "dp_group": "dp",
}
_FORMER_NAMES = {
    "model_comm_pgs": "pg_collection",
    "grad_comm_pgs": "pg_collection",
    "inference_params": "inference_context",
}

_is_building_model = False
each_rank_owns(__name__, "_is_building_model")


def is_building_model() -> bool:
    """Return whether the constructor of a model runs that will initialize all its parameters."""
    return _is_building_model


@contextlib.contextmanager
def _building_model() -> Iterator[None]:
    global _is_building_model
    before = _is_building_model
    _is_building_model = True
    try:
        yield
    finally:
        _is_building_model = before


def default_groups() -> ProcessGroupCollection:
    """Return the installed groups; in a process without torch.distributed, this process alone.

    Raises AssertionError if torch.distributed is initialized and model parallelism is not.
    """
    if get_installed() is None and not dist.is_initialized():
        return ProcessGroupCollection()
    return ProcessGroupCollection.use_mpu_process_groups()


def library_call(
    order: str = "", *, unused: str = "", like: Callable[..., Any] | None = None
) -> Callable[[F], F]:
    """Return a decorator that lets a function or constructor be called as Megatron Core's.

    Process groups may be left out, or be None; `_FORMER_NAMES` are accepted.  ``order``: names of
    the positional arguments in Megatron Core's order, without ``self``, if this function takes
    fewer of them; "..." stands for those that it takes.  ``unused``: arguments of Megatron Core
    that have no counterpart here; they are accepted and have no effect.  In the constructor of a
    model with ``finalize_parameters``, `is_building_model` is true.  ``like``: the function that
    takes the keyword arguments which this one passes on, to show them in the signature.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        if like is not None:
            signature = _with_arguments_of(like, signature)
        is_method = own[:1] == ["self"]
        given = order.replace("...", " ".join(own[is_method:])).split()
        names = [*own[:is_method], *given] if order else own
        known = frozenset(signature.parameters)
        ignored = frozenset(unused.split()) - known
        is_constructor = function.__name__ == "__init__"
        places = {name: own.index(name) if name in own else 99 for name in known & _GROUPS.keys()}

        def translate(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
            """Turn a call in Megatron Core's form into one of ``function``'s."""
            kwargs |= dict(zip(names[len(own) :], args[len(own) :], strict=False))
            for former, name in _FORMER_NAMES.items():
                if former in kwargs and name in known:
                    kwargs[name] = _joined(kwargs.get(name), kwargs.pop(former))
            for name in ignored & kwargs.keys():
                del kwargs[name]
            return args[: len(own)] if len(args) <= len(names) else args

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > len(own) or not known >= kwargs.keys():
                args = translate(args, kwargs)
            for name, place in places.items():
                if place >= len(args):
                    if kwargs.get(name) is None:
                        kwargs[name] = _default(name, kwargs)
                elif args[place] is None:
                    args = *args[:place], _default(name, kwargs), *args[place + 1 :]
            if is_constructor and hasattr(args[0], "finalize_parameters"):
                with _building_model():
                    return function(*args, **kwargs)
            return function(*args, **kwargs)

        vars(call)["__signature__"] = _library_signature(signature, names, ignored)
        return call  # type: ignore[return-value]

    return decorate


def _joined(first: Any, second: Any) -> Any:
    """Return the second value, or the first if it is None; of two collections all groups.

    Megatron Core had one collection for the model and one for gradients.
    """
    if isinstance(first, ProcessGroupCollection) and isinstance(second, ProcessGroupCollection):
        return ProcessGroupCollection(**{**vars(second), **vars(first)})
    return first if second is None else second


def _default(name: str, kwargs: dict[str, Any]) -> Any:
    """Return the group that parameter ``name`` gets if it is left out."""
    axis = "expt_tp" if kwargs.get("is_expert") and _GROUPS[name] == "tp" else _GROUPS[name]
    return getattr(default_groups(), axis) if axis else default_groups()


def _with_arguments_of(like: Callable[..., Any], own: inspect.Signature) -> inspect.Signature:
    """Return ``own`` with the arguments of ``like`` that have defaults, as keywords."""
    parameters = {
        p.name: p.replace(kind=p.KEYWORD_ONLY)
        for p in inspect.signature(like).parameters.values()
        if p.default is not p.empty and p.name not in (*_FORMER_NAMES, *_GROUPS)
    }
    parameters |= own.parameters
    return own.replace(parameters=sorted(parameters.values(), key=lambda p: p.kind))


def _library_signature(
    own: inspect.Signature, names: Sequence[str], ignored: Iterable[str]
) -> inspect.Signature:
    """Return the signature of the calls that are accepted: ``names`` are positional."""
    none = partial(inspect.Parameter, default=None)
    parameters = dict(own.parameters)
    more = [*ignored, *(n for n in _FORMER_NAMES if _FORMER_NAMES[n] in parameters)]
    for name in (*more, *(_GROUPS.keys() & parameters.keys())):
        parameters[name] = none(name, inspect.Parameter.KEYWORD_ONLY)
    has_default = False
    first = []
    for name in names:
        parameter = parameters.pop(name, None) or none(name, inspect.Parameter.KEYWORD_ONLY)
        parameter = parameter.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
        has_default |= parameter.default is not parameter.empty
        first.append(
            parameter.replace(default=None)
            if has_default and parameter.default is parameter.empty
            else parameter
        )
    rest = sorted(parameters.values(), key=lambda p: p.kind)
    return own.replace(parameters=[*first, *rest])
