"""One run's page: what it shows of runs that are not as usual, and of the images."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import re
import shutil
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch
from made_runs import make_run
from made_up import evaluation_by_counts, made_up_evaluation, made_up_run, multi_label_evaluation
from PIL import Image

from accel_train import cli
from accel_train.analysis.curves import plot_curves
from accel_train.analysis.figures import accuracy_interval
from accel_train.config.options import parse
from accel_train.config.schema import Config, Loss
from accel_train.data.sources.load import load_splits
from accel_train.ownership.owner import Owner, publish_owner, write_private
from accel_train.report.one_run.augmented import augmented_pictures, label_text
from accel_train.report.one_run.page import Pictures, page_of_run
from accel_train.report.one_run.words import words_of
from accel_train.report.shared.charts import draw_calibration
from accel_train.report.shared.records import read_run, state_of

FALLING = [2.0, 1.5, 1.1, 0.8, 0.6, 0.45, 0.35]
TURNING = [2.0, 1.5, 1.0, 1.2, 1.3, 1.4, 1.5]


def text_of(html: str) -> str:
    html = re.sub(r"<(style|script)>.*?</\1>", "", html, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


def tiles(page: str) -> str:
    return text_of("".join(re.findall(r'<div class="tile">.*?</div>', page, re.DOTALL)))


@pytest.mark.ci
def test_the_headline_is_the_accuracy_with_its_interval() -> None:
    page = page_of_run(made_up_run(train=FALLING), evaluation_by_counts([[8, 2], [1, 9]]), Pictures(), [])
    low, high = accuracy_interval(17, 20)
    assert tiles(page) == f"85.00% test accuracy 95% interval: {100 * low:.1f} … {high:.1%}"
    assert "500 images/s" in text_of(page)  # below, beside the cost
    assert text_of(page).index("The model is right") < text_of(page).index("95% interval: 64.0 … 94.8%")
    result = {"test_accuracy": 0.9, "test_images": 10}
    page = page_of_run(made_up_run(result=result), {}, Pictures(), [])
    assert tiles(page) == "90.00% test accuracy 95% interval: 59.6 … 98.2%"
    assert tiles(page_of_run(made_up_run(result={}), {}, Pictures(), [])) == ""


@pytest.mark.ci
def test_a_run_of_one_epoch_has_a_table_for_its_curves() -> None:
    page = text_of(page_of_run(made_up_run(train=[1.0], val=[0.9]), {}, Pictures(), []))
    assert "The run has one epoch, so there are no curves over the epochs. Its figures:" in page
    assert "loss accuracy train 1.0000 90.00% val 0.9000 91.00%" in page
    unfinished = text_of(page_of_run(made_up_run(train=[1.0], epochs=5, result={}), {}, Pictures(), []))
    assert "Only one epoch is complete, so there are no curves" in unfinished
    assert "No epoch is complete" in page_of_run(made_up_run(result={}), {}, Pictures(), [])
    usual = page_of_run(made_up_run(train=FALLING, val=TURNING), {}, Pictures(), [])
    assert "no curves over the epochs" not in usual


@pytest.mark.ci
def test_the_best_epoch_is_marked_in_the_curves() -> None:
    marked = page_of_run(made_up_run(train=FALLING, val=TURNING), {}, Pictures(), [])
    assert marked.count("best epoch: 3") == 2  # of the loss and of the accuracy
    assert "best epoch:" not in page_of_run(made_up_run(train=FALLING, test=TURNING), {}, Pictures(), [])


def test_a_class_has_its_images_of_each_split_and_an_interval() -> None:
    data = {"train": {"images": 44, "class_images": [40, 4]}, "val": {"images": 5, "class_images": [5, 0]}}
    page = page_of_run(made_up_run(data=data), evaluation_by_counts([[10, 0], [1, 3]]), Pictures(), [])
    classes = text_of(page[page.index('<section id="classes">') :])
    low, high = accuracy_interval(3, 4)
    assert "train images val images test images precision recall 95% interval f1" in classes
    assert "cat 40 5 10 90.9% 100.0% 72.2 … 100.0%" in classes
    assert f"dog 4 0 4 100.0% 75.0% {100 * low:.1f} … {high:.1%}" in classes


def test_the_calibration_shows_how_many_images_a_bin_has() -> None:
    diagram = [{"confidence": 0.5, "accuracy": 1.0, "count": 2}, {"confidence": 0.95, "accuracy": 0.9, "count": 500}]
    svg = draw_calibration(diagram)
    assert "images of a bin, 95% interval" in svg and ">images<" in svg
    taller = draw_calibration([diagram[0] | {"count": 50}, diagram[1]])
    assert taller != svg  # the interval of two images is wider than that of fifty
    assert draw_calibration([{"confidence": 1.0, "accuracy": 0.0, "count": 1}])


@pytest.mark.ci
@pytest.mark.parametrize("fit", [{"value": 0.01, "at_bound": True}, {"value": 99.9999}])  # an older one says less
def test_a_temperature_at_a_bound_is_not_a_fit(fit: dict[str, object]) -> None:
    evaluation = evaluation_by_counts([[8, 2], [1, 9]])
    evaluation["model"]["temperature"] = {"split": "val", "loss": 0.4321, "calibration_error": 0.05, **fit}
    page = page_of_run(made_up_run(), evaluation, Pictures(), [])
    assert "No temperature could be fitted: a bound of the search (0.01 to 100) is as good as any on val." in page
    assert "0.4321" not in page and "temperature, fitted" not in page
    evaluation["model"]["temperature"] |= {"value": 1.5, "at_bound": False}
    page = page_of_run(made_up_run(), evaluation, Pictures(), [])
    assert "0.4321" in page and "temperature, fitted on val" in page and "No temperature" not in page


@pytest.mark.ci
def test_names_with_markup_and_several_labels() -> None:
    names = ["<script>alert(1)</script>", "a & b", "\u6f22\u5b57"]
    page = page_of_run(made_up_run(names, train=FALLING), made_up_evaluation(names, 60), Pictures(), ["<b>note</b>"])
    assert "<script>alert" not in page and "<b>note" not in page
    several = made_up_run(names, multi_label=True, train=FALLING, val=TURNING, ema=FALLING)
    page = page_of_run(several, multi_label_evaluation(names, 40, 0.5), Pictures(), [])
    assert "mean average precision of 80.0% on 40 test images" in text_of(page)
    assert "80.00% test mean average precision" in tiles(page) and "average precision" in page


def pixels_of(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))


def test_the_augmented_images_are_those_of_the_first_epochs(digits_run: Path) -> None:
    run = read_run(digits_run)
    config = parse([str(digits_run / "config.yaml")])
    splits = load_splits(config.data, config.seed)
    shown = augmented_pictures(splits, run.info, config)
    assert len(shown) == 6 and len({picture.name for picture in shown}) == 6
    assert augmented_pictures(splits, run.info, config) == shown
    assert config.augment.crop == "random" and config.augment.pad == 1
    moved = 0
    for picture in shown:
        (id,) = [id for id in range(len(splits.train)) if splits.train.name(id) == picture.name]
        original = np.pad(splits.train.fetch([id])[0][0].numpy().astype(int), 1)
        for uri, label in picture.views:
            assert label == splits.classes[int(splits.train.labels[id])]
            seen = pixels_of(uri).astype(int)  # a window of the padded image
            windows = [original[top : top + 8, left : left + 8] for top in range(3) for left in range(3)]
            assert min(np.abs(seen - window).max() for window in windows) <= 1
        moved += len(picture.views) == 2
    assert moved >= 3


def test_the_label_of_a_mixed_image_has_its_shares() -> None:
    classes = ("cat", "dog", "bird")
    assert label_text(torch.tensor(1), classes) == "dog"
    assert label_text(torch.tensor([0.25, 0.75, 0.0]), classes) == "dog 75%, cat 25%"
    assert label_text(torch.tensor([0.999, 0.001, 0.0]), classes) == "cat"
    assert label_text(torch.tensor([1.0, 0.0, 1.0]), classes) == "cat, bird"
    assert label_text(torch.zeros(3), classes) == "none"


@pytest.mark.slow
def test_right_images_and_why_images_are_missing(digits_run: Path, tmp_path: Path, fresh_accelerate: None) -> None:
    run = Path(shutil.copytree(digits_run, tmp_path / "run"))
    assert cli.main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    right = text_of(page[page.index('<section id="right">') : page.index('<section id="augmented">')])
    said = re.findall(r"said (\d) \(.*?true (\d) \(", right)
    assert len(said) == 10 and all(guess == label for guess, label in said)
    config = (run / "config.yaml").read_text().replace("name: digits\n", "name: folder\n", 1)
    (run / "config.yaml").write_text(config)
    assert cli.main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "The images are left out: --data.root data" in page and '<section id="right">' not in page
    assert json.loads((run / "data.json").read_text())["train"]["images"] == 1294


@pytest.mark.ci
@pytest.mark.parametrize("loss", ["mine.py:focal", "binary_cross_entropy"])
def test_a_loss_that_evaluation_does_not_compute_is_apart(loss: str) -> None:
    config = Config(recipe="digits", epochs=7, loss=Loss(name=loss))
    page = text_of(page_of_run(made_up_run(train=FALLING, val=TURNING, config=config), {}, Pictures(), []))
    assert f"training loss ({loss})" in page and "loss (cross-entropy)" in page
    config = dataclasses.replace(config, epochs=1)
    page = text_of(page_of_run(made_up_run(train=[1.0], val=[0.9], config=config), {}, Pictures(), []))
    assert f"training loss ({loss}) loss accuracy train 1.0000 90.00% val 0.9000 91.00%" in page
    figure = plot_curves([{"update": 1, "loss": 1.0}], [{"split": "val", "update": 1, "loss": 2.0}], "run", "mine")
    assert [(axis.get_title(), len(axis.lines)) for axis in figure.axes] == [("mine", 1), ("loss", 1), ("accuracy", 0)]


def test_a_killed_run_does_not_train(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", None)
    (run / "result.json").unlink()
    status = {"state": "training", "epoch": 1, "update": 3}
    (run / "status.json").write_text(json.dumps(status))
    killed = read_run(run)
    assert state_of(killed).startswith("stale at epoch 1")
    assert "The run died or was killed in epoch 1 of" in " ".join(each.text for each in words_of(killed, {}))
    publish_owner(write_private(run, Owner.of_this_process()), run / "owner.json")
    assert state_of(read_run(run)).startswith("training at epoch 1")
