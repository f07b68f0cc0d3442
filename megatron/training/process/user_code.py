"""Import modules and classes of user code that a flag names."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import TypeVar

from megatron.core.config.errors import ConfigError

IMPORT_FLAG = "--import-module"
T = TypeVar("T")


def import_user_module(name: str, flag: str) -> ModuleType:
    """Import module ``name`` from PYTHONPATH or the working directory.

    Raises ConfigError that names ``flag`` if the module is missing or its import raises.
    """
    # The working directory comes last, so that none of its files hides an installed package.  It
    # stays in sys.path, because user modules may import each other later.
    if not {"", os.getcwd()} & {*sys.path}:
        sys.path.append(os.getcwd())
    return _import(name, flag, lambda: importlib.import_module(name))


def import_user_file(path: str, flag: str) -> ModuleType:
    """Import the Python file ``path``, whose folder joins the import path.

    Raises ConfigError that names ``flag`` if the file is missing or its import raises.
    """
    if not os.path.isfile(path):
        raise ConfigError(f"{flag} {path}: no such file; correct the path")
    name = os.path.abspath(path)  # not its stem, which an installed package may have
    if name in sys.modules:
        return sys.modules[name]
    if os.path.dirname(name) not in sys.path:
        sys.path.append(os.path.dirname(name))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "the name ends in .py"
    loader = spec.loader
    assert loader is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses in the file look their module up
    _import(path, flag, lambda: loader.exec_module(module))
    return module


def _import(name: str, flag: str, load: Callable[[], T]) -> T:
    try:
        return load()
    except (Exception, SystemExit) as error:  # whatever the code of the module raises
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{flag} {name}: {error}; put the folder that contains it into PYTHONPATH, or "
                "start the run in that folder"
            ) from None
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{flag} {name}: importing it raises {type(error).__name__} at {at.filename}:"
            f"{at.lineno}: {error}; correct the module"
        ) from error


def problems_of_imports(names: Iterable[str]) -> list[str]:
    """Import the modules of --import-module; one message for each that cannot be imported."""
    problems = []
    for name in names:
        try:
            import_user_module(name, IMPORT_FLAG)
        except ConfigError as error:
            problems.append(str(error))
    return problems


def modules_to_import(words: Sequence[str]) -> list[str]:
    """Return the values of --import-module on a command line.

    They are read before the other flags, which may depend on the imported code.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument(IMPORT_FLAG, default=[], nargs="*", action="extend")
    modules: list[str] = finder.parse_known_args(words)[0].import_module
    return modules


def parse_tool_args(
    make_parser: Callable[[], argparse.ArgumentParser], argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse the command line of a tool, which accepts --import-module besides its own flags.

    Raises ConfigError for modules that cannot be imported.
    """
    ConfigError.raise_for(problems_of_imports(modules_to_import(argv or sys.argv[1:])))
    parser = make_parser()
    parser.add_argument(
        IMPORT_FLAG,
        nargs="+",
        action="extend",
        help="modules that register model kinds, tokenizers or other parts of your own",
    )
    return parser.parse_args(argv)


def find_user_object(path: str, flag: str) -> object:
    """Return the object that ``path``, MODULE:NAME or FILE.py:NAME, names.  Raises ConfigError."""
    name, separator, attribute = path.rpartition(":")
    if not (name and separator and attribute):
        raise ConfigError(
            f"{flag} {path}: write MODULE:NAME or FILE.py:NAME, such as "
            "my_package.my_module:MyClass"
        )
    is_file = name.endswith(".py")
    module = import_user_file(name, flag) if is_file else import_user_module(name, flag)
    if attribute not in vars(module):
        raise ConfigError(
            f"{flag} {path}: {module.__file__ or name} defines no {attribute}; correct the name"
        )
    found: object = vars(module)[attribute]
    return found
