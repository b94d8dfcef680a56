"""data.json: how many images of each class a run has seen, and what was left out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from accel_train.config.schema import Config
from accel_train.data.sources.splits import Splits
from accel_train.records.directory import RunDirectory
from accel_train.records.model_info import ModelInfo
from accel_train.records.summary import data_record


@dataclass
class Labels:
    labels: torch.Tensor
    in_memory = True

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, ids: object) -> torch.Tensor:
        raise AssertionError("no pixels are needed")

    def name(self, id: int) -> str:
        return str(id)


def splits(*labels: torch.Tensor | None, unreadable: torch.Tensor | None = None, left_out: int = 0) -> Splits:
    sources = [None if each is None else Labels(each) for each in labels]
    train, validation, test = sources
    assert train is not None
    return Splits(("a", "b", "c"), 3, 8, (0.5,), (0.5,), train, validation, test, unreadable, left_out, "1 .txt")


def test_the_images_of_each_class_without_unreadable_ones(tmp_path: Path) -> None:
    skipped = torch.tensor([True, False, False, False])
    record = data_record(splits(torch.tensor([0, 0, 1, 1]), None, torch.tensor([2]), unreadable=skipped, left_out=1))
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
    assert data_record(splits(labels, labels[:1], None))["train"] == {"images": 3, "class_images": [1, 2, 0]}
    assert data_record(splits(labels, labels[:1], None))["val"] == {"images": 1, "class_images": [1, 1, 0]}
