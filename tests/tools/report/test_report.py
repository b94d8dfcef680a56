"""`accel-train report`: true figures, one file, read by a real browser."""

from __future__ import annotations

import builtins
import json
import re
import shutil
import time
import warnings
from html import unescape
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
from browser import CHROMIUM, in_browser
from scipy.special import softmax
from sklearn.metrics import accuracy_score, balanced_accuracy_score, confusion_matrix, log_loss
from sklearn.metrics import precision_recall_fscore_support as figures_of_classes

from accel_train import cli
from accel_train.errors import COMMANDS, one_line
from accel_train.records.summary import typed_program

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture(scope="module")
def run(digits_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(digits_run, tmp_path_factory.mktemp("report") / "run"))


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    assert cli.main(["evaluate", str(run), "--predictions", str(run / "predictions.npz")]) == 0
    assert cli.main(["report", str(run)]) == 0
    return (run / "report.html").read_text()


def section(page: str, name: str) -> str:
    found = re.search(rf'<section id="{name}">.*?</section>', page, re.DOTALL)
    assert found, name
    return found[0]


def rows(html: str) -> list[list[str]]:
    """The cells of each row of the tables in `html`."""
    return [
        [unescape(re.sub(r"<[^>]+>", "", cell)).strip() for cell in re.findall(r"<t[dh].*?</t[dh]>", row, re.DOTALL)]
        for row in re.findall(r"<tr>.*?</tr>", html, re.DOTALL)
    ]


@pytest.mark.ci
def test_all_figures_are_those_of_scikit_learn_from_the_predictions(run: Path, page: str) -> None:
    found = helpers.read_predictions(run / "predictions.npz")
    predicted = found.logits.argmax(1)
    macro = figures_of_classes(found.labels, predicted, average="macro", zero_division=0)
    shown = {row[0]: row[-1] for row in rows(section(page, "metrics"))}  # the last column is the EMA's
    assert shown["accuracy"] == f"{accuracy_score(found.labels, predicted):.2%}"
    assert shown["loss"] == f"{log_loss(found.labels, softmax(found.logits.astype(np.float64), axis=1)):.4f}"
    assert shown["balanced accuracy"] == f"{balanced_accuracy_score(found.labels, predicted):.2%}"
    for number, name in enumerate(("macro precision", "macro recall", "macro F1")):
        assert shown[name] == f"{macro[number]:.2%}"
    counts = confusion_matrix(found.labels, predicted)
    heat = rows(section(page, "confusion"))[1:]
    assert [[int(cell or 0) for cell in row[1:]] for row in heat] == counts.tolist()
    each = figures_of_classes(found.labels, predicted, zero_division=0)
    head, *table = rows(section(page, "classes"))
    data = json.loads((run / "data.json").read_text())
    for split in ("train", "val", "test"):
        column = head.index(f"{split} images")
        assert [row[column] for row in table] == [str(count) for count in data[split]["class_images"]]
    assert data["test"]["class_images"] == each[3].tolist()
    for name, values in zip(("precision", "recall", "f1"), each[:3], strict=True):
        assert [row[head.index(name)] for row in table] == [f"{value:.2%}" for value in values]


def test_the_worst_images_are_the_wrong_ones_with_the_highest_loss(run: Path, page: str) -> None:
    found = helpers.read_predictions(run / "predictions.npz")
    chances = softmax(found.logits.astype(np.float64), axis=1)
    wrong = np.flatnonzero(found.logits.argmax(1) != found.labels)
    worst = wrong[np.argsort(chances[wrong, found.labels[wrong]])][:20]
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", section(page, "worst"), re.DOTALL)
    told = [re.sub(r"<[^>]+>", "", caption).split() for caption in captions]
    assert len(told) == min(20, len(wrong))
    expected = [
        ["said", f"{row.argmax()}", f"({row.max():.1%})true", f"{label}", f"({row[label]:.1%})digits"]
        for row, label in ((chances[id], found.labels[id]) for id in worst)
    ]
    assert [words[:5] for words in told] == expected
    assert section(page, "worst").count("data:image/png;base64,") == len(told)


def test_the_page_loads_nothing(page: str) -> None:
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]+"', page)
    assert "@import" not in page and "url(http" not in page
    assert len(page) < 400_000
    assert {"loss", "accuracy", "learning rate", "images/s"} <= {*re.findall(r'aria-label="([^"]+)"', page)}
    for chart in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        assert not re.search(r"#0[1-3]0", chart)  # each placeholder became a colour of the page
        assert "var(--text)" in chart


@pytest.mark.ci
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.parametrize("width", [390, 1440])
def test_a_browser_shows_it_without_a_horizontal_scroll_bar(page: str, tmp_path: Path, width: int) -> None:
    script = """(() => {
        const root = document.documentElement;
        const wide = root.scrollWidth > root.clientWidth;
        const heads = [...document.querySelectorAll("#classes th")].map(head => head.textContent);
        const column = heads.indexOf("recall");
        const button = document.querySelectorAll("#classes button.sort")[column];
        button.click();
        const lines = () => [...document.querySelectorAll("#classes tbody tr")];
        const recalls = () => lines().map(row => row.cells[column].textContent);
        const up = recalls(); button.click();
        const images = [...document.images].map(image => image.complete && image.naturalWidth);
        return {wide, up, down: recalls(), images, problems: window.problems};
    })()"""
    seen = in_browser(page, tmp_path, width, script)
    assert not seen["wide"] and seen["problems"] == []
    assert seen["images"] and set(seen["images"]) == {8}
    recalls = [float(text.rstrip("%")) for text in seen["up"]]
    assert recalls == sorted(recalls) and len(recalls) == 10
    assert [float(text.rstrip("%")) for text in seen["down"]] == sorted(recalls, reverse=True)


