"""The page of several runs: what it says, when it says nothing, and how a real browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import IMAGES, answers, config_of, make_run, write_predictions

from accel_train import api, cli
from accel_train.report.report import ReportResult

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def compare(*runs: Path, output: Path | None = None) -> tuple[ReportResult, str]:
    """The result of a report of these runs, and the text of its page."""
    result = api.report(*runs, evaluates=False, **({"output": output} if output else {}))
    return result, result.path.read_text()


def section(page: str, name: str) -> str:
    found = re.search(rf'<section id="{name}">.*?</section>', page, re.DOTALL)
    assert found, name
    return found[0]


def text_of(html: str) -> str:
    """What a person reads, without spaces that a browser does not show."""
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", html))).strip()


def verdict(page: str) -> str:
    found = re.search(r'<div class="verdict.*?</div>', page, re.DOTALL)
    assert found
    return text_of(found[0])


def rows(html: str) -> list[list[str]]:
    """The cells of each row of the tables in `html`."""
    return [
        [text_of(cell) for cell in re.findall(r"<t[dh].*?</t[dh]>", row, re.DOTALL)]
        for row in re.findall(r"<tr.*?</tr>", html, re.DOTALL)
    ]


def some(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).choice(IMAGES, count, replace=False).tolist()


def test_two_models_are_compared_image_by_image(tmp_path: Path) -> None:
    """40 images wrong of one and 10 of the other, 4 of them by both: 36 and 6 that only one of them has right."""
    first = make_run(tmp_path / "a", answers(range(40)), "--optim.lr", 0.1)
    second = make_run(tmp_path / "b", answers([*range(4), *range(100, 106)]), "--optim.lr", 0.2)
    (second / "report.html").write_text("a report")
    result, page = compare(first, second)
    (difference,) = result.differences
    assert difference.counts == (6, 36) and difference.images == IMAGES and difference.value == 30 / IMAGES
    assert difference.p_value == pytest.approx(3.6e-6, rel=0.05) and difference.is_more_than_noise
    assert difference.interval[0] < 30 / IMAGES < difference.interval[1]
    said = verdict(page)
    assert said.startswith("As trained here, b is better than a by 7.50 points of test accuracy (95% interval +4.5")
    assert "Whether the settings are better cannot be told from one run each." in said
    assert result.path == first / "comparison.html" and 'href="../b/report.html"' in page
    assert page.index('id="settings"') < page.index('id="results"')
    assert ["optim.lr", "0.1", "0.2"] in rows(section(page, "settings"))
    shown = {row[0]: row[1:] for row in rows(section(page, "results"))}
    assert shown["test accuracy"] == ["90.00% 86.67 to 92.57%", "97.50% 95.46 to 98.64%"]  # Wilson's interval
    assert shown["test loss"] == ["0.5000", "0.5000"]
    cost = {row[0]: row[1:] for row in rows(section(page, "cost"))}
    assert cost["speed"] == ["2,955 images/s"] * 2 and cost["training, without the first update"] == ["3.0 s"] * 2
    assert "test_loss" not in page and "train_seconds" not in page


def test_the_images_on_which_they_differ_are_shown_both_ways(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", answers([3, 17, 250]))
    second = make_run(tmp_path / "b", answers([5]))
    _, page = compare(first, second)
    found = section(page, "disagree")
    sides = re.findall(r'<div class="side">.*?(?=<div class="side">|<h3>|</section>)', found, re.DOTALL)
    named = [re.findall(r'alt="([^"]+)"', side) for side in sides]
    assert named == [
        [f"synthetic test image {id}" for id in (250, 17, 3)],
        ["synthetic test image 5"],
    ]  # the surest first
    assert "3 images: b right, a wrong" in text_of(sides[0]) and "1 image: a right, b wrong" in text_of(sides[1])
    assert "right 0 (92%) wrong 1 (92%)" in text_of(sides[0])  # image 250 is of class 0
    assert found.count("data:image/png;base64,") == 4
    heat = rows(found)[1:]
    assert heat[0][1:3] == ["+1", "\u22121"] and heat[5][6:8] == ["\u22121", "+1"]


def test_many_classes_have_the_pairs_that_changed_most(tmp_path: Path) -> None:
    wrong = [0, 30, 60, 90, 120]  # all of class 0, said to be class 1
    first = make_run(tmp_path / "a", answers(wrong, classes=30))
    second = make_run(tmp_path / "b", answers([1], classes=30))
    _, page = compare(first, second)
    assert '<table class="heat">' not in page
    assert ["0", "1", "5", "0", "\u22125"] in rows(section(page, "disagree"))


def test_little_difference_is_not_told_from_noise(tmp_path: Path) -> None:
    result, page = compare(make_run(tmp_path / "a", answers(range(5))), make_run(tmp_path / "b", answers([9, 11])))
    assert not result.differences[0].is_more_than_noise and result.differences[0].test == "McNemar's exact test"
    assert verdict(page).startswith("These runs have the same settings: there is one setting")
    other = make_run(tmp_path / "c", answers([9, 11]), "--optim.lr", 0.3)
    _, page = compare(tmp_path / "a", other)
    assert verdict(page).startswith(
        "It cannot be told from these runs whether c or a is better: c has 0.75 points more"
    )
    same, page = compare(tmp_path / "b", other)
    assert same.differences[0].p_value == 1 and "c has as much test accuracy (95%" in verdict(page)


@pytest.mark.ci
def test_settings_with_seeds_are_judged_by_welch(tmp_path: Path) -> None:
    wrong = {0.1: (40, 44, 38), 0.2: (20, 26, 22)}
    runs = [
        make_run(tmp_path / f"{lr}-{seed}", answers(some(count, seed)), "--optim.lr", lr, "--seed", seed)
        for lr, counts in wrong.items()
        for seed, count in enumerate(counts)
    ]
    result, page = compare(*runs)
    settings, *models = result.differences
    from scipy import stats

    expected = stats.ttest_ind(*([1 - count / IMAGES for count in wrong[lr]] for lr in (0.2, 0.1)), equal_var=False)
    assert (settings.kind, settings.counts, settings.test) == ("settings", (3, 3), "Welch's t-test")
    assert settings.p_value == pytest.approx(expected.pvalue) and settings.is_more_than_noise
    assert settings.interval == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert verdict(page).startswith("optim.lr 0.2 is better than optim.lr 0.1 by 4.50 points of test accuracy (95%")
    assert "more than the noise of seeds (3 and 3 runs)" in verdict(page)
    assert len(models) == 5 and {each.first for each in models} == {"0.1-0"}  # more than four: against the first
    assert "Here are 3 of the 5 pairs above: those with different settings come first." in section(page, "disagree")
    by_setting = {row[0]: row[1:] for row in rows(section(page, "by-setting"))}
    assert by_setting["optim.lr 0.1"][:2] == ["3", "89.83%"] and by_setting["optim.lr 0.1"][3] == "0.76"
    assert result.over_seeds[0][:4] == ["figure", "optim.lr", "seeds", "mean"]
    assert rows(section(page, "seeds"))[1][:3] == ["test loss", "0.1", "3"]
    # Two seeds each, and more noise than difference.
    few = [make_run(tmp_path / f"few-{lr}-{seed}", answers(some(count, seed)), "--optim.lr", lr, "--seed", seed)
           for lr, counts in ((0.3, (20, 60)), (0.4, (30, 40))) for seed, count in enumerate(counts)]  # fmt: skip
    result, page = compare(*few)
    assert not result.differences[0].is_more_than_noise
    assert verdict(page).startswith("It cannot be told from these runs whether optim.lr 0.4 or optim.lr 0.3 is better")
    # Seeds that happen to give the same show no noise.
    even = [make_run(tmp_path / f"even-{lr}-{seed}", answers(some(count, seed)), "--optim.lr", lr, "--seed", seed)
            for lr, count in ((0.5, 20), (0.6, 21)) for seed in range(2)]  # fmt: skip
    result, page = compare(*even)
    assert "no spread to judge by" in result.differences[0].problem and result.differences[0].p_value is None
    assert "all runs of a setting have the same result" in page


def test_a_run_that_is_given_twice_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As two seeds it would show less noise than there is."""
    runs = [make_run(tmp_path / name, answers(some(20, seed)), "--seed", seed) for seed, name in enumerate("ab")]
    (tmp_path / "link").symlink_to(runs[0])
    once, _ = compare(*runs)
    again, _ = compare(*runs, tmp_path / "b/../a", tmp_path / "link")
    assert again.over_seeds == once.over_seeds and once.over_seeds[1][0][1] == "2"
    capsys.readouterr()
    assert cli.main(["report", str(runs[0]), f"{runs[0]}/", "--no-evaluate"]) == 0
    assert capsys.readouterr().out == f"report: {runs[0] / 'report.html'}\n"


