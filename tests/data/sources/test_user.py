"""Datasets of a user's own function: what they may be, what is made of them, and what is said of wrong ones."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loaders import loader_of

from accel_train.config.schema import Augment, Data
from accel_train.data.order import Plan, TrainingSampler
from accel_train.data.sources.load import load_splits
from accel_train.data.sources.splits import Splits
from accel_train.data.sources.user import UserDataset
from accel_train.errors import UserError
from accel_train.task import SEVERAL_LABELS

HEAD = """
import random
import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

class Items(Dataset):
    classes = ["cat", "dog"]
    def __init__(self, image, n=20, label=lambda i: i % 2):
        self.image, self.n, self.label = image, n, label
    def __len__(self):
        return self.n
    def __getitem__(self, i):
        return self.image(i), self.label(i)

def uint8(i):
    return torch.full((3, 8, 8), i, dtype=torch.uint8)

def floats(i):
    return torch.full((5, 8, 8), i / 10)

def pil(i):
    return Image.new("RGB", (10 + i, 12), (i, 0, 0))
"""


def splits_of(tmp_path: Path, returned: str, more: str = "", **settings: Any) -> Splits:
    """What becomes of a function that returns the expression `returned`."""
    path = tmp_path / "mine.py"
    path.write_text(f"{HEAD}\n{more}\ndef data(root):\n    return {returned}\n")
    return load_splits(replace(Data(name=f"{path}:data"), **settings), 0)


def test_uint8_tensors_have_one_size(tmp_path: Path) -> None:
    splits = splits_of(tmp_path, "{'train': Items(uint8), 'valid': Items(uint8, 4), 'test': None}")
    assert (splits.classes, splits.channels, splits.image_size, splits.full_scale) == (("cat", "dog"), 3, 8, 255)
    assert splits.mean == (0.485, 0.456, 0.406)
    assert splits.validation is not None
    assert (len(splits.train), len(splits.validation), splits.test) == (20, 4, None)
    assert splits.train.labels.tolist() == [0, 1] * 10
    batch = splits.train.fetch([3, 5])
    assert isinstance(batch, torch.Tensor)
    assert batch.dtype == torch.uint8
    assert batch[:, 0, 0, 0].tolist() == [3, 5]


def test_floats_are_left_as_they_are_and_pil_images_may_differ_in_size(tmp_path: Path) -> None:
    splits = splits_of(tmp_path, "{'train': Items(floats)}")
    assert (splits.channels, splits.full_scale, splits.mean, splits.std) == (5, 1, (0.0,) * 5, (1.0,) * 5)
    splits = splits_of(tmp_path, "{'train': Items(pil)}", channels=1)
    assert (splits.channels, splits.image_size, splits.full_scale) == (1, None, 255)
    assert [image.shape for image in splits.train.fetch([0, 3])] == [(1, 12, 10), (1, 12, 13)]


ROWS = "[[0, 1], [1, 1], [0, 0]]"


def test_rows_of_0_and_1_are_several_labels(tmp_path: Path) -> None:
    more = "class Labelled(Items): targets = " + ROWS
    rows = "label=lambda i: torch.tensor([i % 2, i // 10])"
    for returned in (f"Items(uint8, {rows})", f"Items(uint8, {rows.replace('torch.tensor', 'np.array')})"):
        splits = splits_of(tmp_path, f"{{'train': {returned}}}")
        assert splits.task is SEVERAL_LABELS and splits.train.labels.dtype == torch.bool
        assert splits.train.labels.int().tolist() == [[i % 2, i // 10] for i in range(20)]
        splits.train.fetch([0, 15])  # compares the labels
    splits = splits_of(tmp_path, "{'train': Labelled(uint8, 3, lambda i: [0, 0])}", more)
    assert splits.train.labels.int().tolist() == [[0, 1], [1, 1], [0, 0]]
    with pytest.raises(UserError, match=r"train sample 0 has the label \[0, 0\], but \[0, 1\] in"):
        splits.train.fetch([0])


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("lambda i: [0, 2]", "has the label '[0, 2]' (list); expected a whole number, or a row of 0 and 1"),
        ("lambda i: [0, 1, 1]", "has labels for 3 classes, but the names of 2 classes"),
        ("lambda i: [0, 1] if i < 9 else 1", "train sample 9 has one number as its label, but sample 0 has a row of 2"),
        (
            "lambda i: [0, 1] if i else [1, 1, 1]",
            "sample 1 has a row of 2 numbers as its label, but sample 0 has a row",
        ),
    ],
)
def test_wrong_rows_are_one_line(tmp_path: Path, label: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        splits_of(tmp_path, f"{{'train': Items(uint8, label={label})}}")
    assert message in str(raised.value)


def test_labels_do_not_lie_in_memory_that_a_worker_takes_over(tmp_path: Path) -> None:
    """To send a tensor to a worker, torch moves it to shared memory, and its old memory is used for something else."""
    more = """
