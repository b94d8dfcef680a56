"""Writes the results of benchmarks: tables into docs/benchmarks.md, medians and quartiles into docs/benchmarks.json.

The next run of a benchmark compares itself with that file. On the page each table is between
`<!-- NAME -->` and `<!-- end of NAME -->`, and is replaced as a whole.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import tasks

from accel_train.checkpoint.directory import versions
from accel_train.launch.process import available_cores
from accel_train.tools.bench import Spread, device_name

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PACKAGES: tuple[str, ...] = ("torch", "torchvision", "accelerate", "timm", "lightning", "pillow")


def processor_name() -> str:
    if match := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()):
        return match[1]
    return platform.processor() or platform.machine()


def moved(before: Spread, now: Spread) -> bool:
    """Return whether the median has changed by more than the larger interquartile range."""
    return abs(now.median - before.median) > max(before.high - before.low, now.high - now.low)


def circumstances(command: str) -> dict[str, Any]:
    """Return the machine, the versions and the commit of a measurement. `command`: how to repeat it."""
    installed = versions(PACKAGES, missing="not installed")
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "command": command,
        "date": date.today().isoformat(),
        "commit": head.stdout.strip() or "unknown",
        "processor": processor_name(),
        "cores": available_cores(),
        "device": device_name(tasks.best_device()),
        "load": round(os.getloadavg()[0], 1),  # before the measurement: shows whether other programs were running
        "python": installed.pop("python"),
        "versions": installed,
    }


def caption(known: dict[str, Any]) -> str:
    """Return the line below a table. `known`: what `circumstances` returned; benchmarks.json has all of it."""
    return (
        f"`{known['command']}`, {known['date']}, commit {known['commit']}; {known['processor']}, {known['cores']} "
        f"cores, {known['device']}, load average before {known['load']}; torch {known['versions']['torch']}."
    )


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def write(name: str, part: str, figures: dict[str, Any], docs: Path = DOCS) -> list[str]:
    """Put `part` (table, note, caption) into docs/benchmarks.md, and `figures` into docs/benchmarks.json.

    Returns a line for each figure that has moved since the last time by more than its spread. Raises SystemExit if the
    page has no place for the part.
    """
    page, store = docs / "benchmarks.md", docs / "benchmarks.json"
    text = page.read_text()
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise SystemExit(f"{page}: expected one part from {begin} to {end}; add these two lines.")
    stored = json.loads(store.read_text()) if store.exists() else {}
    figures = _without_rounds(figures)
    differences = compare(stored.get(name, {}), figures)
    store.write_text(json.dumps({**stored, name: figures}, indent=1) + "\n")
    page.write_text(pattern.sub(lambda _: f"{begin}\n{part.strip()}\n{end}", text))
    return differences


def compare(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a line for each figure whose median has moved by more than its spread."""
    old, lines = dict(_spreads(before)), []
    for name, spread in _spreads(now):
        if name in old and moved(old[name], spread):
            was, now_is = old[name].median, spread.median
            lines.append(f"{name}: {was:,.4g} -> {now_is:,.4g} ({now_is / was - 1:+.1%})")
    return lines


def _without_rounds(figures: Any) -> Any:
    """Return the figures without the lists of single rounds: the median and the quartiles stay."""
    if not isinstance(figures, dict):
        return figures
    is_spread = {"median", "low", "high"} <= figures.keys()
    return {key: _without_rounds(value) for key, value in figures.items() if not (is_spread and key == "rounds")}


def _spreads(figures: Any, path: str = "") -> Iterator[tuple[str, Spread]]:
    """Yield each figure that has a median and quartiles, with the keys that lead to it."""
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