def test_several_comparisons_are_adjusted(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", answers(range(20)), "--optim.lr", 1)]
    runs += [make_run(tmp_path / f"b{lr}", answers(range(9)), "--optim.lr", lr / 100) for lr in range(2, 14)]
    result, page = compare(*runs)
    assert all(each.p_value == pytest.approx(2**-10) for each in result.differences)
    assert all(each.adjusted_p_value == pytest.approx(12 * 2**-10) for each in result.differences)
    assert "12 of 12 differences between models, each against a, are more than noise." in verdict(page)
    assert "adjusted for 12 comparisons (Holm)" in verdict(page) and "has had luck, too" in verdict(page)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"images": 390}, "one was evaluated on 400 images, the other on 390"),
        ({"classes": 8}, "their classes differ: 10 and 8"),
        ({"names": [*"abcdefghij"]}, "their classes differ: class 0 is 0 and a"),
        ({"labels": np.zeros(IMAGES, np.int64)}, "the labels of the images differ"),
        ({"words": ("--data.test-limit", 400, "--seed", 1)}, "data.test-limit decides which images are in the test"),
        ({"paths": [f"data/{id}.png" for id in range(IMAGES)]}, "the images of one are files, those of the other are"),
        ({"nan": True}, "the output of the second is NaN or infinite for 3 of 400 images"),
        ({"empty": True}, "there are no predictions of b"),
    ],
)
def test_other_images_are_not_compared(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    first = make_run(tmp_path / "a", answers(range(40)))
    images, classes = change.get("images", IMAGES), change.get("classes", 10)
    logits = answers(range(10), classes, images)
    if "nan" in change:
        logits[5:8, 2] = np.nan
    second = make_run(
        tmp_path / "b", None if "empty" in change else logits, "--optim.lr", 0.2, *change.get("words", ()),
        names=change.get("names"), labels=change.get("labels"),
    )  # fmt: skip
    if "paths" in change:
        config = config_of(second, "--optim.lr", 0.2)
        write_predictions(second, logits, config, tuple("0123456789"), paths=change["paths"])
    result, page = compare(first, second)
    assert reason in result.differences[0].problem and result.differences[0].value is None
    assert not result.differences[0].is_more_than_noise
    assert verdict(page).startswith(
        f"It cannot be told from these runs which is better: {result.differences[0].problem}"
    )
    assert "not compared: " in section(page, "pairs") and 'id="disagree"' not in page


def test_files_are_the_same_in_another_folder_and_others_are_not(tmp_path: Path) -> None:
    runs = []
    for name, root, first in (("a", "/here/x", "0"), ("b", "/there", "0"), ("c", "/there", "other")):
        run = make_run(tmp_path / name, answers(range(5)))
        config = config_of(run, "--data.root", root)
        paths = [f"{root}/test/{first if id == 0 else id}.png" for id in range(IMAGES)]
        write_predictions(run, answers(range(5)), config, tuple("0123456789"), paths=paths)
        runs.append(run)
    result, _ = compare(*runs)
    assert [each.problem for each in result.differences] == [
        "",
        *["they are different files: image 0 is test/0.png and test/other.png"] * 2,
    ]


def test_several_labels_an_image_are_right_only_together(tmp_path: Path) -> None:
    labels = np.random.default_rng(0).random((IMAGES, 4)) < 0.4
    logits = [np.where(labels, 2, -2).astype(np.float32) for _ in range(2)]
    logits[0][:12, 1] *= -1
    logits[1][12:15, :2] *= -1
    runs = [make_run(tmp_path / name, each, "--optim.lr", lr, labels=labels)
            for name, each, lr in (("a", logits[0], 0.1), ("b", logits[1], 0.2))]  # fmt: skip
    result, page = compare(*runs)
    assert result.differences[0].figure == "all labels right" and result.differences[0].counts == (3, 12)
    assert "points of test images with all labels right" in verdict(page)
    assert "has all labels of the image right" in verdict(page)
    assert {row[0]: row[1:] for row in rows(section(page, "results"))}["test mean average precision"] == ["50.00%"] * 2


def test_a_figure_of_metrics_keeps_its_form(tmp_path: Path) -> None:
    runs = []
    for seed in range(2):
        chosen = ("--metrics", "top5_accuracy", "--seed", seed)
        run = make_run(tmp_path / str(seed), answers(some(20, seed)), *chosen, curves=True, test_top5_accuracy=0.97)
        text = (run / "metrics.jsonl").read_text()
        (run / "metrics.jsonl").write_text(text.replace('"accuracy"', '"top5_accuracy"'))
        runs.append(run)
    _, page = compare(*runs)
    assert ["test top-5 accuracy", "2", "97.00%", "0.00%"] in [row[:4] for row in rows(section(page, "seeds"))]
    chart = next(svg for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL) if "top-5" in svg)
    assert "%" in text_of(chart)


