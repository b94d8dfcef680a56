"""Recipe files: YAML whose every entry is an option of the command line, read as text with its file and line.

base: other_recipe          # read first; a name, or a path relative to this file
about: {reproduces: …}      # describes the recipe, sets nothing; in a run's config.yaml, `recipe` is the name
epochs: 10
optim: {name: adam, lr: 1e-3}
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_train.errors import UserError, nearest
from accel_train.untrusted import is_file_name

MOST_BYTES = 1 << 20
RECIPES = Path(__file__).parent.parent / "recipes"


@dataclass(frozen=True)
class Option:
    """One option as it was written: its key ("optim.weight-decay"), its words, and where it stands."""

    key: str
    values: tuple[str, ...]
    origin: str


@dataclass
class Recipe:
    """A recipe file: its text, the options in effect (those of its bases included), and its own `about`."""

    name: str
    text: str
    options: dict[str, Option] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)
    base: str | None = None


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def recipe_text(name: str) -> str:
    """The file of a recipe, as it stands."""
    return read_recipe(name).text


def recipe_about(name: str) -> dict[str, str]:
    """What a recipe says of itself: `reproduces`, `accuracy`, …"""
    return read_recipe(name).about


def read_recipe(name: str, folder: Path | None = None, users: tuple[Path, ...] = ()) -> Recipe:
    """The recipe `name`: one of the package, or the path of a YAML file (it ends in .yaml or has a slash).

    `folder` is where relative paths start; `users` are the files of which this one is the base. Whether the
    keys exist and the values fit is not looked at here. Raises UserError with file and line.
    """
    if name.endswith((".yaml", ".yml")) or "/" in name or os.sep in name:
        path = (folder or Path()) / Path(name).expanduser()
        shown = str(path)
    else:
        path = RECIPES / f"{name}.yaml"
        shown = path.name
        if name not in recipe_names():
            user = f" (the base of {users[-1].name})" if users else ""
            raise UserError(
                f"unknown recipe {name!r}{user}.{nearest(name, recipe_names())} `accel-train recipes` lists "
                "them; one of your own is given as a path that ends in .yaml."
            )
    if path.resolve() in users:
        circle = " -> ".join(user.name for user in (*users, path))
        raise UserError(f"{shown}: its base leads back to itself: {circle}")
    if users and path.exists() and not path.is_file():  # what a person names may be a pipe: train <(…)
        raise UserError(f"{shown}: not an ordinary file, but the base of {users[-1].name}.")

    recipe = Recipe(path.stem, _read_text(path, shown))
    _read_mapping(recipe, _compose(recipe.text, shown), shown)
    recipe.name = recipe.about.get("recipe", recipe.name)  # a run's config.yaml
    if not is_file_name(recipe.name):  # a run's folder is called so
        raise UserError(
            f"{shown}: the recipe's name is {recipe.name!r}: expected a plain word, for runs are kept in runs/NAME; "
            + ("give another one in about: {recipe: NAME}." if "recipe" in recipe.about else "rename the file.")
        )
    if recipe.base:
        base = read_recipe(recipe.base, path.parent, (*users, path.resolve()))
        recipe.options = base.options | recipe.options
    return recipe


def _read_text(path: Path, shown: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise UserError(f"recipe {shown}: no such file.") from None
    except OSError as error:
        raise UserError(f"recipe {shown}: cannot be read: {error.strerror}.") from error
    if len(content) > MOST_BYTES:
        raise UserError(f"recipe {shown}: more than {MOST_BYTES:,} bytes: that is no recipe.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{shown}:{line}: not UTF-8 text; save the file as UTF-8.") from None


def _compose(text: str, shown: str) -> Any:
    """The root node, a mapping. BaseLoader: every scalar stays the text that it is (1e-3, on, 010, null)."""
    import yaml

    try:
        root: Any = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{shown}{line}: not YAML: {error.problem or error.context}.") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{shown}: not YAML: {str(error).splitlines()[0]}.") from error
    if root is None:
        raise UserError(f"{shown}: an empty file; a recipe has lines such as `epochs: 10`.")
    if root.id != "mapping":
        raise UserError(f"{shown}:{root.start_mark.line + 1}: expected lines `key: value`, found {_kind(root)}.")
    return root


def _read_mapping(recipe: Recipe, mapping: Any, shown: str, group: str = "") -> None:
    """Takes in the entries of a mapping node, whose keys belong to `group` ("optim.")."""
    seen: dict[str, str] = {}
    for key_node, node in mapping.value:
        origin = f"{shown}:{key_node.start_mark.line + 1}"
        if key_node.id != "scalar":
            raise UserError(f"{origin}: expected the name of an option, found {_kind(key_node)}.")
        key = group + key_node.value.replace("_", "-")
        before = seen.get(key) or (key in recipe.options and recipe.options[key].origin)
        if before:
            raise UserError(f"{origin}: {key} is given twice; the first is {before}.")
        seen[key] = origin
        if key == "base":
            recipe.base = " ".join(_read_values(key, node, origin))
        elif key == "about":
            if node.id != "mapping":
                raise UserError(f"{origin}: about: expected lines `key: text`, found {_kind(node)}.")
            for name, text in node.value:
                recipe.about[str(name.value)] = " ".join(_read_values("about", text, origin))
        elif node.id == "mapping" and not group:
            _read_mapping(recipe, node, shown, f"{key}.")
        else:
            recipe.options[key] = Option(key, _read_values(key, node, origin), origin)


def _read_values(key: str, node: Any, origin: str) -> tuple[str, ...]:
    """The words of a scalar or of a list of scalars. A key with nothing after it is null."""
    items = node.value if node.id == "sequence" else [node]
    for item in items:
        if item.id != "scalar":
            raise UserError(f"{origin}: {key}: expected a value, found {_kind(item)}.")
    return tuple(item.value if item.value or item.style else "null" for item in items)


def _kind(node: Any) -> str:
    return {"mapping": "a mapping", "sequence": "a list", "scalar": "a value"}[node.id]
