"""The text of an object that a Python program has made: what a run keeps of it, as of the code in a user's file."""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
import textwrap
from types import FunctionType, ModuleType
from typing import Any

CONSTANTS = (bool, int, float, str, bytes, type(None), tuple)


def source_of(value: Any) -> str:
    """Return Python text that defines the function or class, or the class of the instance; "" if nobody can tell.

    It begins with what the text uses of the program: imports, constants, and other functions and classes of `__main__`.
    """
    value = getattr(value, "func", value)  # of a functools.partial
    definition = value if isinstance(value, (FunctionType, type)) else type(value)
    if not _is_of_program(definition):
        return ""
    parts: dict[str, str] = {}
    try:
        _add(definition.__name__.strip("<>"), definition, parts)
    except (OSError, TypeError, SyntaxError):  # typed at a prompt, say; or a lambda within a line
        return ""
    imports = sorted(text for text in parts.values() if text.startswith(("import ", "from ")))
    rest = [text for text in parts.values() if not text.startswith(("import ", "from "))]
    return "\n".join([*imports, "", "\n\n".join(rest)]) + "\n"


def _is_of_program(definition: Any) -> bool:
    """Whether nobody can import it: it was defined in the program itself, a script or a notebook, or in a function."""
    module = sys.modules.get(definition.__module__)
    return definition.__module__ == "__main__" or getattr(module, definition.__qualname__, None) is not definition


def _add(name: str, value: Any, parts: dict[str, str]) -> None:
    """Add to `parts` (name -> text) what defines `name`, which is `value` in the program, after what that needs."""
    if name in parts:
        return
    parts[name] = ""  # two functions may call each other
    if isinstance(value, ModuleType):
        parts[name] = f"import {value.__name__} as {name}" if name != value.__name__ else f"import {name}"
    elif isinstance(value, (FunctionType, type)) and _is_of_program(value):
        text = textwrap.dedent(_text_of(value))
        tree = ast.parse(text)
        known = _names_around(value)
        for node in ast.walk(tree):
            used = node.id if isinstance(node, ast.Name) else ""
            if used in known and used != name and not hasattr(builtins, used):
                _add(used, known[used], parts)
        if isinstance(tree.body[0], ast.Assign | ast.Expr | ast.Return):  # a lambda: its whole line is no definition
            raise TypeError(value)
        parts.pop(name)  # after what it needs
        parts[name] = text.rstrip() + "\n"
    elif isinstance(module := getattr(value, "__module__", None), str) and hasattr(value, "__name__"):
        own = f" as {name}" * (name != value.__name__)
        parts[name] = f"from {module} import {value.__name__}{own}"
    elif isinstance(value, CONSTANTS):
        parts[name] = f"{name} = {value!r}"
    else:
        parts[name] = f"# {name}: an object of type {type(value).__name__}, of which there is no text"


def _text_of(value: Any) -> str:
    """The text of a function or a class. Raises OSError or TypeError."""
    methods = [each for each in vars(value).values() if isinstance(each, FunctionType)]  # none, if it is a function
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):  # of a class in a notebook Python knows no file, but its methods have the cell's
        lines, _ = inspect.findsource(methods[0] if methods else value)
    for node in ast.walk(ast.parse(text := "".join(lines))):
        if isinstance(node, ast.ClassDef) and node.name == value.__name__:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    raise OSError(f"no text of {value.__name__}")


def _names_around(definition: Any) -> dict[str, Any]:
    """Return what the names outside of the definition are in the program."""
    known = dict(vars(sys.modules[definition.__module__]))
    functions = [definition] if isinstance(definition, FunctionType) else vars(definition).values()
    for function in functions:
        if isinstance(function, FunctionType):
            known |= function.__globals__
            known |= {
                name: cell.cell_contents
                for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
                if name != "__class__"
            }
    return known
