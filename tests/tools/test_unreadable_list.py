"""The list of `accel-train check-data`: no other data set empties or overwrites it."""

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from accel_train.cli import main
from accel_train.config.schema import Data
from accel_train.data.sources.divide import read_list
from accel_train.data.sources.load import load_splits
from accel_train.errors import UserError


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
