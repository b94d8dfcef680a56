"""Which files of a data set are images by their names: everywhere the same ones, and the others are counted."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from accel_train.cli import main
from accel_train.config.schema import Data
from accel_train.data.sources.load import load_splits

KINDS = {"jfif": "JPEG", "gif": "GIF", "avif": "AVIF", "jp2": "JPEG2000", "JPE": "JPEG", "pbm": "PPM", "tga": "TGA"}
SIZE = 16


def write(path: Path, format: str, value: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("1" if path.suffix == ".pbm" else "L", (SIZE, SIZE), value).save(path, format)
    return path


def photos(root: Path, count: int = 12) -> Path:
    for number in range(count):
        write(root / ("dark", "light")[number % 2] / f"{number}.png", "PNG", number * 10)
    return root


def words(root: Path, run: Path, *others: object) -> list[str]:
    line = "train digits --batch-size 4 --micro-batch-size 4 --data.name folder --data.channels 1 --data.workers 0"
    line += " --model.image-size 8 --data.val-fraction 0.25 --data.train-limit 6 --schedule.name constant"
    return [*line.split(), "--data.root", str(root), "--output-dir", str(run), *map(str, others)]


def test_folders_and_shards_take_the_same_kinds(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        for suffix, format in KINDS.items():
            write(tmp_path / "images" / folder / f"x{suffix}.{suffix}", format)
    names = {f"{folder}/x{suffix}.{suffix}" for folder in "ab" for suffix in KINDS}
    shards = tmp_path / "shards"
    shards.mkdir()
    with tarfile.open(shards / "data-train-0.tar", "w") as archive:
        for number, name in enumerate(sorted(names)):
            archive.add(tmp_path / "images" / name, name.replace(".", f"{number}."))
            label = tarfile.TarInfo(name.partition(".")[0] + f"{number}.cls")
            label.size = 1
            archive.addfile(label, io.BytesIO(b"01"[number % 2 : number % 2 + 1]))
    for data in (Data("folder", tmp_path / "images"), Data("wds", shards)):
        source = load_splits(data, 0).train
        assert len(source) == len(names), data.name
        assert all(image.shape == (3, SIZE, SIZE) for image in source.fetch(range(len(source))))


def test_a_sample_of_a_shard_whose_image_has_an_unknown_name_is_counted(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "train.tar", "w") as archive:
        for number in range(4):
            write(tmp_path / "x.png", "PNG")
            archive.add(tmp_path / "x.png", f"{number}.{'heic' if number == 3 else 'png'}")
            for ending, content in (("cls", str(number % 2)), ("json", "{}")):
                member = tarfile.TarInfo(f"{number}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content.encode()))
    splits = load_splits(Data("wds", tmp_path), 0)
    assert len(splits.train) == 3 and splits.ignored == "1 .heic"


def test_predict_says_which_files_of_a_folder_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, run = photos(tmp_path / "images"), tmp_path / "run"
    assert main(words(root, run, "--epochs", 1)) == 0
    new = tmp_path / "new"
    for suffix, format in KINDS.items():
        write(new / f"x.{suffix}", format)
    (new / "notes.txt").touch()
    (new / "y.xml").touch()
    (new / "z.xml").touch()
    capsys.readouterr()
    assert main(["predict", str(run), str(new)]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1 + len(KINDS)
    assert f"{new}: 3 files are not images by their names and are left out: 2 .xml, 1 .txt." in err.splitlines()