@pytest.mark.ci
def test_starts_and_differences_from_the_recipe_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    words = ["train", "digits", "--output-dir", str(run), "--optim.lr", "0.02", "--schedule.name", "constant"]
    assert cli.main([*words, "--epochs", "1"]) == 0
    helpers.unfinish(run)
    assert cli.main([*words, "--epochs", "2", "--allow-change", "epochs"]) == 0
    assert f"report {run}" in capsys.readouterr().out  # the last screen names the command
    with (run / "metrics.jsonl").open("a") as file:
        file.write("half a li")
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"skipped_updates": 1}))
    starts = json.loads((run / "starts.json").read_text())
    starts["starts"][0] |= {"repeated": 100, "finished": False}
    (run / "starts.json").write_text(json.dumps(starts))
    assert cli.main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    line = f"{typed_program()} evaluate {run}"
    assert line in page and line in capsys.readouterr().out.replace("\n", "") and 'id="worst"' not in page
    differs = {row[0]: row[1:] for row in rows(section(page, "configuration").partition("<details>")[0])}
    assert differs["optim.lr"] == ["0.05", "0.02"] and differs["schedule.name"] == ["cosine", "constant"]
    costs = dict(rows(section(page, "machine")))
    assert " in 2 starts: " in costs["time"] and "% done twice" in costs["time"] and costs["skipped updates"] == "1"


@pytest.mark.ci
def test_it_says_when_the_evaluation_is_older_than_the_weights(run: Path, page: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    assert "has trained since" not in page
    status = json.loads((copy / "status.json").read_text())
    (copy / "status.json").write_text(json.dumps(status | {"time": time.time() + 60}))
    assert cli.main(["report", str(copy)]) == 0
    assert "The run has trained since it was evaluated." in (copy / "report.html").read_text()


@pytest.mark.ci
def test_it_says_when_the_evaluation_is_of_a_checkpoint(run: Path, page: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    assert "not of the final weights" not in page
    record = json.loads((copy / "evaluation-test.json").read_text())
    record["model"]["weights"] = "checkpoints/update-00000001/model.safetensors"
    (copy / "evaluation-test.json").write_text(json.dumps(record))
    assert cli.main(["report", str(copy)]) == 0
    said = "The evaluation is of checkpoints/update-00000001/model.safetensors, not of the final weights."
    assert said in (copy / "report.html").read_text()


def test_images_of_other_data_are_not_shown(run: Path, page: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    record = json.loads((copy / "evaluation-test.json").read_text())
    first, second, *_ = record["ema"]["worst"]
    first["name"], second["id"] = "another image", 10**9
    (copy / "evaluation-test.json").write_text(json.dumps(record))
    assert cli.main(["report", str(copy)]) == 0
    count = section((copy / "report.html").read_text(), "worst").count("<figure>")
    assert count == section(page, "worst").count("<figure>") - 2


@pytest.mark.parametrize("name", ["a$b^{$", "_hidden", "\x1b[2J\u202ea\nb", "\udcff", "\u6f22\u5b57 \U0001f469"])
def test_any_name_of_a_run_is_shown_as_it_is(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    shutil.copytree(run, tmp_path / name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cli.main(["report", str(tmp_path / name), str(run), "--output", str(tmp_path / "page.html")]) == 0
    assert one_line(name) in unescape(section((tmp_path / "page.html").read_text(), "runs"))
    assert one_line(name) in (tmp_path / "page.csv").read_text()
    assert not COMMANDS.search(capsys.readouterr().out.replace("\n", ""))


def test_a_run_without_data_and_a_stopped_one_have_a_report_too(run: Path, page: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    config = (copy / "config.yaml").read_text().replace("name: digits\n", "name: folder\n", 1)
    (copy / "config.yaml").write_text(config)
    assert cli.main(["report", str(copy)]) == 0
    without_images = (copy / "report.html").read_text()
    assert "The images are left out: --data.root data" in without_images and 'id="worst"' not in without_images
    for name in ("result.json", "evaluation-test.json", "environment.json", "metrics.jsonl"):
        (copy / name).unlink()
    assert cli.main(["report", str(copy)]) == 0
    assert f"need: {typed_program()} evaluate {copy}" in (copy / "report.html").read_text()


@pytest.mark.parametrize(("module", "name"), [("jinja2", "Jinja2"), ("matplotlib", "matplotlib")])
def test_a_missing_library_is_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    real = builtins.__import__

    def without(wanted: str, *arguments: Any) -> Any:
        if wanted.split(".")[0] == module:
            raise ImportError(wanted)
        return real(wanted, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    assert cli.main(["report", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{name} is not installed" in line and "pip install 'accel-train[" in line


def test_what_is_no_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path), str(tmp_path / "none")]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and "it has no config.yaml" in told[0] and "there is no such folder" in told[1]
