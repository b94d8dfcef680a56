"""Imports and calls a user's code. An exception in it becomes one line that shows the user's own line."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from accel_train.errors import UserError, nearest, one_line
from accel_train.user_code.kept import import_context
from accel_train.user_code.reference import OBJECT, Reference, code_file, file_hash, listed

USED: list[str] = []
"""The options whose code this process has loaded."""


def load(option: str, reference: Reference) -> Callable[..., Any]:
    """Import the code and return the callable. Raises UserError, which shows the user's line if the code raises.

    The folder of a user's file is the last on Python's path then: the file can import its neighbours, but none of them
    hides an installed package. No folder of a run is on the path; see `import_context`.
    """
    USED.append(option)
    if reference.module == OBJECT:
        from accel_train.user_code.objects import load_object

        return load_object(option, reference)
    with showing_user_lines(option, reference):
        module = load_file(Path(reference.file)) if reference.file else importlib.import_module(reference.module)
    found = getattr(module, reference.name, None)
    if found is None:
        known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise UserError(f"--{option}: {reference.file or reference.module} has no {reference.name!r}."
                        f"{nearest(reference.name, known) or listed(known)}")  # fmt: skip
    if not callable(found):
        kind = type(found).__name__
        a = "an" if kind[0] in "aeiou" else "a"
        raise UserError(f"--{option}: {reference.short} is {a} {kind}; expected a function (or a class).")
    return found  # type: ignore[no-any-return]


def load_file(path: Path) -> ModuleType:
    """Import a file once, whatever it is called. Data workers call this too, before they receive its objects."""
    # No package has this name, and it follows from the path and the text.
    told = f"{path.absolute()} {file_hash(path)}".encode(errors="surrogateescape")
    name = f"{path.stem}_{hashlib.sha256(told).hexdigest()[:12]}"
    if name not in sys.modules:
        folder, package = import_context(path)
        if folder is not None and str(folder) not in sys.path:
            sys.path.append(str(folder))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        if package:
            module.__package__ = package
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def call(
    option: str, reference: Reference, function: Callable[..., Any], given: dict[str, Any], extra: dict[str, Any]
) -> Any:
    """Call the user's function with those arguments of `given` that its signature names, and all of `extra`.

    Of a function with `**kwargs` nobody knows what it takes; it gets `num_classes`, which each model needs. Raises
    UserError if the function does not take one of `extra`, needs another argument, or raises.
    """
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some callables of C have none
        parameters = {}
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    unknown = [name for name in extra if name not in parameters and not takes_all]
    if unknown:
        known = [name for name in parameters if name not in given]
        raise UserError(
            f"--{option}: {reference.short} does not take {unknown[0]!r}.{nearest(unknown[0], known) or listed(known)}"
        )
    arguments = {
        name: value for name, value in given.items() if name in parameters or (takes_all and name == "num_classes")
    } | extra
    missing = [
        each.name
        for each in parameters.values()
        if each.default is each.empty
        and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        and each.name not in arguments
    ]  # fmt: skip
    if missing:
        raise UserError(
            f"--{option}: {reference.short} needs the argument {missing[0]!r}, but it is called with "
            f"{', '.join(given) or 'no argument'}. Give {missing[0]!r} a default value."
        )
    with showing_user_lines(option, reference):
        return function(**arguments)


@contextmanager
def showing_user_lines(option: str, reference: Reference) -> Iterator[None]:
    """Turn an exception of the user's code into a UserError that shows the last of the user's lines it came from."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"--{option} {reference.short}: {described(error, reference)}") from error


def described(error: BaseException, reference: Reference) -> str:
    """Return an exception in one line, with the last line of the user's code that led to it."""
    text = " ".join(str(error).split())
    reason = one_line(f"{type(error).__name__}: {text}" if text else type(error).__name__, 300)
    path = code_file(reference)
    if isinstance(error, SyntaxError):
        return reason
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if path is not None and Path(frame.filename) == path]
    if not own:
        return f"{reason.rstrip('.')}."
    last = own[-1]
    return f"{reason.rstrip('.')} ({Path(last.filename).name}, line {last.lineno}, in {last.name}: `{last.line}`)."