def test_unfinished_and_damaged_runs_are_named(tmp_path: Path) -> None:
    good = make_run(tmp_path / "good", answers(range(9)), "--optim.lr", 0.1)
    going = make_run(tmp_path / "going", None, "--optim.lr", 0.2)
    (going / "result.json").unlink()
    (going / "status.json").write_text(json.dumps({"state": "running", "epoch": 1, "update": 30}))
    odd = make_run(tmp_path / "odd", None, "--optim.lr", 0.3, test_accuracy="many", test_loss=None, train_seconds=[1])
    (odd / "metrics.jsonl").write_text('{"kind": "eval", "split": "test", "weights": "model", "loss": "x"}\nhalf a li')
    (odd / "predictions-test.npz").write_bytes(b"PK\x03\x04 damaged")
    (odd / "evaluation-test.json").write_text("{}")
    _, page = compare(good, going, odd)
    shown = {row[0]: row[1:] for row in rows(section(page, "results"))}
    assert shown["state"] == ["finished", "running at epoch 1 of 30, update 30", "finished"]
    assert shown["test accuracy"] == ["97.75% 95.78 to 98.81%", "not finished", "damaged"]
    assert shown["test loss"] == ["0.5000", "not finished", "NaN"]
    assert "Not finished, and judged by what there is so far: going (running at epoch 1" in verdict(page)
    notes = [text_of(note) for note in re.findall(r'<p class="note">.*?</p>', page)]
    assert any(note.startswith("odd: ") and "predictions" in note for note in notes) and len(notes) == 2


