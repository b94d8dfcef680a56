"""The table and the plot of finished runs."""

import csv
import json
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

from accel_train.bench.scaling import plot, speed_ups
from accel_train.cli import main


def finished(run: Path, processes: int, speed: float) -> str:
    run.mkdir()
    (run / "result.json").write_text(json.dumps({"world_size": processes, "images_per_second": speed}))
    return str(run)


def written(run: Path, content: bytes) -> str:
    run.mkdir()
    (run / "result.json").write_bytes(content)
    return str(run)


def texts(path: Path) -> set[str]:
    picture = xml.etree.ElementTree.parse(path).getroot()
    return {element.text or "" for element in picture.iter("{http://www.w3.org/2000/svg}text")}


def test_speed_up_and_efficiency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    runs = [finished(tmp_path / "b", 4, 300.0), finished(tmp_path / "a", 2, 200.0), finished(tmp_path / "c", 8, 800.0)]
    assert main(["scaling", *runs]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert table[1:4] == [["2", "200", "1.00", "100%"], ["4", "300", "1.50", "75%"], ["8", "800", "4.00", "100%"]]
    with (tmp_path / "scaling.csv").open() as file:
        assert [float(row["efficiency"]) for row in csv.DictReader(file)] == [1.0, 0.75, 1.0]
    assert {"1.00x (100%)", "1.50x (75%)", "4.00x (100%)"} <= texts(tmp_path / "scaling.svg")


def test_without_matplotlib_there_is_a_table_and_no_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["scaling", finished(tmp_path / "a", 2, 200.0)]) == 1
    out, err = capsys.readouterr()
    assert "speed-up" in out and (tmp_path / "scaling.csv").exists() and not (tmp_path / "scaling.svg").exists()
    assert err == (
        "accel-train: warning: matplotlib is not installed, so no plot was drawn: pip install 'accel-train[plot]'.\n"
    )


def test_runs_that_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = finished(tmp_path / "one", 1, 1.0)
    for arguments, message in (
        ([], ""),
        ([str(tmp_path)], "not a finished run"),
        ([one, finished(tmp_path / "two", 1, 2.0)], "second run of 1 processes"),
        ([finished(tmp_path / "three", 1, 0.0)], "lacks a positive world_size or images_per_second"),
        ([written(tmp_path / "four", b"[1]")], "lacks a positive world_size or images_per_second"),
        ([written(tmp_path / "five", b"\xff")], "not a finished run"),
    ):
        assert main(["scaling", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_several_curves_share_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curves = {"strong": speed_ups({1: 100.0, 2: 150.0}), "weak": speed_ups({1: 100.0, 2: 200.0, 4: 300.0})}
    plot(curves, tmp_path / "one.svg")
    assert {"strong", "weak", "1.50x (75%)", "3.00x (75%)", "1", "2", "4"} <= texts(tmp_path / "one.svg")
    plot(curves, tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()  # no date, no random ids
