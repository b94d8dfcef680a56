"""A user's own code: what options name of it, objects of a Python program, its import, and what a run keeps of it.

`FILE.py:NAME` and `package.module:NAME` are read and checked without running any of the code, and without importing
torch, so that a mistake is found before that.

A Config is text. It calls an object (`train(model=net)`) "<object>:NAME#FINGERPRINT": whatever compares two
configurations also finds that another object was given. An object that has an importable name is called by that
instead: it is like a user's code in a module.

An exception in the user's code becomes one line that shows the user's own line.

RUN/code.json names the code of each option, and RUN/code has the text of each file. What these import is recorded by
version or hash, but not copied. Anybody can prepare a run's folder, so its text is loaded only if the user has said
--trust-code (tools/load_run.py). It is loaded by its path: no folder of a run is on Python's path. What it imports
comes from the folder in which the user's own file was, or from the environment.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from accel_train.errors import UserError, nearest, one_line
from accel_train.files import is_file_name, parse_json, read_regular_file, sha256

PREFIXES = {
    "model.name": ("torchvision/",),
    "data.name": ("hfds/", "torch/"),
    "loss.name": (),
    "schedule.name": (),
    "optim.name": (),
    "augment.own": (),
    "metrics": (),
}
"""The options that may name a user's code -> the prefixes with which a value names something else. `metrics` may name
several."""
GROUPS = {option.partition(".")[0]: option for option in PREFIXES if option.endswith(".name")}
"""A group of options -> the option in it that may name code: train(model=net) is train(model={"name": net})."""

OBJECT = "<object>"
"""In the place of a module: the code is an object that a Python program has given."""
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
    name = text.rpartition(":")[2]
    if text.startswith(PREFIXES[option]):
        return []
    if text.endswith(".py"):
        return [f"{where}: {text!r} is a file. Name the function in it, too: {text}:NAME.{_hint(text)}"]
    reference = parse_reference(option, text)
    if reference is None:
        if option != "metrics" or text in given_metrics():
            return []
        return [f"{where}: {text!r} names no function; write FILE.py:NAME. Each evaluation has the built-in metrics."]
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


def take_objects(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (the settings with the names of the objects in their place, option -> object).

    `settings` are nested as in a recipe. A group may be given as its name alone: {"model": net}. None sets nothing.
    Metrics are given as {"metrics": {name: function}}; their options are "metrics:NAME".
    """
    plain: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for key, value in settings.items():
        option = GROUPS.get(key)
        if key == "metrics" and value is None:
            continue
        if key == "metrics" and isinstance(value, Mapping):
            if not all(isinstance(name, str) and name.strip() for name in value):
                raise UserError("metrics: expected {name: function}, with a name for each that is not empty.")
            plain[key] = list(value)
            objects |= {f"metrics:{name}": metric for name, metric in value.items()}
            continue
        if option is None:
            plain[key] = value
            continue
        is_object = not isinstance(value, Mapping) or (option == "data.name" and _is_datasets(value))
        group = {"name": value} if is_object else dict(value)
        if "name" in group and group["name"] is None:
            del group["name"]
        named = group.get("name", "")
        if not isinstance(named, str):
            group["name"] = importable_name(named)
            if not group["name"]:
                group["name"], objects[option] = name_of(option, named), named
        if group:
            plain[key] = group
    return plain, objects


PLAIN = (str, int, float, list, tuple, Path, type(None))


def _is_datasets(value: Mapping[Any, Any]) -> bool:
    """Whether it maps splits to Datasets, rather than options to values."""
    return "train" in value or any(key != "name" and not isinstance(item, PLAIN) for key, item in value.items())


