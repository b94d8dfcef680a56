"""The reference pages that the code writes, and what other pages must name."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import reference
import yaml

from accel_train.config.options import parse
from accel_train.config.recipe import recipe_names
from accel_train.config.schema import Config, option_types, value

DOCS = reference.DOCS


def test_the_code_writes_pages_of_all_options_and_recipes() -> None:
    options, recipes = (text for _, text in reference.pages())
    assert re.findall(r"^### `--(\S+)`$", options, re.MULTILINE) == list(option_types())
    assert re.findall(r"^## (\S+)$", recipes, re.MULTILINE) == recipe_names()


def test_the_pages_that_the_code_writes_are_not_committed() -> None:
    listed = subprocess.run(["git", "-C", DOCS, "ls-files", "."], capture_output=True, text=True).stdout.split()
    assert not set(listed) & set(reference.BUILT), "git rm --cached"


def test_the_page_for_users_of_other_trainers_names_options_that_exist() -> None:
    right = re.findall(r"^\|.*\|([^|]*)\|$", (DOCS / "coming_from.md").read_text(), re.MULTILINE)
    words = [text.split()[0] for cell in right for text in re.findall(r"`([^`]*)`", cell)]
    groups = {key.partition(".")[0] for key in option_types() if "." in key}
    named = [word for word in words if word.partition(".")[0] in groups]
    assert len(named) > 100
    assert not [word for word in named if word not in option_types()]


def test_each_option_has_an_example_that_is_accepted() -> None:
    kinds = option_types()
    assert reference.EXAMPLES.keys() <= kinds.keys()
    for key, kind in kinds.items():
        words = shlex.split(reference.example(key, kind, value(Config(), key)))
        assert f"--{key}" in words
        parse(["digits", *words], checks_code=False)


def test_each_page_has_its_place_on_the_site() -> None:
    site = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text())
    shown = re.findall(r"[a-z_]+\.md", json.dumps(site["nav"]))
    pages = {path.name for path in DOCS.glob("*.md")} | {name for name in reference.BUILT if name.endswith(".md")}
    assert sorted(shown) == sorted(pages)


def test_the_page_on_files_names_all_keys(digits_run: Path, tmp_path: Path) -> None:
    page = (DOCS / "run_files.md").read_text()
    keys: set[str] = set()
    for name in ("result.json", "status.json", "environment.json", "model.json", "data.json"):
        keys |= json.loads((digits_run / name).read_text()).keys()
    for line in (digits_run / "metrics.jsonl").read_text().splitlines():
        keys |= {key for key in json.loads(line) if json.loads(line)["kind"] != "event"}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == [], "docs/run_files.md"
    for file in digits_run.iterdir():
        assert f"`{file.name}`" in page or f"`{file.name}/" in page, f"{file.name}: docs/run_files.md"