class Held(Items):
    def __init__(self):
        super().__init__(uint8, 1000)
        self.targets = torch.arange(1000) % 2
"""
    splits = splits_of(tmp_path, "{'train': Held()}", more)
    assert isinstance(splits.train, UserDataset)
    splits.train.dataset.targets.fill_(7)
    assert splits.train.labels.tolist() == [0, 1] * 500


def test_targets_are_used_without_reading_an_item(tmp_path: Path) -> None:
    more = """
class Labelled(Items):
    def __init__(self, targets): super().__init__(uint8, len(targets)); self.targets = targets; self.open = False
    def __getitem__(self, i):
        assert i == 0, "only the first item may be read"
        return super().__getitem__(i)
"""
    for targets in ("[0, 1, 1]", "np.array([0, 1, 1])", "torch.tensor([0, 1, 1])"):
        splits = splits_of(tmp_path, f"{{'train': Labelled({targets})}}", more)
        assert splits.train.labels.tolist() == [0, 1, 1]
    halves = "{'train': Subset(Labelled([0, 1, 1, 0]), [0, 3]), 'test': Subset(Labelled([0, 1, 1, 0]), [0, 1])}"
    splits = splits_of(tmp_path, halves, more)
    assert splits.train.labels.tolist() == [0, 0]
    assert splits.classes == ("cat", "dog")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("[Items(uint8)]", 'returned a value of type list; expected a dict {"train": Dataset, …}'),
        ("{'trian': Items(uint8)}", "returned a split 'trian'; expected train, val or test. Did you mean 'train'?"),
        ("{'test': Items(uint8)}", "returned no split 'train', only test"),
        ("{'train': Items(uint8, 0)}", "train is empty"),
        ("{'train': iter([])}", "expected a map-style Dataset"),
        ("{'train': Stream()}", "expected a map-style Dataset"),
        ("{'train': Items(lambda i: np.zeros((3, 8, 8)))}", "train sample 0 is a NumPy array float64 [3, 8, 8]; expe"),
        ("{'train': Items(lambda i: torch.zeros(8, 8))}", "train sample 0 is a tensor float32 [8, 8]; expected a PIL"),
        ("{'train': Items(lambda i: torch.zeros(3, 8, 9))}", "the images are tensors of 8x9 pixels; expected squares"),
        ("{'train': Items(uint8, label=lambda i: 'cat')}", "train sample 0 has the label 'cat' (str); expected a who"),
        ("{'train': Items(uint8, label=lambda i: 0.5)}", "has the label '0.5' (float); expected a whole number"),
        ("{'train': Items(uint8, label=lambda i: i)}", "18 labels outside its 2 classes (0 to 1): the first is 2, of"),
        ("{'train': Items(uint8), 'test': Other(uint8)}", "test does not have the classes of the other splits (class"),
        (
            "{'train': [(uint8(0), 7)]}",
            "the largest label is 7, more than there are samples. Labels are the",
        ),
        ("{'train': Items(uint8)}['test']", "KeyError: 'test' (mine.py, line "),
        ("{'train': Items(lambda i: 1 // 0)}", "train sample 0 cannot be read: ZeroDivisionError: integer division or"),
        ("{'train': Labelled(uint8)}", "has 20 items, and `targets` of int64 [3]; expected a whole number for each"),
    ],
)
def test_what_is_wrong_is_one_line(returned: str, message: str, tmp_path: Path) -> None:
    more = """
