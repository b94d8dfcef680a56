"""--data.only-classes: which classes are used, in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from accel_train.config.schema import Data
from accel_train.data.sources.load import load_splits
from accel_train.data.sources.splits import Source, Splits
from accel_train.errors import UserError

KINDS = ("bird", "cat", "dog")


def names(source: Source | None) -> list[str]:
    assert source is not None
    return [source.name(id) for id in range(len(source))]


def digits(*classes: str, **options: Any) -> Splits:
    return load_splits(Data(only_classes=classes, **options), 0)


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    for number in range(30):
        (tmp_path / "pets" / KINDS[number % 3]).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (number, 0, 0)).save(tmp_path / "pets" / KINDS[number % 3] / f"{number}.png")
    return tmp_path / "pets"


def test_images_keep_their_names_and_pixels_and_get_the_new_labels() -> None:
    whole, chosen = digits(), digits("8", "3")
    assert chosen.classes == ("8", "3")
    for split in ("train", "test"):
        before, after = getattr(whole, split), getattr(chosen, split)
        kept = [id for id, label in enumerate(before.labels.tolist()) if label in (3, 8)]
        assert names(after) == [before.name(id) for id in kept]
        assert after.labels.tolist() == [int(before.labels[id] == 3) for id in kept]
        assert torch.equal(after.fetch(range(len(kept))), before.fetch(kept))


def test_fractions_and_limits_are_of_the_chosen_classes() -> None:
    chosen = digits("3", "8", val_fraction=0.25, train_limit=20)
    assert chosen.validation is not None
    assert len(chosen.validation) == round(0.25 * len(digits("3", "8").train))
    assert chosen.train.labels.bincount().tolist() == [10, 10]
    assert set(names(chosen.train)) <= set(names(digits().train)) - set(names(chosen.validation))


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (
            ("3", "11"),
            r"--data\.only-classes: there is no class '11'\. Did you mean '1'\? \(the data has the classes '0',",
        ),
        (("3", "8", "3"), r"--data\.only-classes: names '3' twice"),
        (("3",), "has only one class, '3', but a classifier needs two or more"),
    ],
)
def test_mistakes_are_told(classes: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        digits(*classes)


def test_a_split_without_their_images(pets: Path) -> None:
    for kind in KINDS:
        (pets / "val" / kind).mkdir(parents=True)
        (pets / kind).rename(pets / f"{kind}-all")
        (pets / "train").mkdir(exist_ok=True)
        (pets / f"{kind}-all").rename(pets / "train" / kind)
    (pets / "train/bird/0.png").rename(pets / "val/bird/0.png")
    load_splits(Data(name="folder", root=pets), 0)
    with pytest.raises(UserError, match="has no image in its validation split"):
        load_splits(Data(name="folder", root=pets, only_classes=("cat", "dog")), 0)


def test_unreadable_images_follow(pets: Path, tmp_path: Path) -> None:
    (pets / "cat/1.png").write_bytes(b"damaged")
    rows = [f"{kind}/{number}.png,{kind}" for number in range(30) for kind in [KINDS[number % 3]]]
    (pets / "labels.csv").write_text("\n".join(["path,label", *rows]))
    (tmp_path / "bad.txt").write_text("cat/1.png\n")
    data = Data(
        name="csv",
        root=pets / "labels.csv",
        only_classes=("dog", "cat"),
        skip_unreadable=tmp_path / "bad.txt",
    )
    found = load_splits(data, 0)
    assert found.unreadable is not None
    assert [names(found.train)[id] for id in found.unreadable.nonzero()[:, 0]] == [f"{pets}/cat/1.png"]
    assert found.train.labels.tolist() == [int("/cat/" in name) for name in names(found.train)]


def test_of_several_labels_an_image_the_others_are_left_out_and_the_image_stays(pets: Path) -> None:
    rows = ["bird/0.png,bird;cat", "cat/1.png,cat", "dog/2.png,dog;bird", "bird/3.png,;"]
    (pets / "labels.csv").write_text("\n".join(["path,label", *rows]))
    found = load_splits(Data(name="csv", root=pets / "labels.csv", only_classes=("dog", "bird")), 0)
    by_name = dict(zip(names(found.train), found.train.labels.tolist(), strict=True))
    assert by_name == {
        f"{pets}/bird/0.png": [False, True],
        f"{pets}/cat/1.png": [False, False],
        f"{pets}/dog/2.png": [True, True],
        f"{pets}/bird/3.png": [False, False],
    }
