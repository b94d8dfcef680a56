"""The trainer beside others that do the same work: measured in turns, in one table.

    python benchmarks/compare.py --data-root ~/data      # `make bench` adds benchmarks/scaling.py
    python benchmarks/compare.py --quick                 # to see that all runs; writes nothing

Each round starts every contestant once, in a process of its own, and leaves its first updates out. Which of 0 and 2
workers is better for the others is found in the first round. Without --data-root the images are synthetic ones of the
same shapes. The table goes into docs/benchmarks.md, the figures into docs/benchmarks.json, the plot beside them.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import document
import tasks

from accel_train.spread import ratio, spread
from accel_train.table import print_table

HERE = Path(__file__).parent
OTHERS = {"tutorial": "tutorial.py", "timm": "timm_loader.py", "Lightning": "lightning_script.py"}
NAMES = {  # in the order of the table
    "limit": "limit: a bare loop on tensors in memory",
    "trainer": "accel_train, all on",
    "tutorial": "tutorial script, without its second pass",
    "tutorial, second pass": "tutorial script, second pass included",
    "timm": "timm's loader and loop",
    "Lightning": "Lightning",
    "input": "(accel_train's input alone)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="folder of MNIST and CIFAR10, as torchvision has them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of few updates; nothing is written")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    command = "python benchmarks/compare.py" + " --data-root DIR" * bool(options.data_root)
    figures: dict[str, Any] = {"circumstances": document.circumstances(command), "rounds": rounds}
    measured = {}
    for name, task in tasks.TASKS.items():
        root = task.root(options.data_root)
        updates, warm_up = (8, 2) if options.quick else (task.updates, task.warm_up)
        measured[name] = _measure(name, task, root, rounds, updates, warm_up)
        measured[name]["data"] = "synthetic" if root is None else "real"
    figures["tasks"] = measured
    show(measured)
    if options.quick:
        return
    plot(measured, document.DOCS / "benchmarks.svg")
    document.tell("compare", document.write("compare", markdown(figures), figures))


def _measure(name: str, task: tasks.Task, root: Path | None, rounds: int, updates: int, warm_up: int) -> dict[str, Any]:
    """Rates of all contestants, and the trainer's ratio to each, with their spreads."""
    others = {other: script for other, script in OTHERS.items() if other != "Lightning" or _has_lightning()}
    workers = {other: [0, 2] for other in others}
    rates: dict[str, list[float]] = {}
    for number in range(rounds):
        found = _bench(name, task, root, updates)
        for other, script in others.items():
            options = ["--updates", updates, "--warm-up", warm_up, *(["--data-root", root] if root else [])]
            tried = {count: _script(script, name, *options, "--workers", count) for count in workers[other]}
            best = max(tried, key=lambda count: tried[count]["images_per_second"])
            workers[other] = [best]
            found[other] = tried[best]["images_per_second"]
            if "with_second_pass" in tried[best]:
                found[f"{other}, second pass"] = tried[best]["with_second_pass"]
        for contestant, rate in found.items():
            rates.setdefault(contestant, []).append(rate)
        shown = ", ".join(f"{contestant} {rate:,.0f}" for contestant, rate in found.items())
        print(f"{name}, round {number + 1} of {rounds}: {shown}", flush=True)
    return {
        "batch_size": task.batch_size,
        "updates": updates,
        "workers": {other: counts[0] for other, counts in workers.items()},
        "images_per_second": {key: dataclasses.asdict(spread(rates[key])) for key in NAMES if key in rates},
        "trainer divided by": {
            key: dataclasses.asdict(ratio(rates["trainer"], rates[key]))
            for key in NAMES
            if key in rates and key not in ("trainer", "input")
        },
    }


def _bench(name: str, task: tasks.Task, root: Path | None, updates: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "bench.json"
        data = ["--data.root", root] if root else ["--synthetic"]
        words = ["--batch-size", task.batch_size, "--rounds", 1, "--updates", updates, "--output", output]
        _run("-m", "accel_train", "bench", name, *words, *data)
        rates = json.loads(output.read_text())["images_per_second"]
    return {key: rates[key]["median"] for key in ("limit", "input", "trainer")}


def _script(script: str, *words: object) -> dict[str, float]:
    found: dict[str, float] = json.loads(_run(HERE / script, *words).splitlines()[-1])
    return found


def _run(*words: object) -> str:
    line = [sys.executable, *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, env=tasks.environment())
    if done.returncode:
        raise SystemExit(f"{' '.join(line)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def _has_lightning() -> bool:
    if importlib.util.find_spec("lightning"):
        return True
    print("Lightning is left out: it is not installed (pip install 'accel-train[bench]')")
    return False


def rows(measured: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table, two columns a task."""
    head = [""]
    for name, found in measured.items():
        head += [f"{name}, batch {found['batch_size']}: images/s", "trainer is"]
    table = []
    for key, name in NAMES.items():
        if not any(key in found["images_per_second"] for found in measured.values()):
            continue
        workers = dict.fromkeys(found["workers"].get(key.partition(",")[0]) for found in measured.values())
        row = [name + (f" ({' and '.join(map(str, workers))} workers)" if None not in workers else "")]
        for found in measured.values():
            rate = found["images_per_second"].get(key)
            share = found["trainer divided by"].get(key)
            row.append(f"{rate['median']:,.0f} ({rate['low']:,.0f} to {rate['high']:,.0f})" if rate else "")
            row.append(f"{share['median']:.2f}x ({share['low']:.2f} to {share['high']:.2f})" if share else "")
        table.append(row)
    return head, table


def show(measured: dict[str, Any]) -> None:
    head, table = rows(measured)
    print()
    print_table(head, table)


def markdown(figures: dict[str, Any]) -> str:
    head, table = rows(figures["tasks"])
    lines = [" | ".join(["", *head, ""]).strip(), "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(row)} |" for row in table]
    data = ", ".join(f"{name}: {found['data']} images" for name, found in figures["tasks"].items())
    note = f"Medians of {figures['rounds']} rounds, in brackets their quartiles. {data}."
    return "\n".join([*lines, "", note, document.caption(figures["circumstances"]), "", "![](benchmarks.svg)"])


def plot(measured: dict[str, Any], path: Path) -> None:
    """Bars: the share of the limit that each contestant reaches; the lines on them are the quartiles."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "accel_train"  # the same figures make the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(measured), figsize=(5 * len(measured), 3.2), layout="constrained")
    for axis, (name, found) in zip(axes, measured.items(), strict=True):
        rates = {key: rate for key, rate in found["images_per_second"].items() if key not in ("limit", "input")}
        limit = found["images_per_second"]["limit"]["median"]
        shares = [rate["median"] / limit for rate in rates.values()]
        below = [(rate["median"] - rate["low"]) / limit for rate in rates.values()]
        above = [(rate["high"] - rate["median"]) / limit for rate in rates.values()]
        colours = ["#6aaee6" if key == "trainer" else "#b0b8c0" for key in rates]
        bars = axis.barh(list(rates), shares, xerr=[below, above], color=colours)
        axis.bar_label(bars, [f"{share:.0%}" for share in shares], label_type="center")
        axis.axvline(1, color="black", linewidth=1, linestyle="--")
        axis.set(title=f"{name}, batch {found['batch_size']}", xlabel="share of the limit", xlim=(0, 1.25))
        axis.invert_yaxis()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
