"""benchmarks/: the scripts run, and write their figures to the right place. No test asserts a time."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import helpers
import psutil
import pytest

BENCHMARKS = helpers.ROOT / "benchmarks"


@pytest.fixture
def document(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("document")


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("turns")


def figures(median: float, low: float, high: float) -> dict[str, Any]:
    return {"tasks": {"digits": {"trainer": {"median": median, "low": low, "high": high}, "updates": 3}}}


def test_a_table_replaces_the_last_one_and_is_compared_with_it(tmp_path: Path, document: Any) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text("before\n<!-- one -->\nold\n<!-- end of one -->\nbetween\n<!-- two --><!-- end of two -->\nafter\n")
    assert document.write("one", "| a\\1 |", figures(100.0, 99.0, 101.0), tmp_path) == []
    assert document.write("two", "x", figures(1.0, 1.0, 1.0), tmp_path) == []
    assert page.read_text() == (
        "before\n<!-- one -->\n| a\\1 |\n<!-- end of one -->\nbetween\n<!-- two -->\nx\n<!-- end of two -->\nafter\n"
    )
    assert document.write("one", "new", figures(101.5, 101.0, 102.0), tmp_path) == []  # within the spread
    moved = document.write("one", "newer", figures(110.0, 109.0, 111.0), tmp_path)
    assert moved == ["tasks digits trainer: 101.5 -> 110 (+8.4%)"]
    rounds = figures(110.0, 109.0, 111.0)
    rounds["tasks"]["digits"]["trainer"]["rounds"] = [109.0, 110.0, 111.0]
    assert document.write("one", "newer", rounds, tmp_path) == []
    stored = json.loads((tmp_path / "benchmarks.json").read_text())  # without the rounds
    assert stored == {"one": figures(110.0, 109.0, 111.0), "two": figures(1.0, 1.0, 1.0)}


def test_the_page_has_a_place_for_each_table() -> None:
    page = (helpers.ROOT / "docs" / "benchmarks.md").read_text()
    for name in ("compare", "input", "waiting", "scaling", "race", "torture"):
        assert page.count(f"<!-- {name} -->") == page.count(f"<!-- end of {name} -->") == 1


@pytest.mark.slow
@pytest.mark.timeout(620)
@pytest.mark.parametrize("script", ["compare.py", "scaling.py"])
def test_a_quick_run_prints_its_table_and_writes_nothing(script: str) -> None:
    def state() -> dict[Path, float]:
        return {path: path.stat().st_mtime for path in (helpers.ROOT / "docs").iterdir()}

    before = state()
    line = [sys.executable, str(BENCHMARKS / script), "--quick"]
    done = subprocess.run(line, env=helpers.environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    expected = ["accel_train, all on", "tutorial script"] if script == "compare.py" else ["fixed global batch", "100%"]
    assert all(text in done.stdout for text in expected)
    assert state() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [("tutorial.py",), ("tutorial.py", "--second-pass"), ("timm_loader.py",), ("lightning_script.py",), ("limit.py",)],
)
def test_each_contestant_tells_how_far_it_is(script: tuple[str, ...]) -> None:
    if script[0] == "lightning_script.py":
        pytest.importorskip("lightning")
    words = ["mnist_cnn", *script[1:], "--updates", "4", "--every", "2"]
    done = helpers.python(BENCHMARKS / script[0], *words)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(found) for found in re.findall(r'\{"update".*\}', done.stdout)]
    assert [line["update"] for line in lines] == [2, 4]
    assert all(line["images_per_second"] > 0 for line in lines)


COUNTER = """
import json, subprocess, sys, time
if len(sys.argv) > 1:  # a process that it starts, as data workers are
    while True:
        print(json.dumps({"worker": True}), flush=True)
        time.sleep(0.01)
subprocess.Popen([sys.executable, __file__, "worker"])
for number in range(1, 10**6):
    time.sleep(0.01)
    print(json.dumps({"update": number}), flush=True)
    if number == int(open("last").read()):
        sys.exit("no more")
"""


@pytest.mark.slow
def test_who_has_no_turn_stands_still_and_so_do_its_processes(tmp_path: Path, turns: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "counter.py").write_text(COUNTER)
    (tmp_path / "last").write_text("26")
    starts = {
        name: lambda folder: turns.Contestant([tmp_path / "counter.py"], folder / "log", updates=5, images=4)
        for name in ("a", "b")
    }
    with turns.contest(starts) as contestants:
        found = list(turns.rounds(contestants, 3))
        assert all(rate > 0 for each in found for rate in each.values())
        a, b = contestants["a"], contestants["b"]
        assert a.goal == b.goal == 20  # a first turn to warm up, and three
        before = a.log.read_bytes()
        b.turn()
        time.sleep(0.1)
        assert a.log.read_bytes() == before
        family = [*a.family, *b.family]
        assert len(family) == 4
        a.turn()
        with pytest.raises(SystemExit, match=r"has ended(.|\n)*no more"):
            a.turn()
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.wait(10)
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)


@pytest.mark.ci
def test_the_plot_is_drawn_from_the_stored_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    stored = json.loads((helpers.ROOT / "docs" / "benchmarks.json").read_text())
    importlib.import_module("compare").plot(stored["compare"]["tasks"], tmp_path / "plot.svg")
    share = stored["compare"]["tasks"]["mnist_cnn"]["divided by the limit"]["trainer"]["median"]
    assert f"{share:.0%}" in (tmp_path / "plot.svg").read_text()
