"""The table and the plot of finished runs."""

import csv
import json
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


def test_speed_up_and_efficiency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [finished(tmp_path / "b", 4, 300.0), finished(tmp_path / "a", 2, 200.0), finished(tmp_path / "c", 8, 800.0)]
    assert main(["scaling", *runs]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert table[1:4] == [["2", "200", "1.00", "100%"], ["4", "300", "1.50", "75%"], ["8", "800", "4.00", "100%"]]
    with (tmp_path / "scaling.csv").open() as file:
        assert [float(row["efficiency"]) for row in csv.DictReader(file)] == [1.0, 0.75, 1.0]
    picture = xml.etree.ElementTree.parse(tmp_path / "scaling.svg").getroot()
    marks = picture.findall("{http://www.w3.org/2000/svg}circle")
    heights = [float(mark.attrib["cy"]) for mark in marks]
    assert heights == sorted(heights, reverse=True) and len(heights) == 3


def test_runs_that_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = finished(tmp_path / "one", 1, 1.0)
    for arguments, message in (
        ([], ""),
        ([str(tmp_path)], "not a finished run"),
        ([one, finished(tmp_path / "two", 1, 2.0)], "second run of 1 processes"),
        ([finished(tmp_path / "three", 1, 0.0)], "no number of processes and images a second"),
        ([written(tmp_path / "four", b"[1]")], "no number of processes and images a second"),
        ([written(tmp_path / "five", b"\xff")], "not a finished run"),
    ):
        assert main(["scaling", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_several_curves_share_a_plot() -> None:
    curves = {"strong": speed_ups({1: 100.0, 2: 150.0}), "weak": speed_ups({1: 100.0, 2: 200.0, 4: 300.0})}
    picture = xml.etree.ElementTree.fromstring(plot(curves))
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"strong", "weak", "1.50x (75%)", "3.00x (75%)"} <= set(texts)
    assert [text for text in texts if text in ("1", "2", "4")] == ["1", "2", "4"]
    assert len(picture.findall("{http://www.w3.org/2000/svg}circle")) == 5
