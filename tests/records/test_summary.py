"""What a run says of itself: its data, the best metric, and the command that continues it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.checkpoint.state import TrainState
from accel_train.config.schema import Config
from accel_train.data.sources.arrays import ArraySource
from accel_train.data.sources.splits import Splits
from accel_train.launch.environment import Launch, at_terminal
from accel_train.records.cost import Start, cost_of
from accel_train.records.directory import RunDirectory
from accel_train.records.model_info import ModelInfo
from accel_train.records.summary import data_record, final_metrics, resume_command
from accel_train.task import ONE_LABEL

RECIPE = "runs/a/config.yaml --output-dir runs/a"
JOB = {"ACCEL_TRAIN_START": "/src/runs/starts/7/now"}


def splits_of(classes: tuple[str, ...], *labels: list[int] | torch.Tensor | None, **more: Any) -> Splits:
    """Splits with these labels: training, validation, test."""
    train, validation, test = (
        None if each is None else ArraySource("x", torch.zeros(len(each)), torch.as_tensor(each)) for each in labels
    )
    assert train is not None
    return Splits(classes, 3, 8, (0.5,), (0.5,), train, validation, test, **more)


def test_the_images_of_each_class_without_unreadable_ones(tmp_path: Path) -> None:
    splits = splits_of(
        ("a", "b", "c"), [0, 0, 1, 1], None, [2],
        unreadable=torch.tensor([True, False, False, False]), left_out=1, ignored="1 .txt",
    )  # fmt: skip
    record = data_record(splits)
    assert record == {
        "train": {"images": 3, "class_images": [1, 2, 0]},
        "test": {"images": 1, "class_images": [0, 0, 1]},
        "unreadable": 1,
        "unused": "1 .txt",
    }
    directory = RunDirectory(tmp_path / "run", writes=True)
    info = ModelInfo(("a", "b", "c"), 3, 8, None, (0.5,) * 3, (0.5,) * 3)
    directory.begin(Config(), info, {}, record)
    assert json.loads((directory.path / "data.json").read_text()) == record


def test_an_image_with_several_labels_counts_for_each() -> None:
    labels = torch.tensor([[True, True, False], [False, True, False], [False, False, False]])
    splits = splits_of(("a", "b", "c"), labels, labels[:1], None)
    assert data_record(splits)["train"] == {"images": 3, "class_images": [1, 2, 0]}
    assert data_record(splits)["val"] == {"images": 1, "class_images": [1, 1, 0]}


@pytest.mark.parametrize(("best_update", "use"), [(120, "the last weights"), (90, "to use it, add --checkpoint best")])
def test_the_best_metric_is_told_with_the_way_to_its_weights(best_update: int, use: str) -> None:
    result = {"best_metric": "accuracy", "cost": cost_of([Start(0, 10, 1, 0, 0, 120, training=9)])}
    state = TrainState(epoch=4, update=120, best_value=0.875, best_epoch=3, best_update=best_update)
    shown = final_metrics(result, state, {}, None, Path("run"), ONE_LABEL.metrics)
    assert shown["best val accuracy"] == f"87.50% after epoch 3; {use}"


@pytest.mark.parametrize(
    ("launch", "variables", "expected"),
    [
        (Launch(), {}, f"train {RECIPE}"),
        (Launch("accelerate", 0, 2, 0, 2), {}, f"launch or submit it as before, with {RECIPE}"),
        (Launch(), JOB, f"launch or submit it as before, with {RECIPE}"),
    ],
)
def test_what_continues_a_run(
    launch: Launch, variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ACCEL_TRAIN_START", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert resume_command(launch, Path("runs/a")).endswith(expected)


def test_a_path_with_spaces_can_be_typed() -> None:
    words = shlex.split(resume_command(Launch(), Path("my runs/a")))
    assert words[-3:] == ["my runs/a/config.yaml", "--output-dir", "my runs/a"]


@pytest.mark.parametrize("variable", ["RANK", "ACCELERATE_MIXED_PRECISION", "SLURM_JOB_ID", "PBS_JOBID", "PMI_RANK"])
def test_a_job_or_a_launcher_is_no_person_at_a_terminal(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "ACCELERATE_MIXED_PRECISION", "SLURM_JOB_ID", "PBS_JOBID", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.isatty", lambda descriptor: descriptor == 2)
    assert at_terminal()
    monkeypatch.setenv(variable, "0")
    assert not at_terminal()
