"""The sentences on top of a run's page: each one where it is true, and not where it is not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from made_up import evaluation_by_counts, made_up_run, multi_label_evaluation

from accel_train.config.schema import Config
from accel_train.tools.report.page import words_of
from accel_train.tools.report.records import RunRecords

FALLING = [2.0, 1.5, 1.1, 0.8, 0.6, 0.45, 0.35, 0.28, 0.23, 0.19, 0.16, 0.14]
TURNING = [2.0, 1.5, 1.2, 1.0, 1.05, 1.1, 1.2, 1.25, 1.4, 1.5, 1.6, 1.7]
LEVEL = [2.0, 1.5, 1.2, 1.02, 1.0, 1.01, 0.99, 1.0, 1.02, 0.99, 1.01, 1.0]


def told(run: RunRecords, evaluation: dict[str, Any] | None = None) -> str:
    return " ".join(sentence.text for sentence in words_of(run, evaluation or {}))


@pytest.mark.parametrize(
    ("confusion", "expected"),
    [
        ([[80, 20], [20, 80]], "This is better than to say one class for every image, which is right on 50.0%."),
        ([[52, 48], [48, 52]], "This is not clearly better than to say one class"),
        ([[20, 80], [80, 20]], "This is worse than to say one class"),
        ([[9, 1], [60, 30]], "This is worse than to say dog, the most frequent class, for every image"),
        ([[30, 20], [5, 145]], "This is better than to say dog, the most frequent class, for every image"),
        ([[10, 0], [0, 90]], "This is better than to say dog, the most frequent class, for every image"),
        ([[1, 9], [0, 90]], "This is not clearly better than to say dog"),
        ([[1, 0], [0, 1]], "This is not clearly better"),  # two of two say nothing
    ],
)  # fmt: skip
def test_better_than_chance_or_not(confusion: list[list[int]], expected: str) -> None:
    text = told(made_up_run(), evaluation_by_counts(confusion))
    assert expected in text
    assert sum(text.count(f"This is {how}") for how in ("better", "worse", "not clearly")) == 1


def test_the_accuracy_comes_first_and_with_its_interval() -> None:
    first = words_of(made_up_run(), evaluation_by_counts([[10, 0], [0, 0]]))[0]
    assert first.text == "The model is right on 100.0% of 10 test images (95% interval: 72.2 to 100.0%)."
    ema = {**evaluation_by_counts([[3, 1], [1, 3]]), "ema": evaluation_by_counts([[4, 0], [0, 4]])["model"]}
    assert told(made_up_run(), ema).startswith("The EMA is right on 100.0% of 8 test images")


def test_one_class_for_everything() -> None:
    text = "It names one class, dog, for all 40 test images."
    assert text in told(made_up_run(), evaluation_by_counts([[0, 20], [0, 20]]))
    assert "It names one class" not in told(made_up_run(), evaluation_by_counts([[1, 19], [0, 20]]))
    only = told(made_up_run(), evaluation_by_counts([[0, 0], [0, 20]]))  # right, as far as one can know
    assert "All test images are of one class, dog, so this says little." in only
    assert "It names one class" not in only and "better" not in only


def test_the_best_epoch() -> None:
    text = told(made_up_run(train=FALLING, val=TURNING))
    assert "The best epoch by the validation accuracy was 4 of 12 (90.00%); the last one has 83.00%." in text
    assert "was 12 of 12 (98.60%), the last one." in told(made_up_run(train=FALLING, val=FALLING))
    by_loss = dataclasses.replace(Config(), best_metric="loss", epochs=12)
    assert "by the validation loss was 4 of 12 (1.0000)" in told(
        made_up_run(train=FALLING, val=TURNING, config=by_loss)
    )
    for run in (made_up_run(train=FALLING, test=TURNING), made_up_run(train=[1.0], val=[1.0]), made_up_run()):
        assert "best epoch by" not in told(run)
    own = dataclasses.replace(Config(), metrics=("mine.py:odd",), best_metric="odd", epochs=12)
    assert "best epoch by" not in told(made_up_run(train=FALLING, val=TURNING, config=own))


def test_a_run_without_validation_says_what_is_not_known() -> None:
    text = "There is no validation split"
    assert text in told(made_up_run(train=FALLING, test=FALLING)) and text in told(made_up_run(train=FALLING))
    assert text not in told(made_up_run(train=FALLING, val=FALLING)) and text not in told(made_up_run(train=[1.0]))


def test_nothing_is_known() -> None:
    text = told(made_up_run(result={}, status={"state": "training", "epoch": 1, "update": 3}, epochs=5))
    assert text == (
        "Nothing says how good the model is on images that it was not trained on. "
        "The run still trains in epoch 1 of 5: what follows is what it has so far."
    )


def test_how_a_run_ended() -> None:
    for state, words in (("interrupted", "was interrupted"), ("failed", "has failed"), ("odd", "has not finished")):
        run = made_up_run(train=[1.0], val=[1.0], result={}, status={"state": state, "epoch": 2}, epochs=9)
        assert f"The run {words} in epoch 2 of 9" in told(run)
        assert "After epoch 1 the model is right on 90.0% of 100 validation images" in told(run)
    early = made_up_run(train=FALLING, val=LEVEL, epochs=40, result={"epochs": 12, "stopped_by": "patience"})
    assert "It was stopped after 12 of 40 epochs, because the validation split did not improve any more" in told(early)
    assert "(--stop.hours)" in told(made_up_run(epochs=40, result={"epochs": 12, "stopped_by": "hours"}))
    assert "stopped" not in told(made_up_run(train=FALLING, val=LEVEL))


def test_what_was_not_finite() -> None:
    lost = made_up_run(train=[1.0, None, 1.0, None], val=[1.0, None, 0.9, None], result={"left_out_updates": 2})
    text = told(lost)
    assert "The loss was NaN or infinite in epochs 2, 4." in text
    assert "2 updates were skipped because the loss or a gradient was not finite." in text
    assert "The best epoch by the validation accuracy was 3 of 4 (91.00%); the last one has NaN." in text
    fine = told(made_up_run(train=FALLING, val=FALLING))
    assert not any(word in fine for word in ("NaN", "skipped"))
    broken = {"split": "test", "model": {"accuracy": None, "loss": None, "count": 10, "weights": "w"}}
    assert told(made_up_run(), broken).startswith("The model's output is NaN or infinite for test images")


def test_what_is_unusual_in_the_data() -> None:
    data: dict[str, Any] = {
        "train": {"images": 210, "class_images": [200, 10]},
        "val": {"images": 20, "class_images": [20, 0]},
        "unreadable": 1,
        "unused": "2 .txt",
    }
    text = told(made_up_run(data=data))
    assert "1 unreadable image was left out" in text and "Not used, but in the folder of the data: 2 .txt." in text
    assert "1 of 2 classes has no validation image: dog." in text
    assert "number of training images: from 10 to 200" in text
    usual = {"train": {"images": 20, "class_images": [12, 8]}, "unreadable": 0, "unused": ""}
    text = told(made_up_run(data=usual), evaluation_by_counts([[5, 0], [1, 5]]))
    assert not any(word in text for word in ("unreadable", "Not used", "classes"))
    older = told(made_up_run(), evaluation_by_counts([[5, 0], [0, 0]]))  # without data.json
    assert "1 of 2 classes has no test image: dog." in older


def test_several_labels_an_image() -> None:
    text = told(made_up_run(multi_label=True), multi_label_evaluation(["cat", "dog"], 200, 0.25))
    assert text.startswith("The model has a mean average precision of 80.0% on 200 test images.")
    assert "To rank the images at random would give about 25.0%." in text
    assert "right on" not in text and "better" not in text
    text = told(made_up_run(multi_label=True, train=FALLING, val=TURNING))
    assert "by the validation mean average precision was 4 of 12" in text


def test_without_an_evaluation_the_words_are_of_the_result() -> None:
    result = {"test_accuracy": 0.9, "test_images": 100, "confusion": [[45, 5], [5, 45]]}
    text = told(made_up_run(result=result))
    assert text.startswith("The model is right on 90.0% of 100 test images (95% interval: 82.6 to 94.5%).")
    assert "This is better than" in text
    assert "Nothing says" in told(made_up_run(result={"test_accuracy": None, "test_images": 0}))
