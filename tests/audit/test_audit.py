"""The audit finds each planted fault, and nothing in a clean data set; what it has looked at is kept."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest
import torch
from PIL import Image

from accel_train.audit import audit, look
from accel_train.audit.audit import AuditResult, check_data
from accel_train.cli import main
from accel_train.config.schema import Data
from accel_train.errors import UserError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def folder() -> AuditResult:
    return check_data(Data(name="folder", root=Path("pets")), processes=1)


def named(result: AuditResult, kind: str) -> list[list[str]]:
    """The names of the images of a finding, group by group."""
    finding = result.finding(kind)
    assert finding is not None, kind
    names = [sorted(result.images.name(id).removeprefix(str(result.name)) for id in group) for group in finding.groups]
    return sorted(names)


def test_nothing_is_found_in_a_clean_data_set(capsys: pytest.CaptureFixture[str]) -> None:
    planted.clean(Path("pets"))
    assert main(["check-data", "folder", "--root", "pets", "--strict", "true", "--processes", "1"]) == 0
    printed = capsys.readouterr().out
    assert "Nothing was found that you must decide on" in printed and "All 36 images can be read." in printed
    assert json.loads(Path("audit-pets/audit.json").read_text())["findings"] == []
    assert "Nothing was found" in Path("audit-pets/audit.html").read_text()


def test_every_planted_fault_is_found() -> None:
    planted.clean(Path("pets"))
    planted.plant(Path("pets"))
    result = folder()
    kinds = {result.images.name(each.id): each.kind for each in result.unreadable}
    assert kinds == {
        "train/cat/empty.jpg": "empty",
        "train/cat/cut.jpg": "truncated",
        "train/cat/text.jpg": "no image",
        "train/cat/page.jpg": "no image",
        "train/cat/phone.jpg": "format",
        "train/dog/web.jpg": "format",
        "train/dog/new.jpg": "format",
    }
    packages = {each.why: each.package for each in result.unreadable if each.package}
    assert packages["it is HEIC"] == "pillow-heif" and packages["it is JPEG XL"] == "pillow-jxl-plugin"
    assert named(result, "equal-labels") == [["train/cat/0.jpg", "train/dog/first_again.jpg"]]
    assert named(result, "equal-splits") == [["test/dog/0.jpg", "train/dog/seen.png"]]
    assert named(result, "equal-same") == [["train/cat/1.jpg", "train/cat/1_copy.jpg"]]
    assert named(result, "similar-splits") == [["train/cat/2.jpg", "val/cat/smaller.jpg"]]
    assert named(result, "constant") == [["train/dog/blue.png"]]
    assert named(result, "narrow") == [["train/dog/night.png"]]
    assert named(result, "grey") == [["train/dog/grey.png"]]
    assert named(result, "rotated") == [["train/dog/turned.jpg"]]
    assert named(result, "long") == [["train/dog/panorama.jpg"]]
    assert named(result, "small") == [["train/dog/icon.png"]]
    for kind, names in {
        "no-images-train": ("fish",),
        "no-images-val": ("fish", "owl"),
        "no-images-test": ("fish", "owl"),
        "few-images": ("owl (1)",),
    }.items():
        finding = result.finding(kind)
        assert finding is not None and finding.names == names
    assert result.finding("not-used") is not None
    assert len(result.mistakes) == 1 and "'fish'" in result.mistakes[0]
    # Nothing else, and what must be decided on first.
    assert len(result.findings) == 16
    assert [each.decide for each in result.findings] == sorted((each.decide for each in result.findings), reverse=True)


def test_the_same_images_in_all_splits_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Such a test split is answered by heart."""
    for split in ("train", "val", "test"):
        for name in ("cat", "dog"):
            Path("pets", split, name).mkdir(parents=True)
            for number in range(12):
                planted.scene(number + 100 * (name == "dog")).save(f"pets/{split}/{name}/{number}.png")
    line = ["check-data", "folder", "--root", "pets", "--processes", "1"]
    assert main(line) == 0
    printed = capsys.readouterr().out
    assert "72 equal images in different splits, in 24 groups." in printed
    assert "train/cat/0.png (train, cat) = val/cat/0.png (val, cat) = test/cat/0.png (test, cat)" in printed
    assert main([*line, "--strict", "true"]) == 1


