"""Imports and calls a user's code; what a run keeps of it, and how that text is loaded again.

An exception in the user's code becomes one line that shows the user's own line.

RUN/code.json names the code of each option, and RUN/code has the text of each file. What these import is recorded by
version or hash, but not copied. Anybody can prepare a run's folder, so its text is loaded only if the user has said
--trust-code (tools/load_run.py). It is loaded by its path: no folder of a run is on Python's path. What it imports
comes from the folder in which the user's own file was, or from the environment.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from accel_train.errors import UserError, nearest, one_line
from accel_train.files import sha256
from accel_train.untrusted import is_file_name, parse_json, read_regular_file
from accel_train.user_code.reference import OBJECT, Reference, code_file, listed, load_object, missing

FILE, FOLDER = "code.json", "code"
USED: list[str] = []
"""The options whose code this process has loaded."""


def load(option: str, reference: Reference) -> Callable[..., Any]:
    """Import the code and return the callable. Raises UserError, which shows the user's line if the code raises.

    The folder of a user's file is the last on Python's path then: the file can import its neighbours, but none of them
    hides an installed package. No folder of a run is on the path; see `import_context`.
    """
    USED.append(option)
    if reference.module == OBJECT:
        return load_object(option, reference)
    with showing_user_lines(option, reference):
        module = load_file(Path(reference.file)) if reference.file else importlib.import_module(reference.module)
    found = getattr(module, reference.name, None)
    if found is None:
        raise UserError(f"--{option}: {reference.file or reference.module} has no {reference.name!r}.")
    if not callable(found):
        kind = type(found).__name__
        a = "an" if kind[0] in "aeiou" else "a"
        raise UserError(f"--{option}: {reference.short} is {a} {kind}; expected a function (or a class).")
    return found  # type: ignore[no-any-return]


def load_file(path: Path) -> ModuleType:
    """Import a file once, whatever it is called. Data workers call this too, before they receive its objects."""
    # No package has this name, and it follows from the path and the text.
    told = f"{path.absolute()} {sha256(path)}".encode(errors="surrogateescape")
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


def keep_code(
    used: Mapping[str, Reference], run: Path, write: Callable[[str, bytes], object], update: int
) -> list[str]:
    """Keep the user's code in the folder `run`, by `write(name, content)`. Returns notes about what has changed.

    `used`: the code of each option; `update`: the number of updates before this start.
    """
    before, notes = _read(run), []
    now: dict[str, dict[str, Any]] = {}
    for option, reference in used.items():
        path = code_file(reference)
        if path is None:  # an object, or a module that is not a file of Python
            now[option] = {"reference": str(reference)}
            continue
        kept = f"{FOLDER}/{path.stem}-{sha256(path)[:12]}.py"
        write(kept, read_regular_file(path, follow=True))
        entry = {"reference": str(reference), "kept": kept, "sha256": sha256(path), "imports": imports(path)}
        old, now[option] = before.get(option, entry), entry
        changed = [name for name, digest in _own_modules(entry).items() if _own_modules(old).get(name) != digest]
        if old.get("sha256") != entry["sha256"]:
            changed.insert(0, f"{path} (before: {old.get('kept')})")
        if changed:
            notes.append(
                f"{option}: {', '.join(changed)} changed since the last start of this run. From update {update} on the "
                "new text is used."
            )
    if now:
        write(FILE, (json.dumps(now, indent=2) + "\n").encode())
    return notes


def imports(path: Path) -> dict[str, str]:
    """Return what a file imports: the name of each module -> its version, or the hash of its file if it is the user's.

    What these modules of the user's import is in it, too. Imports by other means than `import` statements are not seen.
    """
    packages = importlib.metadata.packages_distributions()
    recorded: dict[str, str] = {}
    files = [path]
    for file in files:
        for name in sorted(_imported_names(file)):
            top = name.partition(".")[0]
            if top in sys.stdlib_module_names or name in recorded:
                continue
            if top in packages:
                recorded[top] = importlib.metadata.version(packages[top][0])
                continue
            beside = path.parent.joinpath(*name.split("."))
            neighbours = (each for each in (beside.with_suffix(".py"), beside / "__init__.py") if each.is_file())
            module = code_file(Reference("", name, "")) or next(neighbours, None)
            recorded[name] = "not found" if module is None else f"sha256 {sha256(module)}"
            files += [module] if module is not None else []
    return recorded


def _imported_names(path: Path) -> set[str]:
    names: set[str] = set()
    try:
        tree = ast.parse(read_regular_file(path, follow=True), str(path))
    except (OSError, SyntaxError, ValueError):  # an error where it is imported
        return names
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return names


def _own_modules(entry: Mapping[str, Any]) -> dict[str, str]:
    """The imported modules of the user's: the name of each -> "sha256 …"."""
    recorded = entry.get("imports")
    modules = recorded.items() if isinstance(recorded, dict) else ()
    return {name: digest for name, digest in modules if str(digest).startswith("sha256 ")}


def _read(run: Path) -> dict[str, dict[str, Any]]:
    """Return the content of code.json; {} if there is none. Raises UserError if it is damaged."""
    path = run / FILE
    if not path.exists():
        return {}
    try:
        content = parse_json(read_regular_file(path, follow=True))
        if not (isinstance(content, dict) and all(isinstance(entry, dict) for entry in content.values())):
            raise ValueError("it is not a table of options")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); copy it again from where the model was trained.") from error
    return content


def kept_text(option: str, reference: Reference, run: Path) -> Path:
    """Return the file of the text that the run in the folder `run` keeps for `option`, or for a metric "metrics:NAME".

    `reference`: as it was given to the run. Raises UserError if there is none, or if it is not the recorded one.
    """
    entry = _read(run).get(option, {})
    name = str(entry.get("kept", "")).removeprefix(f"{FOLDER}/")
    path, where = run / FOLDER / name, f"--{option.partition(':')[0]} {reference.short}"
    if reference.module == OBJECT:
        raise UserError(missing(option, reference))
    if not (is_file_name(name) and path.is_file() and sha256(path) == entry.get("sha256")):
        raise UserError(
            f"{where}: the run does not have the text of this code, or not the one whose hash {FILE} records; copy "
            f"{FILE} and {FOLDER}/ again from where the model was trained."
        )
    return path


def import_context(path: Path) -> tuple[Path | None, str]:
    """Return where a file of a user's own finds what it imports, besides the environment: a folder, and the package
    for relative imports ("": none).

    For a text that a run keeps they are those of the file or module that the run was trained with. The folder must be
    here, belong to this user, and be no part of a run; else there is none.
    """
    if not _is_kept(path.parent):
        return path.parent, ""
    run = path.parent.parent
    entries = (entry for entry in _read(run).values() if entry.get("kept") == f"{FOLDER}/{path.name}")
    named = str(next(entries, {}).get("reference", "")).rpartition(":")[0]
    if not named.endswith(".py"):
        return None, named.rpartition(".")[0]
    folder = Path(named).parent
    if not (folder.is_absolute() and folder.is_dir() and folder.stat().st_uid in (os.getuid(), 0)):
        return None, ""
    is_of_run = folder.resolve().is_relative_to(run.resolve()) or _is_kept(folder.resolve())
    return None if is_of_run else folder, ""


def _is_kept(folder: Path) -> bool:
    """Whether it is the folder in which a run keeps code."""
    return folder.name == FOLDER and (folder.parent / FILE).exists()
