"""What is recorded of a user's code: the hash of its file, what the file imports, and the runs trained with it.

Anybody can prepare a run's folder. Its code, and arguments that can open files, are used without a question only if a
record outside the folder says that this user has trained on this machine with the same code and the same configuration.
The record is bound to the whole text of config.yaml, not to the folder: arguments are part of what was run, and a run
that is moved stays the same.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import os
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_train.untrusted import read_regular_file
from accel_train.user_code.reference import Reference, code_file, file_hash


def imports(path: Path) -> dict[str, str]:
    """Return what a file imports: the name of each module -> its version, or the hash of its file.

    Imports by other means than `import` statements, and those of the imported files, are not seen.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(read_regular_file(path, follow=True), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    packages = importlib.metadata.packages_distributions()
    found = {}
    for name in sorted(names):
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names:
            continue
        if top in packages:
            found[top] = importlib.metadata.version(packages[top][0])
            continue
        beside = path.parent.joinpath(*name.split("."))
        neighbours = (each for each in (beside.with_suffix(".py"), beside / "__init__.py") if each.is_file())
        file = code_file(Reference("", name, "")) or next(neighbours, None)
        found[name] = "not found" if file is None else f"sha256 {file_hash(file)}"
    return found


STRINGS = (
    "aa_layer", "act_layer", "attn_layer", "global_pool", "norm_layer", "pad_type", "pool_type", "pos_embed",
    "stem_type", "weight_init",
)  # fmt: skip
"""Arguments of library models whose text is looked up in a table of names."""
OPENS = re.compile(r"path|file|url|dir|weights|checkpoint|pretrained|cfg|config|hub|cache|overlay|repo|load|src", re.I)
"""In the name of an argument that may name a file, or fetch something."""


def remember(config: str, code: Mapping[str, str]) -> None:
    """Record that this user trains with the text `config` of config.yaml and with `code`: option -> SHA-256.

    Raises OSError if the user's folder cannot be written, or if others could write in it.
    """
    folder = _folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(folder.lstat(), stat.S_ISDIR):
        raise PermissionError(1, "others can write in it", str(folder))
    path, content = folder / _key(config.encode(), code), json.dumps({"code": dict(code)}) + "\n"
    if not path.exists():
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with os.fdopen(file, "w") as stream:
            stream.write(content)


def is_remembered(config: bytes, code: Mapping[str, str]) -> bool:
    """Whether `remember` was called by this user with these; records that others could have written do not count."""
    folder = _folder()
    try:
        record = folder / _key(config, code)
        return _is_private(folder.lstat(), stat.S_ISDIR) and _is_private(record.lstat(), stat.S_ISREG)
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return False


def doubtful_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """Return those arguments of a library's model that are not known to be harmless: they may open a file or a URL."""
    return [name for name, value in arguments.items() if OPENS.search(name) or not _is_harmless(name, value)]


def _is_harmless(name: str, value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_harmless(name, item) for item in value)
    if isinstance(value, str):
        return name in STRINGS and bool(re.fullmatch(r"\w*", value))
    return value is None or isinstance(value, (bool, int, float))


def _folder() -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (state if state.is_absolute() else Path("~/.local/state").expanduser()) / "accel_train/trained"


def _key(config: bytes, code: Mapping[str, str]) -> str:
    described = json.dumps([hashlib.sha256(config).hexdigest(), sorted(code.items())])
    return hashlib.sha256(described.encode()).hexdigest()


def _is_private(status: os.stat_result, is_kind: Any) -> bool:
    return is_kind(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
