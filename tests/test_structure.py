"""The structure in docs/architecture.md: which package may import which."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "accel_train"
# From the top to the bottom: a file imports from packages further down, and from its own.
PACKAGES = """
__main__ cli api tools parts train run training_setup step evaluate
records checkpoint ownership optim data models launch task config user_code keyed exact_sum files
errors compat __init__
""".split()  # noqa: SIM905
# Within tools and data: the same.
WITHIN = {
    "tools": """
doctor bench export audit find_lr shards report
evaluate_run load_run pool cluster __init__
""".split(),  # noqa: SIM905
    "data": """
loading workers memory image_transform batch_transform sources
worker_processes order __init__
""".split(),  # noqa: SIM905
}
# What is not needed to train, and what starts both.
TOOLS = ("tools", "parts")
ABOVE = ("cli", "api", "__main__")


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Return each file's module name, such as "data.order", and its syntax tree."""
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


def level(name: str) -> tuple[int, int]:
    """Return a module's level on the page; for modules of tools/ and data/ the second number is the level there."""
    package, *rest = name.split(".")
    return PACKAGES.index(package), WITHIN[package].index(rest[0]) if package in WITHIN and rest else 0


def test_nothing_imports_upwards() -> None:
    pairs = [(name, other) for name, used in graph().items() for other in used]
    wrong = [f"{name} imports {other}" for name, other in pairs if level(name) > level(other)]
    assert not wrong, f"{wrong}: move what both need to a package further down (docs/architecture.md, Packages)"


def part_of(name: str) -> str:
    """Return the part of the package to which a module belongs, as docs/architecture.md calls it."""
    for part, packages in (("tools", TOOLS), ("above both", ABOVE)):
        if name.split(".")[0] in packages:
            return part
    return "core"


def test_the_core_imports_no_tool() -> None:
    pairs = [(name, other) for name, used in graph().items() if part_of(name) == "core" for other in used]
    assert not [f"{name} imports {other}" for name, other in pairs if part_of(other) != "core"]


def test_every_package_has_its_place() -> None:
    assert {name.split(".")[0] for name in modules() if name} == set(PACKAGES), "name each package in PACKAGES"


def test_no_circle() -> None:
    left = {name: {other for other in used if other != name} for name, used in graph().items()}
    while free := [name for name, used in left.items() if not used & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"these import each other: {sorted(left)}"


def test_no_two_tests_have_the_same_name() -> None:
    """pytest imports them by their names alone."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert len(names) == len(set(names))