def test_what_was_looked_at_is_kept_until_a_file_changes() -> None:
    planted.clean(Path("pets"))
    assert folder().reused == 0
    first = json.loads(Path("audit-pets/audit.json").read_text())
    assert folder().reused == 36
    assert json.loads(Path("audit-pets/audit.json").read_text()) == first
    changed, removed, empty = (Path("pets/train/cat", name) for name in ("0.jpg", "1.jpg", "2.jpg"))
    Image.new("RGB", (90, 80)).save(changed)
    removed.unlink()
    empty.write_bytes(b"")
    result = folder()
    assert result.reused == 33 and named(result, "constant") == [["train/cat/0.jpg"]]
    assert [result.images.name(each.id) for each in result.unreadable] == ["train/cat/2.jpg"]
    assert folder().reused == 34
    # The pixels of other options are others.
    assert check_data(Data("folder", Path("pets"), max_pixels=7000), processes=1).reused == 0


def test_an_audit_that_was_killed_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.clean(Path("pets"))
    monkeypatch.setattr("accel_train.data.tools.pool.CHUNK", 8)
    real = look.look
    calls: list[Any] = []

    def killed(*arguments: Any) -> object:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(audit, "look", killed)
    with pytest.raises(KeyboardInterrupt):
        folder()
    with Path("audit-pets/looked-at.bin").open("ab") as file:
        file.write(bytes(100))  # what a crash may leave of a record
    assert folder().reused == 16
    kept = Path("audit-pets/looked-at.bin")
    assert kept.stat().st_size == 36 * look.RECORD.itemsize
    damaged = bytearray(kept.read_bytes())
    damaged[40] ^= 1
    kept.write_bytes(damaged)
    assert folder().reused == 35
    os.truncate(kept, 0)
    assert folder().reused == 0


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
    with pytest.raises(UserError, match=r"there is no file 'none.jpg'.*2 rows have such a mistake"):
        check_data(Data("csv", Path("pets/labels.csv")), processes=1)


def test_data_in_memory_and_the_users_own() -> None:
    """Of several labels an image, too; floats with NaN."""
    torch.manual_seed(0)
    images = torch.rand(24, 3, 16, 16)
    images[3], images[5, 0, 0, 0] = images[20], torch.nan
    images[7] = 0.5
    labels = (torch.rand(24, 4) < 0.5).long()
    labels[3], labels[20, 0] = labels[20], 1 - labels[20, 0]
    train = torch.utils.data.TensorDataset(images, labels)
    from accel_train.api import check_data as from_python

    result = from_python(data={"train": train})
    assert named(result, "equal-labels") == [[" train image 20", " train image 3"]]
    assert named(result, "constant") == [[" train image 7"]] and named(result, "not-finite") == [[" train image 5"]]
    assert result.unreadable_list is None and (result.folder / "audit.json").is_file()
    assert not from_python("digits", processes=1).to_decide


def test_mnist_has_no_equal_images_and_planted_ones_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from accel_train.audit.duplicates import equal_images, similar_images

    place = os.environ.get("ACCEL_TRAIN_TEST_DATA")
    if not place or not Path(place, "MNIST").is_dir():
        pytest.skip("ACCEL_TRAIN_TEST_DATA has no MNIST")
    from accel_train.data.sources.arrays import torchvision_set

    splits = torchvision_set("mnist", Path(place), download=False)
    pixels = torch.cat([torch.as_tensor(source.fetch(range(5000))) for source in splits.sources.values()])
    pixels = torch.cat([pixels, pixels[[17, 8000]]])
    records = np.zeros(len(pixels), look.RECORD)
    look.measure(pixels, records)
    assert [group.tolist() for group in equal_images(records)] == [[17, 10_000], [8000, 10_001]]
    assert similar_images(records) == []
