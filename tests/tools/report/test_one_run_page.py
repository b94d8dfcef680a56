"""One run's page: what it shows of runs that are not as usual, and of the images."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest
from made_runs import make_run
from made_up import evaluation_by_counts, made_up_evaluation, made_up_run, several_labels_evaluation

from accel_train.config.schema import Config, Loss
from accel_train.ownership.owner import Owner, publish_owner, write_private
from accel_train.task import SEVERAL_LABELS
from accel_train.tools.report.curves import best_epoch
from accel_train.tools.report.records import read_run, state_of
from accel_train.tools.report.report import headline, page_of_run

FALLING = [2.0, 1.5, 1.1, 0.8, 0.6, 0.45, 0.35]
TURNING = [2.0, 1.5, 1.0, 1.2, 1.3, 1.4, 1.5]


def text_of(html: str) -> str:
    html = re.sub(r"<(style|script)>.*?</\1>", "", html, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


@pytest.mark.ci
def test_the_best_epoch_is_marked_in_the_curves() -> None:
    marked = page_of_run(made_up_run(train=FALLING, val=TURNING), {}, [], [])
    assert marked.count("best epoch: 3") == 2  # of the loss and of the accuracy
    assert "best epoch:" not in page_of_run(made_up_run(train=FALLING, test=TURNING), {}, [], [])


def test_the_main_metric_comes_first_and_with_its_interval() -> None:
    run, evaluation = made_up_run(train=FALLING, val=TURNING, ema=FALLING), evaluation_by_counts([[10, 0], [0, 0]])
    assert headline(run, evaluation) == "Accuracy of the model on 10 test images: 100.0% (95% interval: 72.2 … 100.0%)"
    both = evaluation | {"ema": evaluation_by_counts([[3, 1], [1, 3]])["model"]}
    assert headline(run, both).startswith("Accuracy of the EMA on 8 test images: 75.0% (")
    assert headline(run, {}).startswith("Accuracy of the EMA on 100 validation images, after epoch 7: 96.5% (")
    broken = {"split": "test", "model": {"accuracy": None, "loss": None, "count": 10, "weights": "w"}}
    assert headline(run, broken) == "Accuracy of the model on 10 test images: NaN"
    assert headline(made_up_run(), {}) == ""


def test_the_best_epoch_is_that_of_the_trainer() -> None:
    run = made_up_run(train=FALLING, val=TURNING)
    assert best_epoch(run) == 3
    run.result["best_update"] = 50  # by another metric
    assert best_epoch(run) == 5
    del run.result["best_update"]
    assert best_epoch(run) is None


def test_a_class_has_its_images_of_each_split_and_what_it_is_mistaken_for() -> None:
    data = {"train": {"images": 44, "class_images": [40, 4]}, "val": {"images": 5, "class_images": [5, 0]}}
    page = page_of_run(made_up_run(data=data), evaluation_by_counts([[10, 0], [1, 3]]), [], [])
    classes = text_of(page[page.index('<section id="classes">') :])
    assert "train images val images test images precision recall f1 confused with" in classes
    assert "cat 40 5 10 90.91% 100.00% 95.24%" in classes
    assert "dog 4 0 4 100.00% 75.00% 85.71% cat (1)" in classes


@pytest.mark.ci
def test_names_with_markup_and_several_labels() -> None:
    names = ["<script>alert(1)</script>", "a & b", "\u6f22\u5b57"]
    page = page_of_run(made_up_run(names, train=FALLING), made_up_evaluation(names, 60), [], ["<b>note</b>"])
    assert "<script>alert" not in page and "<b>note" not in page
    several = made_up_run(names, task=SEVERAL_LABELS, train=FALLING, val=TURNING, ema=FALLING)
    page = page_of_run(several, several_labels_evaluation(names, 40, 0.5), [], [])
    assert "Mean average precision of the model on 40 test images: 80.0% finished" in text_of(page)
    assert "average precision" in page


@pytest.mark.ci
@pytest.mark.parametrize("loss", ["mine.py:focal", "binary_cross_entropy"])
def test_a_loss_that_evaluation_does_not_compute_is_apart(loss: str) -> None:
    config = Config(recipe="digits", epochs=7, loss=Loss(name=loss))
    page = text_of(page_of_run(made_up_run(train=FALLING, val=TURNING, config=config), {}, [], []))
    assert f"training loss ({loss})" in page and "loss (cross-entropy)" in page


def test_a_killed_run_does_not_train(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "result.json").unlink()
    status = {"state": "training", "epoch": 1, "update": 3}
    (run / "status.json").write_text(json.dumps(status))
    killed = read_run(run)
    assert state_of(killed).startswith("stale at epoch 1")
    publish_owner(write_private(run, Owner.of_this_process()), run / "owner.json")
    assert state_of(read_run(run)).startswith("training at epoch 1")
