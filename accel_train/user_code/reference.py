"""Names of a user's code, read and checked without running any of it."""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from accel_train.errors import nearest
from accel_train.untrusted import read_regular_file

PREFIXES = {
    "model.name": ("hf-hub:", "hf_hub:", "local-dir:", "torchvision/"),
    "data.name": ("hfds/", "torch/"),
    "loss.name": (),
    "schedule.name": (),
    "optim.name": (),
    "augment.own": (),
    "metrics": (),
}
"""The options that may name a user's code -> the prefixes with which a value names something else. `metrics` may name
several."""
CHOSEN_METRICS = ("top5_accuracy",)
"""The metrics of this package that --metrics may name."""

OBJECT = "<object>"
"""In the place of a module: the code is an object that a Python program has given (objects.py)."""
GIVEN: dict[str, tuple[str, Any]] = {}
"""The objects that are given at the moment: option -> (the value of the option, the object)."""


@dataclass(frozen=True)
class Reference:
    """A function, or another callable, in a file or a module of the user's."""

    file: str
    """Path of the file, or "" if `module` is given."""
    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.file or self.module}:{self.name}"

    @property
    def short(self) -> str:
        """Without the folder of the file: the same wherever the file is."""
        return f"{Path(self.file).name if self.file else self.module}:{self.name}"


def parse_reference(option: str, text: str) -> Reference | None:
    """Return the Reference that the value `text` of `option` ("model.name") is; None if it names something else."""
    head, colon, name = text.rpartition(":")
    if head == OBJECT:
        return Reference("", OBJECT, name)
    if not colon or not name.isidentifier() or text.startswith(PREFIXES[option]):
        return None
    if head.endswith(".py"):
        return Reference(head, "", name)
    return Reference("", head, name) if all(part.isidentifier() for part in head.split(".")) else None


def metric_name(text: str) -> str:
    """Return the name that the metric `text` of --metrics has in all records: of FILE.py:NAME, the NAME."""
    return text.rpartition(":")[2]


def given_metrics() -> dict[str, Any]:
    """Return the metrics that a Python program has given as objects: name -> object."""
    return {key.partition(":")[2]: value for key, (_, value) in GIVEN.items() if key.startswith("metrics:")}


def texts_of(value: str | Sequence[str]) -> Sequence[str]:
    """Return the values of an option that may name a user's code, of which `metrics` may have several."""
    return [value] if isinstance(value, str) else value


def resolve(option: str, text: str, folder: Path) -> str:
    """Return the value of `option` with an absolute path, if it names a file: one relative to `folder`."""
    reference = parse_reference(option, text)
    if reference is None or not reference.file:
        return text
    return f"{(folder / Path(reference.file).expanduser()).absolute()}:{reference.name}"


def short_name(option: str, text: str) -> str:
    """Return the value of `option` as messages and comparisons show it: a user's file without its folder."""
    reference = parse_reference(option, text)
    return text if reference is None else reference.short


def mistakes(option: str, text: str) -> list[str]:
    """Return what is wrong with the user's code that the value `text` of `option` names. Runs none of it."""
    where = f"--{option}"
    head, _, name = text.rpartition(":")
    prefix = next((prefix for prefix in PREFIXES[option] if text.startswith(prefix)), "")
    if prefix:
        if head.endswith(".py") and Path(head).is_file():
            return [f"{where}: {text!r} begins like the prefix {prefix!r}. For your file, write './{text}'."]
        return []
    if text.endswith(".py"):
        return [f"{where}: {text!r} is a file. Name the function in it, too: {text}:NAME.{_hint(text)}"]
    reference = parse_reference(option, text)
    if reference is None:
        if option != "metrics" or text in CHOSEN_METRICS or text in given_metrics():
            return []
        known = nearest(text, CHOSEN_METRICS) or f" There is {', '.join(CHOSEN_METRICS)}."
        return [f"{where}: {text!r} is not a metric of this package.{known} For your own, write FILE.py:NAME."]
    if reference.module == OBJECT:
        return [] if GIVEN.get(option, ("",))[0] == text else [missing(option, reference)]
    path = code_file(reference)
    if path is None:
        return [f"{where}: found no module {reference.module!r} in this environment; for a file, write FILE.py:NAME."]
    if not path.is_file():
        hint = nearest(path.name, [each.name for each in path.parent.glob("*.py")]) if path.parent.is_dir() else ""
        return [f"{where}: {path}: no such file.{hint}"]
    try:
        names = _names(path)
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        reason = error.msg if isinstance(error, SyntaxError) else error
        return [f"{where}: {path}{line}: not valid Python: {reason}."]
    except OSError as error:
        return [f"{where}: {path} cannot be read ({error.strerror})."]
    if names is not None and name not in names:
        return [f"{where}: {path} has no {name!r}.{nearest(name, names) or listed(names)}"]
    return []


def missing(option: str, reference: Reference) -> str:
    """Return the message for an object that this program has not been given."""
    group = option.partition(".")[0]
    return (
        f"--{option}: the run was made with an object of a Python program ({reference.name}). Give it again: make the "
        f"same call of accel_train.api.train, or give load_run or evaluate the argument {group}=…."
    )


def _hint(text: str) -> str:
    try:
        return listed(_names(Path(text)) or ())
    except (OSError, SyntaxError, ValueError):
        return ""


def listed(names: Sequence[str]) -> str:
    """Return " It has NAME, NAME.", for the end of a message."""
    shown = [name for name in names if not name.startswith("_")][:8]
    return f" It has {', '.join(shown)}." if shown else ""


def _names(path: Path) -> tuple[str, ...] | None:
    """Return the names that a file defines at its top level, functions and classes first; None if nobody can tell."""
    tree = ast.parse(read_regular_file(path, follow=True), str(path))
    defined = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    others: list[str] = []
    for node in ast.walk(tree):  # also in `if`, `try` and functions, whose names may be inner ones: too many do no harm
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            others += [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            others.append(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            others.append(node.id)
    return None if "*" in others or "__getattr__" in others else (*dict.fromkeys((*defined, *others)),)


def code_file(reference: Reference) -> Path | None:
    """Return the path of the file in which the code is. None: there is no such module, it is not a file of Python, or
    the code is an object.

    Unlike `importlib.util.find_spec`, this imports nothing, not even a module's package.
    """
    if reference.module == OBJECT:
        return None
    if reference.file:
        return Path(reference.file)
    path: list[str] | None = None
    spec = None
    for part in reference.module.split("."):
        if path is None and spec is not None:
            return None  # the last part was a module, not a package
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return None
        path = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    origin = spec.origin if spec is not None else None
    return Path(origin) if origin is not None and origin.endswith(".py") else None


@functools.cache
def _hash(path: Path, size: int, changed: int) -> str:
    return hashlib.sha256(read_regular_file(path, follow=True)).hexdigest()


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    status = path.stat()
    return _hash(path, status.st_size, status.st_mtime_ns)
