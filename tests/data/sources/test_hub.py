"""Datasets of hubs, from local files."""

import io
import pickle
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from accel_train.config.schema import Data
from accel_train.data.sources.load import load_splits
from accel_train.errors import UserError


def load(name: str, root: Path, **options):
    return load_splits(Data(name=name, root=root, **options), 0)


def image_folder(root: Path, splits: tuple[str, ...], size: tuple[int, int] = (4, 3)) -> Path:
    for number, split in enumerate(splits):
        for label, kind in enumerate(("cat", "dog")):
            (root / split / kind).mkdir(parents=True)
            for i in range(4):
                Image.new("RGB", size, (100 * number + 10 * label + i, 0, 0)).save(root / split / kind / f"{i}.png")
    return root


def values(source) -> list[int]:
    images = source.fetch(range(len(source)))
    return sorted(int(image[0, 0, 0]) for image in images)


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    return pytest.importorskip("datasets")


def test_a_folder_read_by_hugging_face(tmp_path: Path, datasets) -> None:
    name = f"hfds/{image_folder(tmp_path / 'pets', ('train', 'validation'))}"
    found = load(name, tmp_path / "cache")
    assert found.classes == ("cat", "dog") and found.channels == 3
    assert found.test is None  # and not the training images
    assert values(found.train) == [0, 1, 2, 3, 10, 11, 12, 13]
    assert values(found.validation) == [100, 101, 102, 103, 110, 111, 112, 113]
    assert found.train.labels.dtype == torch.int64
    assert [v // 10 for v in values(found.train)] == sorted(found.train.labels.tolist())
    assert not found.train.in_memory
    divided = load(name, tmp_path / "cache", test_fraction=0.25)
    assert (len(divided.train), len(divided.test)) == (6, 2)


def test_a_set_without_a_train_split(tmp_path: Path, datasets) -> None:
    name = f"hfds/{image_folder(tmp_path / 'pets', ('validation', 'test'))}"
    with pytest.raises(UserError, match="has no train split, only validation, test; a function of your own may return"):
        load(name, tmp_path / "cache")


def test_parts_of_splits_come_from_a_function(tmp_path: Path, datasets) -> None:
    folder = image_folder(tmp_path / "pets", ("train", "validation", "test"))
    (tmp_path / "mine.py").write_text(
        "from datasets import load_dataset\n\n\ndef data(root):\n"
        f"    part = lambda split: load_dataset({str(folder)!r}, cache_dir=str(root), split=split)\n"
        '    return {"train": part("train[:75%]+test"), "val": part("train[75%:]")}\n'
    )
    found = load(f"{tmp_path}/mine.py:data", tmp_path / "cache")
    assert values(found.train) == [0, 1, 2, 3, 10, 11, 200, 201, 202, 203, 210, 211, 212, 213]
    assert values(found.validation) == [12, 13] and found.test is None


def test_other_column_names_unreadable_images_and_unlabelled_tests(
    tmp_path: Path, datasets, monkeypatch: pytest.MonkeyPatch
) -> None:
    def png(value: int) -> bytes:
        file = io.BytesIO()
        Image.new("L", (5, 5), value).save(file, "PNG")
        return file.getvalue()

    features = datasets.Features({"img": datasets.Image(), "fine_label": datasets.ClassLabel(names=["a", "b"])})
    (tmp_path / "set").mkdir()
    for split, labels in (("train", [0, 1, 1, 0]), ("test", [-1] * 4)):
        images = [{"bytes": content, "path": None} for content in (png(1), png(2), b"damaged")] + [None]
        rows = datasets.Dataset.from_dict({"img": images, "fine_label": labels}, features=features)
        rows.to_parquet(tmp_path / "set" / f"{split}.parquet")
    columns = {"image_column": "img", "label_column": "fine_label"}
    found = load(f"hfds/{tmp_path / 'set'}", tmp_path / "cache", channels=1, **columns)
    assert found.train.labels.tolist() == [0, 1, 1, 0] and found.test is None
    assert [image[0, 0, 0].item() for image in found.train.fetch([1, 0])] == [2, 1]
    with pytest.raises(UserError, match=r"train image 2 cannot be read: it is not an image of a known format"):
        found.train.fetch([2])
    with pytest.raises(UserError, match=r"train image 3 cannot be read: the dataset has a label but no image there"):
        found.train.fetch([3])
    monkeypatch.setattr("accel_train.data.sources.hub.MAX_BYTES", 50)
    with pytest.raises(UserError, match=r"train image 0 cannot be read: it has \d+ bytes, more than an image can have"):
        found.train.fetch([0])


def test_columns_that_are_named(tmp_path: Path, datasets) -> None:
    """As of CIFAR-100 on the hub, whose images have two labels."""
    features = datasets.Features({
        "img": datasets.Image(), "fine": datasets.ClassLabel(names=["a", "b"]),
        "coarse": datasets.ClassLabel(names=["c", "d", "e"]), "number": datasets.Value("int64"),
    })  # fmt: skip
    file = io.BytesIO()
    Image.new("L", (5, 5), 7).save(file, "PNG")
    images = [{"bytes": file.getvalue(), "path": None}] * 4
    columns = {"img": images, "fine": [0, 1, 1, 0], "coarse": [2, 1, 0, 0], "number": [0, 0, 1, 1]}
    (tmp_path / "set").mkdir()
    datasets.Dataset.from_dict(columns, features=features).to_parquet(tmp_path / "set" / "train.parquet")
    name = f"hfds/{tmp_path / 'set'}"

    def found(**options: str):
        return load(name, tmp_path / "cache", channels=1, **{"image_column": "img", **options})

    for column in ("fine", "coarse", "number"):
        split = found(label_column=column)
        assert split.train.labels.tolist() == columns[column]
        assert split.classes == {"fine": ("a", "b"), "coarse": ("c", "d", "e"), "number": ("0", "1")}[column]
    for options, message in (
        ({}, r"no column 'label' of labels; of labels are: fine, coarse, number\. Name one with --data\.label-column"),
        ({"label_column": "corse"}, r"no column 'corse' of labels; .* Did you mean 'coarse'"),
        ({"image_column": "number"}, r"no column 'number' of images; of images are: img\."),
    ):
        with pytest.raises(UserError, match=message):
            found(**options)


def test_no_such_data_set(tmp_path: Path, datasets) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load(f"hfds/{tmp_path / 'nowhere'}", tmp_path / "cache")


def test_only_builders_of_images_are_used(tmp_path: Path, datasets, monkeypatch: pytest.MonkeyPatch) -> None:
    """The builder pandas unpickled in some versions."""
    trap = tmp_path / "trap"

    class Trap:
        def __reduce__(self):
            return Path.touch, (trap,)

    (tmp_path / "train.pkl").write_bytes(pickle.dumps(Trap()))
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "train.csv").write_text("image,label\na.png,1\n")
    monkeypatch.chdir(tmp_path)
    for name, builder in (("pandas", "pandas"), ("text", "text"), (tmp_path / "words", "csv")):
        with pytest.raises(UserError, match=rf"would be read by the builder {builder} of datasets: expected one"):
            load(f"hfds/{name}", tmp_path / "cache")
    assert not trap.exists()


def test_a_small_parquet_file_of_many_zeros_is_refused_before_it_is_unpacked(tmp_path: Path, datasets) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "zeros" / "train.parquet"
    file.parent.mkdir()
    image = {"bytes": bytes(1 << 27), "path": None}
    parquet.write_table(pyarrow.Table.from_pylist([{"image": image, "label": 0}]), file, compression="zstd")
    assert file.stat().st_size < 1 << 20
    for name, root in ((f"hfds/{file.parent}", tmp_path / "cache"), ("hfds/parquet", file.parent)):
        with pytest.raises(UserError, match=r"train\.parquet has .* bytes and would unpack to 134,.*; remove it"):
            load(name, root)
    assert not [*tmp_path.rglob("*.arrow")]


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    with pytest.raises(UserError, match=r"pip install 'accel-train\[datasets\]'"):
        load_splits(Data(name="hfds/x"), 0)
