"""The structure in docs/architecture.md: which folder may import which."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "accel_train"
# From the top to the bottom: a file imports from rooms further down, and from its own.
ROOMS = """
__main__ cli api doctor bench export audit report analysis parts train run training_setup step evaluate
cluster records checkpoint ownership optim data models launch config user_code starter keyed exact_sum files untrusted
errors __init__
""".split()  # noqa: SIM905
# Within the data: the same.
DATA = """
loading workers memory tools transforms sources
worker_processes order compat __init__
""".split()  # noqa: SIM905
# What is not needed to train, and what starts both.
APART = ("doctor", "bench", "export", "audit", "report", "analysis", "parts", "cluster", "data.tools")
ABOVE = ("cli", "api", "__main__")


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Return each file's module name, such as "data.order.plan", and its syntax tree."""
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def imports(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Return the modules of the package that a file imports, also inside functions, but not under `__main__`."""
    programs = [each for each in tree.body if isinstance(each, ast.If) and "__main__" in ast.unparse(each.test)]
    left_out = {id(node) for program in programs for node in ast.walk(program)}
    for node in ast.walk(tree):
        if id(node) in left_out or not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        if node.module.split(".")[0] == "accel_train":
            module = node.module.removeprefix("accel_train").removeprefix(".")
            for name in node.names:
                inner = f"{module}.{name.name}".removeprefix(".")
                yield inner if inner in known else module


@functools.cache
def graph() -> dict[str, set[str]]:
    found = modules()
    return {name: {each for each in imports(tree, set(found)) if each} for name, tree in found.items() if name}


def floor(name: str) -> tuple[int, int]:
    """Return a module's level on the page; for modules of data/ the second number is the level in that folder."""
    room, *rest = name.split(".")
    return ROOMS.index(room), DATA.index(rest[0]) if room == "data" and rest else 0


def test_nothing_imports_upwards() -> None:
    pairs = [(name, other) for name, used in graph().items() for other in used]
    wrong = [f"{name} imports {other}" for name, other in pairs if floor(name) > floor(other)]
    assert not wrong, f"{wrong}: move what both need to a room further down (docs/architecture.md, Packages)"


def part_of(name: str) -> str:
    """Return the part of the package to which a module belongs, as docs/architecture.md calls it."""
    for part, rooms in (("apart", APART), ("above both", ABOVE)):
        if any(f"{name}.".startswith(f"{room}.") for room in rooms):
            return part
    return "core"


def test_the_core_imports_nothing_that_is_apart() -> None:
    pairs = [(name, other) for name, used in graph().items() if part_of(name) == "core" for other in used]
    assert not [f"{name} imports {other}" for name, other in pairs if part_of(other) != "core"]


def test_every_room_has_its_place() -> None:
    assert {name.split(".")[0] for name in modules() if name} == set(ROOMS), "name each room in ROOMS"


def test_no_circle() -> None:
    left = {name: {other for other in used if other != name} for name, used in graph().items()}
    while free := [name for name, used in left.items() if not used & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"these import each other: {sorted(left)}"
