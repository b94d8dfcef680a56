"""Writes figures to docs/benchmarks.json, for the next comparison, and as tables to docs/benchmarks.md.

Each table is between `<!-- NAME -->` and `<!-- end of NAME -->`, and is replaced as a whole.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import tasks

from accel_train.bench.machine import device_name, processor_name
from accel_train.bench.statistics import Spread, moved
from accel_train.checkpoint.format import versions
from accel_train.launch.process import available_cores

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PACKAGES = ("torch", "torchvision", "accelerate", "timm", "lightning", "pillow")


def circumstances(command: str) -> dict[str, Any]:
    """When, where and with which versions the figures were measured. `command` prints them again."""
    found = versions(PACKAGES, missing="not installed")
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "command": command,
        "date": date.today().isoformat(),
        "commit": head.stdout.strip() or "unknown",
        "processor": processor_name(),
        "cores": available_cores(),
        "device": device_name(tasks.best_device()),
        "load": round(os.getloadavg()[0], 1),  # before the measurement: shows whether other programs ran
        "python": found.pop("python"),
        "versions": found,
    }


def caption(found: dict[str, Any]) -> str:
    """The line under a table."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return (
        f"`{found['command']}`, {found['date']}, commit {found['commit']}; {found['processor']}, {found['cores']} "
        f"cores, device {found['device']}; load average before {found['load']}; Python {found['python']}, {versions}."
    )


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def write(name: str, part: str, figures: dict[str, Any], docs: Path = DOCS) -> list[str]:
    """Write a part (table, note, caption) to docs/benchmarks.md and its figures to docs/benchmarks.json.

    Returns a line for each figure that has changed since the last time by more than its spread.
    """
    page, store = docs / "benchmarks.md", docs / "benchmarks.json"
    text = page.read_text()
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise SystemExit(f"{page}: expected one part from {begin} to {end}")
    stored = json.loads(store.read_text()) if store.exists() else {}
    differences = compare(stored.get(name, {}), figures)
    store.write_text(json.dumps({**stored, name: figures}, indent=1) + "\n")
    page.write_text(pattern.sub(lambda _: f"{begin}\n{part.strip()}\n{end}", text))
    return differences


def compare(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A line for each figure that has changed by more than its spread."""
    old, lines = dict(_spreads(before)), []
    for name, found in _spreads(now):
        if name in old and moved(old[name], found):
            was, now_is = old[name].median, found.median
            lines.append(f"{name}: {was:,.4g} -> {now_is:,.4g} ({now_is / was - 1:+.1%})")
    return lines


def _spreads(figures: Any, path: str = "") -> Iterator[tuple[str, Spread]]:
    """All figures with a median and quartiles, each with the keys that lead to it."""
    if isinstance(figures, dict):
        if {"median", "low", "high"} <= figures.keys():
            yield path, Spread(figures["median"], figures["low"], figures["high"])
        for key, value in figures.items():
            yield from _spreads(value, f"{path} {key}".strip())


def tell(name: str, differences: list[str]) -> None:
    """Print which figures have changed."""
    print(f"\n{name}: since the last table ", end="")
    if not differences:
        print("no figure has changed by more than its spread.")
    else:
        print("these figures have changed by more than their spread:", *differences, sep="\n  ")