@pytest.mark.ci
def test_a_run_without_predictions_is_evaluated_once(digits_run: Path, tmp_path: Path, fresh_accelerate: None) -> None:
    runs = [Path(shutil.copytree(digits_run, tmp_path / name)) for name in ("a", "b")]
    result = api.report(*runs)
    assert result.differences[0].value == 0 and result.differences[0].images == 359
    kept = [(run / "predictions-test.npz").stat().st_mtime_ns for run in runs]
    assert "EMA" in rows(section(result.path.read_text(), "results"))[-1] or "weights" in result.path.read_text()
    again = api.report(*runs, output=tmp_path / "again.html")
    assert again.differences == result.differences
    assert [(run / "predictions-test.npz").stat().st_mtime_ns for run in runs] == kept


@pytest.mark.ci
def test_the_terminal_names_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(tmp_path / f"seed-{seed}", answers(some(20, seed)), "--seed", seed) for seed in range(10)]
    assert cli.main(["report", *map(str, runs), "--no-evaluate", "true"]) == 0
    assert f"report: {runs[0] / 'comparison.html'}" in capsys.readouterr().out
    assert cli.main(["report", str(tmp_path), "--no-evaluate", "true"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert rows(section(page, "settings"))[0] == ["run", "seed"] and len(rows(section(page, "settings"))) == 11
    assert "These runs differ in their seed alone" in verdict(page) and "of 10 runs" in verdict(page)


def in_frames(page: str, folder: Path, widths: Sequence[int], script: str) -> list[Any]:
    """What `script` (JavaScript, an expression of `document`) gives on the page in frames of these widths, in pixels:
    headless Chromium itself is never narrower than 500."""
    assert CHROMIUM
    (folder / "framed.html").write_text(page)
    frames = [
        f'<iframe src="framed.html" style="border: 0; width: {width}px; height: 2000px"></iframe>' for width in widths
    ]
    (folder / "frame.html").write_text(
        "".join(frames)
        + "<script>window.onload = () => { try { const seen = [...document.querySelectorAll('iframe')].map("
        f"frame => (document => {script})(frame.contentDocument)); document.title = JSON.stringify(seen) }}"
        "catch (error) { document.title = String(error) } }</script>"
    )
    place = [f"--window-size={max(widths) + 100},2000", f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom",
         *place, (folder / "frame.html").as_uri()],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title, done.stderr
    return list(json.loads(unescape(title[1])))


OVERFLOW = """(() => {
    const root = document.documentElement, wide = [];
    for (const each of document.querySelectorAll("body *")) {
        if (each.closest("svg") || each.closest(".scroll") && !each.matches(".scroll")) continue;
        const box = each.getBoundingClientRect();
        if (box.right > root.clientWidth + 1 || box.left < -1) wide.push(each.tagName + "." + each.className);
    }
    const verdict = document.querySelector(".verdict").getBoundingClientRect();
    const images = [...document.images].map(image => image.complete && image.naturalWidth);
    return {wide, page: root.scrollWidth - root.clientWidth, verdict: verdict.top, images, width: root.clientWidth};
})()"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_a_browser_shows_it_on_any_screen(tmp_path: Path, classes: int) -> None:
    names = [f"class number {number} with_a_long_name_without_a_space" for number in range(classes)]
    images = max(IMAGES, 2 * classes)
    runs = [
        make_run(
            tmp_path / f"a-run-with-a-rather-long-name,optim.lr={lr},seed={seed}",
            answers(range(count + seed * 7), classes, images), "--optim.lr", lr, "--seed", seed,
            names=names, curves=True,
        )
        for lr, count in ((0.1, 40), (0.2, 20), (0.3, 30)) for seed in range(2)
    ]  # fmt: skip
    for count in (2, 6):
        _, page = compare(*runs[:: 2 if count == 2 else 1][:count], output=tmp_path / "page.html")
        assert len(page) < 1_500_000
        widths = (1440, 900, 390)
        for width, seen in zip(widths, in_frames(page, tmp_path, widths, OVERFLOW), strict=True):
            assert width - 20 < seen["width"] <= width, seen  # without a scroll bar
            assert seen["wide"] == [] and seen["page"] <= 0, (count, width, seen)
            assert seen["verdict"] < 250  # the decision comes first
            assert seen["images"] and set(seen["images"]) == {8}


@pytest.mark.slow
def test_sixty_runs_have_a_page(tmp_path: Path) -> None:
    runs = [
        make_run(
            tmp_path / f"lr={lr},seed={seed}", answers(some(10 + lr, seed)), "--optim.lr", lr / 10, "--seed", seed,
            curves=True,
        )
        for lr in range(1, 13)
        for seed in range(5)
    ]  # fmt: skip
    result, page = compare(*runs)
    kinds = [each.kind for each in result.differences]
    assert kinds.count("settings") == 11 and kinds.count("runs") == 59
    assert len(rows(section(page, "settings"))) == 61 and len(page) < 1_500_000
    assert "4 more are left out" in section(page, "curves") and "the mean of the runs of a setting" in page
    assert page.count("data:image/png") <= 3 * 16
