"""The audit finds each planted fault, and nothing in a clean data set."""

import json
import os
from pathlib import Path

import numpy as np
import planted
import pytest
import torch

from accel_train.cli import main
from accel_train.config.schema import Data
from accel_train.errors import UserError
from accel_train.tools.audit import RECORD, AuditResult, check_data, equal_images, measure, similar_images


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def folder() -> AuditResult:
    return check_data(Data(name="folder", root=Path("pets")), processes=1)


def named(result: AuditResult, kind: str) -> list[list[str]]:
    """The names of the images of a finding, group by group."""
    finding = result.finding(kind)
    assert finding is not None, kind
    return sorted(
        sorted(result.images.describe(id)["name"].removeprefix(result.name) for id in group) for group in finding.groups
    )


def test_nothing_is_found_in_a_clean_data_set(capsys: pytest.CaptureFixture[str]) -> None:
    planted.clean(Path("pets"))
    assert main(["check-data", "folder", "--data.root", "pets", "--strict", "true", "--processes", "1"]) == 0
    printed = capsys.readouterr().out
    assert "Nothing was found that blocks or spoils a training." in printed
    assert "All 36 images can be read." in printed
    assert json.loads(Path("audit-pets.json").read_text())["findings"] == []


def test_every_planted_fault_is_found() -> None:
    planted.clean(Path("pets"))
    planted.plant(Path("pets"))
    result = folder()
    assert {result.images.describe(each.id)["name"] for each in result.unreadable} == {
        *("train/cat/empty.jpg", "train/cat/cut.jpg", "train/cat/text.jpg", "train/cat/page.jpg"),
        *("train/cat/phone.jpg", "train/dog/web.jpg", "train/dog/new.jpg"),
    }
    assert named(result, "equal-labels") == [["train/cat/0.jpg", "train/dog/first_again.jpg"]]
    assert named(result, "equal-splits") == [["test/dog/0.jpg", "train/dog/seen.png"]]
    assert named(result, "similar-splits") == [["train/cat/2.jpg", "val/cat/smaller.jpg"]]
    for kind, names in (("train", ("fish",)), ("val", ("fish", "owl")), ("test", ("fish", "owl"))):
        finding = result.finding(f"no-images-{kind}")
        assert finding is not None and finding.names == names
    assert len(result.mistakes) == 1 and "'fish'" in result.mistakes[0]
    assert len(result.findings) == 7  # nothing else


def test_the_same_images_in_all_splits_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Such a test split is answered by heart."""
    for split in ("train", "val", "test"):
        for name in ("cat", "dog"):
            Path("pets", split, name).mkdir(parents=True)
            for number in range(12):
                planted.scene(number + 100 * (name == "dog")).save(f"pets/{split}/{name}/{number}.png")
    line = ["check-data", "folder", "--data.root", "pets", "--processes", "1"]
    assert main(line) == 0
    printed = capsys.readouterr().out
    assert "72 equal images in different splits, in 24 groups." in printed
    assert "train/cat/0.png (train, cat) = val/cat/0.png (val, cat) = test/cat/0.png (test, cat)" in printed
    assert main([*line, "--strict", "true"]) == 1


def test_rows_of_a_table_without_files_are_all_told() -> None:
    planted.clean(Path("pets"))
    rows = [f"{split}/cat/{n}.jpg,cat,{split}\n{split}/dog/{n}.jpg,dog,{split}\n" for split in ("train", "test")
            for n in range(5)]  # fmt: skip
    Path("pets/labels.csv").write_text("path,label,split\n" + "".join(rows))
    result = check_data(Data("csv", Path("pets/labels.csv")), processes=1)
    missing = result.finding("missing")
    assert missing is not None
    assert missing.names == ("test/cat/3.jpg", "test/cat/4.jpg", "test/dog/3.jpg", "test/dog/4.jpg")
    assert len(result.images) == 16 and not result.unreadable and result.stops_training
    Path("pets/labels.csv").write_text("path,label\nnone.jpg,cat\nno.jpg,dog\n")
    with pytest.raises(UserError, match=r"there is no file 'none.jpg'.*2 of the table's 2 files are not there"):
        check_data(Data("csv", Path("pets/labels.csv")), processes=1)


def test_data_in_memory_and_the_users_own() -> None:
    """Of several labels an image, too; floats with NaN."""
    torch.manual_seed(0)
    images = torch.rand(24, 3, 16, 16)
    images[3], images[5, 0, 0, 0] = images[20], torch.nan
    labels = (torch.rand(24, 4) < 0.5).long()
    labels[3], labels[20, 0] = labels[20], 1 - labels[20, 0]
    train = torch.utils.data.TensorDataset(images, labels)
    from accel_train.api import check_data as from_python

    result = from_python(data={"train": train})
    assert named(result, "equal-labels") == [[" train image 20", " train image 3"]]
    assert result.unreadable_list is None and result.json.is_file()
    assert not from_python("digits", processes=1).findings


def test_mnist_has_no_equal_images_and_planted_ones_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    place = os.environ.get("ACCEL_TRAIN_TEST_DATA")
    if not place or not Path(place, "MNIST").is_dir():
        pytest.skip("ACCEL_TRAIN_TEST_DATA has no MNIST")
    from accel_train.data.sources.arrays import torchvision_set

    splits = torchvision_set("mnist", Path(place), download=False)
    pixels = torch.cat([torch.as_tensor(source.fetch(range(5000))) for source in splits.sources.values()])
    pixels = torch.cat([pixels, pixels[[17, 8000]]])
    records = np.zeros(len(pixels), RECORD)
    measure(pixels, records)
    assert [group.tolist() for group in equal_images(records)] == [[17, 10_000], [8000, 10_001]]
    assert similar_images(records, np.arange(len(pixels)) % 2) == []
