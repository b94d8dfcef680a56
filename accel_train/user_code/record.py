"""What is recorded of a user's code: the hash of its file, and what the file imports."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import sys
from pathlib import Path

from accel_train.user_code.reference import Reference, code_file


@functools.cache
def _hash(path: Path, size: int, changed: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    status = path.stat()
    return _hash(path, status.st_size, status.st_mtime_ns)


def imports(path: Path) -> dict[str, str]:
    """Return what a file imports: the name of each module -> its version, or the hash of its file.

    Imports by other means than `import` statements, and those of the imported files, are not seen.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
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
        file = code_file(Reference("", name, "")) or _neighbour(path, name)
        found[name] = "not found" if file is None else f"sha256 {file_hash(file)}"
    return found


def _neighbour(path: Path, name: str) -> Path | None:
    beside = path.parent.joinpath(*name.split("."))
    return next((file for file in (beside.with_suffix(".py"), beside / "__init__.py") if file.is_file()), None)
