"""Several runs beside each other: settings, means over seeds, Welch's test, speed, a row for each in the CSV file."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run
from scipy.stats import ttest_ind

from accel_train import api, cli
from accel_train.tools.report.report import ReportResult

FIRST, SECOND = [0.90, 0.91, 0.92], [0.94, 0.95, 0.97]


def made(folder: Path, *words: object, accuracy: float | None = None, processes: int = 1, speed: float = 100.0) -> Path:
    figures: dict[str, Any] = {} if accuracy is None else {"test_accuracy": accuracy, "test_loss": 1 - accuracy}
    return make_run(folder, *words, world_size=processes, images_per_second=speed, **figures)


@pytest.fixture
def seeds(tmp_path: Path) -> list[Path]:
    """Two settings with three seeds each."""
    return [
        made(tmp_path / f"{lr}-{seed}", "--optim.lr", lr, "--seed", seed, accuracy=accuracy)
        for lr, values in ((0.1, FIRST), (0.2, SECOND))
        for seed, accuracy in enumerate(values)
    ]


def rows(result: ReportResult, title: str) -> list[dict[str, str]]:
    tables = {table.title: table for table in result.tables}
    return [dict(zip(tables[title].head, row, strict=True)) for row in tables[title].rows]


def test_settings_with_several_seeds_are_compared(seeds: list[Path]) -> None:
    result = api.report(*seeds)
    runs = rows(result, "runs")
    assert [run["optim.lr"] for run in runs] == ["0.1"] * 3 + ["0.2"] * 3
    assert [run["test accuracy"] for run in runs] == ["90.00%", "91.00%", "92.00%", "94.00%", "95.00%", "97.00%"]
    means = {row["setting"]: row for row in rows(result, "over seeds") if row["metric"] == "test accuracy"}
    assert (means["optim.lr=0.1"]["mean"], means["optim.lr=0.1"]["standard deviation"]) == ("91.00%", "1.00%")
    (difference,) = rows(result, "differences")
    test = ttest_ind(SECOND, FIRST, equal_var=False)
    low, high = test.confidence_interval(0.95)
    assert difference["difference"] == "+4.33%" and difference["p (Welch)"] == f"{test.pvalue:.2g}"
    assert difference["95 % interval"] == f"{low:+.2%} to {high:+.2%}"
    with Path(result.csv or "").open() as file:
        listed = list(csv.DictReader(file))
    assert [float(row["test_accuracy"]) for row in listed] == FIRST + SECOND and listed[3]["optim.lr"] == "0.2"


def test_the_page_shows_the_curves_and_loads_nothing(seeds: list[Path]) -> None:
    page = api.report(*seeds).path.read_text()
    assert page.count("<svg") == 2 and "optim.lr=0.2" in page
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page


def test_the_speed_over_processes_is_of_runs_of_one_setting(tmp_path: Path) -> None:
    runs = [made(tmp_path / f"{n}", processes=n, speed=speed) for n, speed in ((2, 180.0), (1, 100.0), (4, 400.0))]
    other = made(tmp_path / "other", "--optim.lr", 0.5, processes=4, speed=50.0)
    found = rows(api.report(*runs, other), "speed")
    assert [(row["processes"], row["speed-up (efficiency)"]) for row in found] == [
        ("1", ""), ("2", "1.80x (90%)"), ("4", "4.00x (100%)"), ("4", ""),
    ]  # fmt: skip


def test_what_cannot_be_judged_is_left_out(tmp_path: Path) -> None:
    """One seed of a setting; a setting whose seeds are equal; a run that is not finished; a damaged number."""
    two = [made(tmp_path / "a", accuracy=0.5), made(tmp_path / "b", "--optim.lr", 0.3, accuracy=0.6)]
    assert {table.title for table in api.report(*two).tables} == {"runs", "speed"}
    same = [
        made(tmp_path / f"c{lr}-{seed}", "--seed", seed, "--optim.lr", lr, accuracy=lr)
        for lr in (0.3, 0.4)
        for seed in (1, 2)
    ]
    (difference,) = rows(api.report(*same), "differences")
    assert (difference["difference"], difference["p (Welch)"]) == ("+10.00%", "")
    (two[0] / "result.json").unlink()
    (two[0] / "status.json").write_text(json.dumps({"state": "training", "epoch": 1, "update": 3}))
    (two[1] / "result.json").write_text(json.dumps({"test_accuracy": "much", "world_size": [1]}))
    first, second = rows(api.report(*two), "runs")
    assert " at epoch 1 of " in first["state"]
    assert "test accuracy" not in second


def test_the_terminal_has_the_tables_and_names_the_files(seeds: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = seeds[0].parent
    assert cli.main(["report", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "over seeds:" in printed and "p (Welch)" in printed
    assert f"report: {folder / 'report.html'}" in printed and f"numbers: {folder / 'report.csv'}" in printed
