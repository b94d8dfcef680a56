"""The reference pages: written from the code, complete, with examples that parse."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import reference
import yaml

from accel_train.config.option_types import option_types, value
from accel_train.config.options import parse
from accel_train.config.schema import Config

DOCS = reference.DOCS


@pytest.mark.parametrize("page", ["options.md", "recipes.md"])
def test_the_pages_are_those_that_the_code_writes(page: str) -> None:
    written = {path.name: text for path, text in reference.pages()}
    assert (DOCS / page).read_text() == written[page], "run `python tests/reference.py --write`"


def test_the_page_of_other_trainers_is_what_their_users_are_told() -> None:
    script = runpy.run_path(str(DOCS.parent / "benchmarks" / "peers.py"))
    assert (DOCS / "peers.md").read_text() == script["page"](), "run `python benchmarks/peers.py --write`"


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
    assert sorted(shown) == sorted(path.name for path in DOCS.glob("*.md"))


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
