"""Folders with one folder for each class."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from PIL import Image

from accel_train.config.schema import Data
from accel_train.data.sources.load import load_splits
from accel_train.errors import UserError


def tree(root: Path, *paths: str) -> Path:
    for number, path in enumerate(paths):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 3), (number, 0, 0)).save(root / path, "PNG")
    return root


def load(root: Path, seed: int = 0, **options):
    return load_splits(Data(name="folder", root=root, **options), seed)


def names(source) -> list[str]:
    return [source.name(i) for i in range(len(source))]


@pytest.mark.parametrize("name", ["val", "valid", "validation", "Val"])
def test_folders_of_splits(tmp_path: Path, name: str) -> None:
    tree(
        tmp_path,
        "train/dog/1.png",
        "train/cat/b/2.png",
        "train/cat/a.png",
        f"{name}/cat/3.png",
        f"{name}/dog/4.png",
    )
    found = load(tmp_path)
    assert found.classes == ("cat", "dog") and found.image_size is None and found.channels == 3
    assert names(found.train) == [f"{tmp_path}/train/{path}" for path in ("cat/a.png", "cat/b/2.png", "dog/1.png")]
    assert found.train.labels.tolist() == [0, 0, 1] and found.train.labels.dtype == torch.int64
    assert names(found.validation) == [f"{tmp_path}/{name}/{path}" for path in ("cat/3.png", "dog/4.png")]
    assert found.test is None
    images = found.train.fetch([2, 0])
    assert [image[0, 0, 0].item() for image in images] == [0, 2] and images[0].shape == (3, 3, 4)


def test_one_tree_and_fractions(tmp_path: Path) -> None:
    tree(tmp_path, *(f"{kind}/{i}.png" for kind in ("cat", "dog") for i in range(10)), "cat/Thumbs.db")
    (tmp_path / "README.txt").touch()
    found = load(tmp_path, val_fraction=0.2, test_fraction=0.1)
    parts = [found.train, found.validation, found.test]
    assert [len(part) for part in parts] == [14, 4, 2]
    assert len(set().union(*map(names, parts))) == 20
    assert [torch.bincount(part.labels).tolist() for part in parts] == [[7, 7], [2, 2], [1, 1]]


def test_the_file_systems_order_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, *(f"{kind}/{i}.png" for kind in ("cat", "dog") for i in range(10)))
    expected = load(tmp_path, val_fraction=0.3)
    scandir = os.scandir

    @contextmanager
    def turned(path: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        with scandir(path) as entries:
            yield iter(sorted(entries, key=lambda entry: entry.name, reverse=True))

    monkeypatch.setattr(os, "scandir", turned)
    found = load(tmp_path, val_fraction=0.3)
    assert names(found.train) == names(expected.train) and names(found.validation) == names(expected.validation)


def test_grey(tmp_path: Path) -> None:
    found = load(tree(tmp_path, "cat/1.png", "dog/2.png"), channels=1)
    assert found.train.fetch([0])[0].shape == (1, 3, 4)
    assert len(found.mean) == len(found.std) == found.channels == 1


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    assert load(tree(tmp_path, "train/1.png", "tram/2.png")).classes == ("train", "tram")


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file, not a folder"):
        load(tmp_path / "file")


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ("", r"contains? no image"),
        ("1.png 2.png", "has no class"),
        ("PetImages/Cat/1.png PetImages/Dog/1.png", "only one class, 'PetImages'"),
        ("train/cat/1.png train/dog/2.png val/cat/3.png valid/dog/4.png", "both val/ and valid/"),
        ("test/cat/1.png test/dog/2.png", r"has test/, but no train/.* give --data\.root .*/test --split train\."),
    ],
)
def test_a_folder_that_cannot_be_used(tmp_path: Path, paths: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(tree(tmp_path, *paths.split()))


@pytest.mark.parametrize("top", ["", "train/", "training/"])
def test_an_empty_class_folder_is_named(tmp_path: Path, top: str) -> None:
    tree(tmp_path, f"{top}cat/1.png", f"{top}dog/2.png")
    (tmp_path / top / "owl").mkdir()
    with pytest.raises(UserError, match=r"1 of 3 class folders of .* have no image: 'owl'"):
        load(tmp_path)


def test_other_classes_in_another_split(tmp_path: Path) -> None:
    tree(tmp_path, "train/cat/1.png", "train/dog/2.png", "test/cat/3.png", "test/owl/4.png")
    with pytest.raises(
        UserError, match=r"test/ has different classes from train/: it also has 'owl' and it lacks 'dog'"
    ):
        load(tmp_path)
    tree(tmp_path, "train/owl/5.png")
    (tmp_path / "test" / "dog").mkdir()
    assert load(tmp_path).test.labels.tolist() == [0, 2]


def test_an_empty_split(tmp_path: Path) -> None:
    tree(tmp_path, "train/cat/1.png", "train/dog/2.png")
    for kind in ("cat", "dog"):
        (tmp_path / "test" / kind).mkdir(parents=True)
    with pytest.raises(UserError, match="no image in its test split"):
        load(tmp_path)


@pytest.mark.parametrize("top", ["", "train/"])
def test_what_is_not_used_is_told(tmp_path: Path, top: str) -> None:
    tree(tmp_path, f"{top}PetImages/Cat/1.png", f"{top}PetImages/Dog/2.png", f"{top}elsewhere/3.png", f"{top}4.png")
    for name in ("PetImages/Cat/5.heic", "6.HEIC", "Thumbs.db", "README"):
        (tmp_path / top / name).touch()
    found = load(tmp_path)
    assert found.ignored == "1 image outside the class folders, 2 .heic, 1 .db, 1 README"


def test_a_split_may_be_a_link_to_a_folder_of_another_name(tmp_path: Path) -> None:
    tree(tmp_path, *(f"{split}/{kind}/{split}.png" for split in ("train", "fold1") for kind in ("cat", "dog")))
    (tmp_path / "val").symlink_to("fold1")
    found = load(tmp_path)
    assert (len(found.train), len(found.validation)) == (2, 2) and found.test is None
    assert found.ignored == "2 images outside the class folders"


def test_names_that_look_the_same_are_not_two_classes(tmp_path: Path) -> None:
    def make(*paths: str) -> None:
        for path in paths:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (3, 3)).save(tmp_path / path)

    make("train/caf\u00e9/1.png", "train/b/1.png", "test/cafe\u0301/1.png", "test/b/1.png")
    with pytest.raises(UserError, match=r"look the same \(NFC and NFD\): rename one"):
        load_splits(Data(name="folder", root=tmp_path), 0)
    with pytest.raises(UserError, match=r"two classes of the same name, 'cafe\\u0301' and 'caf\\xe9'"):
        make("all/caf\u00e9/1.png", "all/cafe\u0301/1.png")
        load_splits(Data(name="folder", root=tmp_path / "all"), 0)