class Stream(IterableDataset):
    def __iter__(self): yield 1
class Other(Items): classes = ['cat', 'cow']
class Labelled(Items): targets = [0, 1, 0]
"""
    with pytest.raises(UserError) as raised:
        splits_of(tmp_path, returned, more)
    assert message in str(raised.value), str(raised.value)
    assert "\n" not in str(raised.value)


def test_images_of_two_sizes_are_told_when_they_are_fetched(tmp_path: Path) -> None:
    splits = splits_of(tmp_path, "{'train': Items(lambda i: torch.zeros(3, 8 + i // 9, 8 + i // 9))}")
    with pytest.raises(UserError, match=r"train sample 9 is .* \[3, 9, 9\], but the first one is .* \[3, 8, 8\]"):
        splits.train.fetch([8, 9])


RANDOM = """
def noisy(i):
    values = [torch.randint(0, 250, ()).item(), np.random.randint(250), random.randrange(250)]
    return torch.tensor(values, dtype=torch.uint8)[:, None, None].expand(3, 8, 8)
"""


@pytest.mark.parametrize("policy", ["none", pytest.param("trivialaugment", marks=pytest.mark.ci)])
def test_random_draws_follow_from_the_sample_not_from_the_worker(tmp_path: Path, policy: str) -> None:
    splits = splits_of(tmp_path, "{'train': Items(noisy, 32, label=alternating)}",
                       RANDOM + "\ndef alternating(i): return i % 2\n")  # fmt: skip
    found = []
    for workers, accumulation in ((0, 1), (0, 4), (2, 2)):
        sampler = TrainingSampler(Plan(32, 16, 1, accumulation, False, 1), 3)
        loader = loader_of(splits.train, sampler, Augment(policy=policy), seed=3, workers=workers)
        batches = list(loader)
        assert all(isinstance(batch, dict) for batch in batches)
        ids, images = (torch.cat([batch[name] for batch in batches]) for name in ("ids", "images"))
        found.append(images[ids.argsort()])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert len(found[0].flatten(1).unique(dim=0)) > 20  # they are random
    states = torch.get_rng_state(), np.random.get_state(False)["state"]["key"].tolist(), random.getstate()
    splits.train.fetch([1, 2])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state(False)["state"]["key"].tolist() == states[1]
    assert random.getstate() == states[2]


def test_a_dataset_that_no_worker_can_receive(tmp_path: Path) -> None:
    splits = splits_of(tmp_path, "{'train': Items(lambda i: uint8(i))}")
    assert isinstance(splits.train, UserDataset)
    with pytest.raises(UserError, match=r"train dataset cannot be sent to data workers .*--data.workers 0"):
        splits.train.check_picklable()


def test_splits_of_the_project_s_own_kind_are_taken_as_they_are(tmp_path: Path) -> None:
    more = """
from accel_train.data.sources.arrays import ArraySource
from accel_train.data.sources.splits import Splits
def make():
    source = ArraySource("mine", torch.zeros(6, 1, 4, 4, dtype=torch.uint8), torch.arange(6) % 2)
    return Splits(("a", "b"), 1, 4, (0.5,), (0.5,), source, None, None)
"""
    splits = splits_of(tmp_path, "make()", more, test_fraction=0.5)
    assert splits.train.in_memory
    assert splits.test is not None
    assert (len(splits.train), len(splits.test)) == (3, 3)
