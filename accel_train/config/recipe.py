"""Recipe files: YAML in which each entry is an option of the command line, read as text with its file and line.

base: other_recipe          # read first; a name, or a path relative to this file
about: {reproduces: …}      # describes the recipe and sets nothing; in a run's config.yaml, `recipe` is the name
epochs: 10
optim: {name: adam, lr: 1e-3}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from accel_train.errors import UserError, nearest, reason_of
from accel_train.files import TooLargeError, is_file_name, read_regular_file, read_yaml
from accel_train.user_code import PREFIXES, resolve

MAX_BYTES = 1 << 20
RECIPES = Path(__file__).parent.parent / "recipes"


@dataclass(frozen=True)
class Option:
    """One option as the user wrote it: its key ("optim.weight-decay"), its words, and where they were found."""

    key: str
    values: tuple[str, ...]
    origin: str


@dataclass
class Recipe:
    """A recipe file: its text, the options in effect (with those of its bases), and its own `about`.

    `mistakes` are the entries that could not be read, a message each, those of the bases included.
    """

    name: str
    text: str
    options: dict[str, Option] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)
    base: str | None = None
    mistakes: list[str] = field(default_factory=list)


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def read_recipe(name: str, folder: Path | None = None, users: tuple[Path, ...] = ()) -> Recipe:
    """Return the recipe `name`: one of the package, or a YAML file (its path ends in .yaml or contains a slash).

    Relative paths start at `folder`. `users` are the files that this one is the base of. Whether the options exist and
    their values fit is not checked here. Raises UserError, with file and line, if the file cannot be read as YAML.
    """
    path, shown = _find(name, folder, users)
    if path.parent == RECIPES:
        return _read(Recipe(path.stem, _read_text(path, shown)), shown, Path(), users)
    # A file of the user's is named relative to the recipe.
    return _read(Recipe(path.stem, _read_text(path, shown)), shown, path.parent, (*users, path.resolve()))


def read_settings(settings: Mapping[str, Any], shown: str) -> Recipe:
    """Return the recipe that consists of the entries of `settings`, with names as in a recipe file.

    `shown`: what messages call them. Raises UserError if they cannot be written as YAML.
    """
    import yaml

    text = yaml.safe_dump(_plain(settings, shown), sort_keys=False)
    return _read(Recipe("notebook", text), shown, Path(), ())


def _plain(value: Any, where: str) -> Any:
    """The value with its paths as text, its tuples as lists and NumPy's numbers as Python's, as YAML writes them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}: {key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    if getattr(value, "ndim", None) == 0:
        return value.item()
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if not isinstance(value, Path):
        raise UserError(f"{where}: found an object of type {type(value).__name__}; expected words, numbers and lists.")
    return str(value)


def _read(recipe: Recipe, shown: str, place: Path, users: tuple[Path, ...]) -> Recipe:
    """Read the recipe's text and its bases. `shown`: its name in messages; `place`: where its relative paths start."""
    _read_mapping(recipe, _compose(recipe.text, shown), shown)
    recipe.name = recipe.about.get("recipe", recipe.name)  # a run's config.yaml
    if (users or "recipe" in recipe.about) and not is_file_name(recipe.name):  # else it is the program's
        recipe.mistakes.append(
            f"{shown}: the recipe's name is {recipe.name!r}: expected a plain word, because runs are kept in "
            "runs/NAME; "
            + ("give another one in about: {recipe: NAME}." if "recipe" in recipe.about else "rename the file.")
        )
    for key in PREFIXES.keys() & recipe.options.keys():
        option = recipe.options[key]
        values = tuple(resolve(key, value, place) for value in option.values)
        recipe.options[key] = replace(option, values=values)
    if recipe.base:
        try:
            base = read_recipe(recipe.base, place, users)
        except UserError as error:
            recipe.mistakes += error.messages
        else:
            recipe.options = base.options | recipe.options
            recipe.mistakes += base.mistakes
    return recipe


def _find(name: str, folder: Path | None, users: tuple[Path, ...]) -> tuple[Path, str]:
    """Return the path of a recipe's file, and how messages show it. Raises UserError if it cannot be a recipe."""
    if name.endswith((".yaml", ".yml")) or "/" in name or os.sep in name:
        path = (folder or Path()) / Path(name).expanduser()
        shown = str(path)
    else:
        path = RECIPES / f"{name}.yaml"
        shown = path.name
        if name not in recipe_names():
            user = f" (the base of {users[-1].name})" if users else ""
            raise UserError(
                f"unknown recipe {name!r}{user}.{nearest(name, recipe_names())} `accel-train recipes` lists the "
                "recipes; to use a file of your own, give its path, which ends in .yaml."
            )
    if path.resolve() in users:
        circle = " -> ".join(user.name for user in (*users, path))
        raise UserError(f"{shown}: the recipe is its own base: {circle}. Remove one of these base: lines.")
    return path, shown


def _read_text(path: Path, shown: str) -> str:
    try:
        content = read_regular_file(path, MAX_BYTES, follow=True)
    except TooLargeError:
        raise UserError(f"recipe {shown}: more than {MAX_BYTES:,} bytes, which is too large for a recipe.") from None
    except FileNotFoundError:
        raise UserError(f"recipe {shown}: no such file.") from None
    except OSError as error:
        raise UserError(f"recipe {shown}: cannot be read: {error.strerror or error}.") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{shown}:{line}: not UTF-8 text; save the file as UTF-8.") from None


def _compose(text: str, shown: str) -> Any:
    """Return the root node, a mapping. BaseLoader leaves each scalar as its text (1e-3, on, 010, null)."""
    import yaml

    try:
        root: Any = read_yaml(text, nodes=True)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        began = error.context_mark.line + 1 if error.context_mark else None
        mistake = _yaml_mistake(error.problem or error.context or "", began)
        raise UserError(f"{shown}{line}: not YAML: {mistake}.") from error
    except yaml.YAMLError as error:
        raise UserError(f"{shown}: not YAML: {reason_of(error)}.") from error
    if root is None:
        raise UserError(f"{shown}: the file is empty; a recipe has lines such as `epochs: 10`.")
    if root.id != "mapping":
        raise UserError(f"{shown}:{root.start_mark.line + 1}: expected lines `key: value`, found {_kind(root)}.")
    return root


def _yaml_mistake(problem: str, began: int | None) -> str:
    """What is wrong with a line, in other words than the parser's. `began`: the line where it began to read a part."""
    indentation = "the line is not indented as the others of its group are; use the same number of spaces"
    known = {
        "'<block mapping start>'": indentation,
        "mapping values are not allowed": "a `:` where no option can be: the line is indented too far, the line before "
        "has no `:`, or a value with `: ` in it needs quotes",
        r"character '\t'": "a tab; indent lines with spaces",
        "could not find expected ':'": f"line {began} has no `: ` after the name of its option",
        "expected ',' or": f"the bracket that begins in line {began} is not closed before this line",
        "that cannot start": "a value that begins with one of @ % ` needs quotes",
        "unexpected end of stream": f"the quote that begins in line {began} is not closed",
        "found '?'": "lines `key: value` and lines `- value` are mixed",
    }
    return next((words for part, words in known.items() if part in problem), problem)


def _read_mapping(recipe: Recipe, mapping: Any, shown: str, group: str = "") -> None:
    """Add the entries of a mapping node, whose keys belong to `group` ("optim."), to the recipe."""
    seen: dict[str, str] = {}
    for key_node, node in mapping.value:
        origin = f"{shown}:{key_node.start_mark.line + 1}"
        if key_node.id != "scalar":
            recipe.mistakes.append(f"{origin}: expected the name of an option, found {_kind(key_node)}.")
            continue
        key = group + key_node.value.replace("_", "-")
        first = seen.get(key) or (key in recipe.options and recipe.options[key].origin)
        if first:
            recipe.mistakes.append(f"{origin}: {key} is given twice; the first time in {first}.")
            continue
        seen[key] = origin
        if node.id == "mapping" and not group and key not in ("base", "about"):
            _read_mapping(recipe, node, shown, f"{key}.")
            continue
        try:
            _read_entry(recipe, key, node, origin)
        except UserError as error:
            recipe.mistakes += error.messages


def _read_entry(recipe: Recipe, key: str, node: Any, origin: str) -> None:
    """Add one entry to the recipe: its base, its description, or an option."""
    if key == "base":
        recipe.base = " ".join(_read_values(key, node, origin))
    elif key == "about":
        if node.id != "mapping":
            raise UserError(f"{origin}: about: expected lines `key: text`, found {_kind(node)}.")
        for name, text in node.value:
            recipe.about[str(name.value)] = " ".join(_read_values("about", text, origin))
    elif key in ("model.kwargs", "optim.kwargs") and node.id == "mapping":
        recipe.options[key] = Option(key, (json.dumps(_as_value(node)),), origin)
    else:
        recipe.options[key] = Option(key, _read_values(key, node, origin), origin)


def _read_values(key: str, node: Any, origin: str) -> tuple[str, ...]:
    """Return the words of a scalar or of a list of scalars. A key with nothing after it is null."""
    items = node.value if node.id == "sequence" else [node]
    for item in items:
        if item.id != "scalar":
            raise UserError(f"{origin}: {key}: expected a value, found {_kind(item)}.")
    return tuple(item.value if item.value or item.style else "null" for item in items)


def _as_value(node: Any) -> Any:
    """Return what a node says: a scalar without quotes is a number, true, false or null if JSON has it so."""
    if node.id == "mapping":
        return {str(key.value): _as_value(item) for key, item in node.value}
    if node.id == "sequence":
        return [_as_value(item) for item in node.value]
    try:
        return node.value if node.style else json.loads(node.value)
    except ValueError:
        return node.value


def _kind(node: Any) -> str:
    return {"mapping": "a mapping", "sequence": "a list", "scalar": "a value"}[node.id]


def not_a_run(run: Path) -> list[str]:
    """Return a message if the folder `run` is not one that training has written; else nothing."""
    if (run / "config.yaml").is_file():
        return []
    reason = "it has no config.yaml" if run.is_dir() else "there is no such folder"
    return [f"{run}: not a run, because {reason}; give the folder that training wrote (runs/RECIPE/…)."]
