"""The worker processes of a loader: their number, and how long they live."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from loaders import loader_of
from PIL import Image

from accel_train.config.schema import Augment, Data
from accel_train.data.order import EvaluationSampler, Plan, TrainingSampler
from accel_train.data.sources.load import load_splits
from accel_train.data.sources.splits import Splits
from accel_train.launch.process import share_of_cores


@pytest.fixture
def splits(tmp_path: Path) -> Splits:
    for number in range(8):
        path = tmp_path / "tree" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (number, 0, 0)).save(path)
    return load_splits(Data(name="folder", root=tmp_path / "tree"), 0)


def loader(splits: Splits, *, training: bool, workers: int | None, device: str = "cpu", cores: int = 1):
    order = TrainingSampler(Plan(8, 4, 1, 1), 0) if training else EvaluationSampler(8, 4)
    options: dict[str, Any] = {"workers": workers, "cores": cores, "device": torch.device(device)}
    return loader_of(splits.train, order, Augment(), training=training, size=16, **options)


def test_training_keeps_its_workers_and_an_evaluation_ends_its_own(splits: Splits) -> None:
    before = {*multiprocessing.active_children()}  # workers that a test before this one has left

    def started() -> set[Any]:
        return {*multiprocessing.active_children()} - before

    training, evaluation = (loader(splits, training=each, workers=1) for each in (True, False))
    assert len(list(training)) == 2
    (kept,) = started()
    for _ in range(2):
        assert len(list(evaluation)) == 2
        assert started() == {kept}
    assert len(list(training)) == 2
    assert started() == {kept}


def test_a_core_is_left_for_the_thread_that_drives_a_gpu(splits: Splits) -> None:
    workers = [
        loader(splits, training=True, workers=None, device=device, cores=cores).num_workers
        for device, cores in (("cpu", 4), ("cuda", 4), ("cuda", 1))
    ]
    assert workers == [4, 3, 1]


def test_cores_are_divided_among_those_that_may_use_them() -> None:
    """Processes with their own cores, as with srun --cpu-bind, do not share them."""
    every = set(range(16))
    assert share_of_cores(every, [every]) == 16
    assert share_of_cores(every, [every] * 4) == 4
    assert share_of_cores(every, [every] * 3) == 5
    assert share_of_cores(every, [every] * 32) == 1
    bound = [{4 * rank + core for core in range(4)} for rank in range(4)]
    assert share_of_cores(bound[1], bound) == 4
    sockets = [set(range(8)), set(range(8)), set(range(8, 16))]
    assert [share_of_cores(each, sockets) for each in sockets] == [4, 4, 8]