def importable_name(value: Any) -> str:
    """Return "module:NAME" of a function or class that any process can import; "" of other objects."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not isinstance(module, str) or module == "__main__" or not (isinstance(name, str) and name.isidentifier()):
        return ""
    same = getattr(sys.modules.get(module), name, None) is value
    reference = Reference("", module, name)
    return str(reference) if same and code_file(reference) is not None else ""


def name_of(option: str, value: Any) -> str:
    """Return "<object>:NAME#FINGERPRINT". The fingerprint is of what a run that goes on needs to be the same."""
    function = getattr(value, "func", value)  # of a functools.partial
    name = str(getattr(function, "__name__", type(value).__name__)).strip("<>")
    seen: dict[str, Any] = {}
    if option == "data.name" and isinstance(value, Mapping):
        name = type(next(iter(value.values()), None)).__name__
        seen = {
            str(split): [len(dataset), _labels(dataset)] for split, dataset in value.items() if _has_length(dataset)
        }
    elif _is_module(value):
        seen = {key: list(getattr(tensor, "shape", ())) for key, tensor in value.state_dict().items()}
    digest = "" if not seen else "#" + hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:8]
    return f"{OBJECT}:{name}{digest}"


def _is_module(value: Any) -> bool:
    return hasattr(value, "state_dict") and not isinstance(value, type)


def _has_length(dataset: Any) -> bool:
    try:
        return len(dataset) >= 0
    except TypeError:  # an error where it is used
        return False


def _labels(dataset: Any) -> str:
    """The SHA-256 of the labels, "" if they cannot be known without reading all items."""
    try:
        labels = known_labels(dataset)
    except (TypeError, ValueError):  # an error where they are used
        return ""
    return "" if labels is None or labels.dtype == object else hashlib.sha256(labels.tobytes()).hexdigest()


def known_labels(dataset: Any) -> Any:
    """Return a Dataset's `targets`, or the whole numbers in the second tensor of a TensorDataset, as an array of NumPy;
    None if it has neither. A Subset has those of its items. Raises TypeError and ValueError."""
    import numpy as np

    labels = getattr(dataset, "targets", None)
    tensors: Sequence[Any] = getattr(dataset, "tensors", ())
    if labels is None and len(tensors) == 2 and not tensors[1].dtype.is_floating_point and tensors[1].ndim == 1:
        labels = tensors[1]
    if labels is None and hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        inner = known_labels(dataset.dataset)
        return None if inner is None else inner[np.asarray(dataset.indices, dtype=np.int64)]
    return None if labels is None else np.asarray(labels)


@contextmanager
def provided(objects: Mapping[str, Any]) -> Iterator[None]:
    """Within it, the names of these objects (option -> object) mean them."""
    before = dict(GIVEN)
    try:
        GIVEN.update({option: (name_of(option, value), value) for option, value in objects.items()})
        yield
    finally:
        GIVEN.clear()
        GIVEN.update(before)


def load_object(option: str, reference: Reference) -> Callable[..., Any]:
    """Return the object that was given for the option, as something to call. Raises UserError if there is none."""
    name, value = GIVEN.get(option, ("", None))
    if name != str(reference):
        raise UserError(missing(option, reference))
    if option == "model.name" and _is_module(value):
        # A copy: the same call of train begins with the same weights, however often it is made.
        return lambda: copy.deepcopy(value)
    if option == "data.name" and not callable(value):
        return lambda: value
    if not callable(value):
        raise UserError(f"--{option}: found an object of type {type(value).__name__}; expected a function or a class.")
    return value  # type: ignore[no-any-return]


def weights_hash() -> str:
    """Return the SHA-256 of the weights of the model that was given; "" if none was, or a function that makes one."""
    _, model = GIVEN.get("model.name", ("", None))
    if not _is_module(model):
        return ""
    import torch

    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        if isinstance(tensor, torch.Tensor):
            found.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


# The import of the code, and what a run keeps of it.


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
    from importlib.metadata import packages_distributions, version  # each command would wait for it

    packages = packages_distributions()
    recorded: dict[str, str] = {}
    files = [path]
    for file in files:
        for name in sorted(_imported_names(file)):
            top = name.partition(".")[0]
            if top in sys.stdlib_module_names or name in recorded:
                continue
            if top in packages:
                recorded[top] = version(packages[top][0])
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
