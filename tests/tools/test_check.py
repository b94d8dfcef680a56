"""`accel-train check-data` finds and lists all unreadable images, and training skips them; no other data set empties or
overwrites the list."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from accel_train.cli import main
from accel_train.config.schema import Data
from accel_train.data.sources.divide import read_list
from accel_train.data.sources.load import load_splits
from accel_train.errors import UserError
from accel_train.tools.audit import check_data


def images(root: Path, *, damaged: bool, count: int = 3) -> Path:
    """Write a folder of cats and dogs, one of them `damaged`."""
    for kind in ("cat", "dog"):
        (root / kind).mkdir(parents=True)
        for number in range(count):
            Image.new("L", (8, 8), number).save(root / kind / f"{number}.png")
    if damaged:
        (root / "cat/0.png").write_bytes(b"")
    return root


def check(*words: object) -> int:
    return main(["check-data", *map(str, words), "--processes", "1"])


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def data(tmp_path: Path) -> Data:
    """Write 150 images to train/ and 6 to val/, of which three and one are damaged."""
    root = tmp_path / "pets"
    for split, count in (("train", 75), ("val", 3)):
        for kind in ("cat", "dog"):
            (root / split / kind).mkdir(parents=True)
            for i in range(count):
                Image.effect_noise((20, 20), 50).save(root / split / kind / f"{i}.jpg")
    (root / "train/cat/3.jpg").write_bytes(b"")
    (root / "train/dog/74.jpg").write_bytes((root / "train/dog/1.jpg").read_bytes()[:-50])
    (root / "train/dog/70.jpg").write_text("not an image")
    (root / "val/cat/1.jpg").write_bytes(b"\xff\xd8\xff")
    (root / "train/cat/4.jpg").unlink()
    Image.new("RGB", (2, 2)).save(root / "train/cat/4.jpg", "BMP")
    (root / "train/cat/Thumbs.db").write_bytes(b"junk")
    return Data(name="folder", root=root)


EXPECTED = ["train/cat/3.jpg", "train/dog/70.jpg", "train/dog/74.jpg", "val/cat/1.jpg"]


@pytest.mark.ci
@pytest.mark.parametrize("processes", [1, 2])
def test_all_are_found_and_can_be_left_out(data: Data, tmp_path: Path, processes: int, capfd) -> None:
    output = tmp_path / "new" / "unreadable.txt"
    line = [
        "check-data",
        "folder",
        "--data.root",
        str(data.root),
        "--output",
        str(output),
        "--processes",
        str(processes),
    ]
    assert main(line) == 1
    assert output.read_text().splitlines()[1:] == EXPECTED
    assert sorted(path.name for path in output.parent.iterdir()) == ["audit-unreadable.json", "unreadable.txt"]
    printed = capfd.readouterr().out
    assert "4 of 156 images cannot be read" in printed and "the file is empty" in printed
    assert (
        f"accel-train train RECIPE --data.name folder --data.root {data.root} --data.skip-unreadable {output}"
        in printed
    )
    assert "decoding: 156 images done\n" in printed and "\x1b" not in printed

    with pytest.raises(UserError, match="check-data"):
        every = load_splits(data, 0)
        every.train.fetch(range(len(every.train)))
    rest = load_splits(replace(data, skip_unreadable=output), 0)
    assert rest.left_out == 4 and (len(rest.to_train_on), len(rest.validation)) == (147, 5)
    assert len(rest.to_train_on.fetch(range(147))) == 147 and len(rest.validation.fetch(range(5))) == 5


def test_settings_of_a_run_do_not_hide_images(data: Data, tmp_path: Path) -> None:
    (tmp_path / "old").write_text("train/cat/3.jpg\n")
    limited = replace(data, train_limit=10, test_fraction=0.1, skip_unreadable=tmp_path / "old")
    assert len(check_data(limited, output=tmp_path / "new", processes=1).unreadable) == 4
    assert (tmp_path / "new").read_text().splitlines()[1:] == EXPECTED


def test_a_list_that_cannot_be_written(data: Data, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path / "file" / "list", tmp_path):
        with pytest.raises(UserError, match="cannot be written"):
            check_data(data, output=output, processes=1)


def test_an_image_of_too_many_pixels_is_refused(data: Data, tmp_path: Path) -> None:
    """The error comes before the image is decoded."""
    Image.new("1", (16_000, 12_000)).save(data.root / "train/cat/0.jpg", "PNG")  # 3 kB
    with pytest.raises(
        UserError, match=r"0\.jpg cannot be read: .*192000000 pixels.* exceeds limit of 178956970 pixels"
    ):
        load_splits(data, 0).train.fetch([0])
    listed = tmp_path / "list"
    assert main([*f"check-data --data.root {data.root} folder --output {listed}".split(), "--processes", "1"]) == 1
    assert "train/cat/0.jpg" in listed.read_text()


def test_it_takes_what_train_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("model: {name: resnet18}\ndata: {name: folder, root: photos, channels: 1}\n")
    seen: list[Data] = []
    monkeypatch.setattr("accel_train.cli.data.check_root", seen.append)
    monkeypatch.setattr("accel_train.tools.audit.check_data", lambda *_, **__: sys.exit(0))
    for words in (
        [str(recipe), "--data.root", "other", "--data.train-limit", "5"],
        ["folder", "--data.root", "other", "--data.channels", "1", "--data.train-limit", "5", "--epochs", "3"],
    ):
        assert main(["check-data", *words]) == 0
    assert seen == [Data("folder", Path("other"), channels=1, train_limit=5)] * 2
    assert main(["check-data", "--data.root", "other"]) == 2


def test_each_data_set_has_a_list_of_its_own() -> None:
    images(Path("pets"), damaged=True)
    images(Path("birds"), damaged=False)
    assert check("folder", "--data.root", "pets") == 1
    written = Path("unreadable-pets.txt").read_text()
    assert written.splitlines()[1:] == ["cat/0.png"]
    assert check("folder", "--data.root", "birds") == 0
    assert Path("unreadable-pets.txt").read_text() == written
    assert len(Path("unreadable-birds.txt").read_text().splitlines()) == 1
    (Path("birds") / "labels.csv").write_text("path,label\ncat/0.png,a\ndog/0.png,b\n")
    assert check("csv", "--data.root", "birds/labels.csv") == 0
    assert Path("unreadable-labels.csv.txt").is_file()


def test_a_list_of_another_data_set_is_not_overwritten(capsys: pytest.CaptureFixture) -> None:
    """Two folders with one name, and the other folder has nothing to list."""
    images(Path("a/pets"), damaged=True)
    images(Path("b/pets"), damaged=False, count=4)
    assert check("folder", "--data.root", "a/pets") == 1
    written = Path("unreadable-pets.txt").read_bytes()
    capsys.readouterr()
    for output in ((), ("--output", "unreadable-pets.txt")):
        assert check("folder", "--data.root", "b/pets", *output) == 2
        (line,) = capsys.readouterr().err.splitlines()
        head = f"# accel-train check-data: folder {Path('b/pets').resolve()}"
        assert f"unreadable-pets.txt does not begin with '{head}'" in line and "--output" in line
        assert Path("unreadable-pets.txt").read_bytes() == written
    Path("notes.txt").write_text("my notes\n")
    assert check("folder", "--data.root", "b/pets", "--output", "notes.txt") == 2
    assert "notes.txt does not begin with '# accel-train check-data: folder" in capsys.readouterr().err
    assert Path("notes.txt").read_text() == "my notes\n"
    assert check("folder", "--data.root", "b/pets", "--output", "other.txt") == 0


def test_the_list_of_the_same_data_set_is_written_again() -> None:
    images(Path("pets"), damaged=True)
    for _ in range(2):
        assert check("folder", "--data.root", "pets") == 1
    Image.new("L", (8, 8)).save("pets/cat/0.png")
    assert check("folder", "--data.root", str(Path("pets").resolve())) == 0
    assert len(Path("unreadable-pets.txt").read_text().splitlines()) == 1
    Path("unreadable-pets.txt").write_text("dog/1.png\n")  # written by hand
    assert check("folder", "--data.root", "pets") == 2


def test_the_list_goes_with_data_that_has_changed_or_moved() -> None:
    images(Path("a/pets"), damaged=True)
    assert check("folder", "--data.root", "a/pets") == 1
    listed = Path("unreadable-pets.txt")
    data = Data("folder", Path("a/pets"), skip_unreadable=listed)
    (data.root / "dog/2.png").unlink()
    assert load_splits(data, 0).left_out == 1
    rows = [f"{kind}/{number}.png,{kind}\n" for kind in ("cat", "dog") for number in range(2)]
    (data.root / "labels.csv").write_text("path,label\n" + "".join(rows))
    assert load_splits(replace(data, name="csv", root=data.root / "labels.csv"), 0).left_out == 1
    moved = data.root.rename("scratch")
    assert load_splits(replace(data, root=moved), 0).left_out == 1
    (moved / "cat/0.png").unlink()
    with pytest.raises(UserError, match=r"none of the 1 images that unreadable-pets.txt lists, such as 'cat/0.png'"):
        load_splits(replace(data, root=moved), 0)


def test_each_name_of_one_line_is_in_the_list() -> None:
    images(Path("pets"), damaged=True)
    names = ('"quoted".png', "return\r.png", "# accel-train check-data: .png", "ü \udcff.png")
    for name in (*names, "line\nbreak.png"):
        Path("pets/dog", name).touch()
    assert check("folder", "--data.root", "pets") == 1
    found = read_list(Path("unreadable-pets.txt"))
    assert found == {"cat/0.png", *(f"dog/{name}" for name in names)}
    data = Data("folder", Path("pets"), skip_unreadable=Path("unreadable-pets.txt"))
    assert load_splits(data, 0).left_out == 5
    Path("by_hand.txt").write_text("a.png\r\n\nb.png")
    assert read_list(Path("by_hand.txt")) == {"a.png", "b.png"}


def test_data_in_memory_has_no_list() -> None:
    assert check("digits") == 0
    assert [path.name for path in Path().iterdir()] == ["audit-digits.json"]


def test_the_check_goes_on_after_an_empty_class_folder(capsys: pytest.CaptureFixture) -> None:
    images(Path("pets"), damaged=True)
    Path("pets/fish").mkdir()
    Path("pets/owl").mkdir()
    Path("pets/owl/1.heic").touch()
    assert check("folder", "--data.root", "pets") == 1
    printed = capsys.readouterr().out
    assert "2 of 4 class folders of pets/ have no image: 'fish', 'owl'" in printed
    assert "1 of 6 images cannot be read" in printed
    assert Path("unreadable-pets.txt").read_text().splitlines()[1:] == ["cat/0.png"]
    Image.new("L", (8, 8)).save("pets/cat/0.png")
    assert check("folder", "--data.root", "pets") == 1  # it cannot be trained on
    assert "All 6 images can be read" in capsys.readouterr().out
    with pytest.raises(UserError, match="2 of 4 class folders of pets/ have no image: 'fish', 'owl'"):
        load_splits(Data("folder", Path("pets")), 0)
