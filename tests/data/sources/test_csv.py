"""CSV tables that list image files; each mistake in one line with the row's number."""

from __future__ import annotations

import codecs
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from accel_train.cli import main
from accel_train.config.schema import Data
from accel_train.data.sources.load import load_splits
from accel_train.data.sources.splits import Source, Splits
from accel_train.errors import UserError
from accel_train.task import ONE_LABEL, SEVERAL_LABELS
from accel_train.tools.shards import write_shards

IMAGES = ("a/1.png", "a/2.png", "b/3.png", "b/4.png", "c d/5.png", "6.png", "7.png")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    numbers = np.random.default_rng(0)
    for path in IMAGES:
        (root / path).parent.mkdir(exist_ok=True)
        Image.fromarray(numbers.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(root / path)
    return root


def data(images: Path, content: str | bytes, **options: Any) -> Data:
    path = images / "labels.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return Data(name="csv", root=path, **options)  # type: ignore[arg-type]


def load(images: Path, content: str | bytes, **options: Any) -> Splits:
    return load_splits(data(images, content, **options), 0)


def names(source: Source | None, root: Path) -> list[str]:
    assert source is not None
    return [source.name(id).removeprefix(f"{root}/") for id in range(len(source))]


def mistakes(images: Path, content: str | bytes) -> list[str]:
    with pytest.raises(UserError) as raised:
        load(images, content)
    return [message.replace(f"{images}/labels.csv", "TABLE") for message in raised.value.messages]


def mistake(images: Path, content: str | bytes) -> str:
    (line,) = mistakes(images, content)
    assert "\n" not in line
    return line


SPLIT = "path,label,split\nb/4.png,dog,val\n7.png,dog,TRAIN\na/1.png,cat,train\nb/3.png,cat,valid\na/2.png,cat,test\n"


def test_the_columns_and_the_order_of_samples(images: Path) -> None:
    splits = load(images, SPLIT)
    assert splits.classes == ("cat", "dog") and splits.task is ONE_LABEL
    assert names(splits.train, images) == ["7.png", "a/1.png"] and splits.train.labels.tolist() == [1, 0]
    assert names(splits.validation, images) == ["b/3.png", "b/4.png"] and splits.validation.labels.tolist() == [0, 1]
    assert names(splits.test, images) == ["a/2.png"]
    assert splits.train.labels.dtype == torch.int64 and splits.train.fetch([0])[0].shape == (3, 9, 9)


def test_the_table_is_its_content_not_its_form(images: Path) -> None:
    """Other order of rows and columns, other names and delimiters, a BOM, CRLF, spaces, quotes, empty rows."""
    expected = load(images, SPLIT)
    head, *rows = SPLIT.splitlines()
    others = [
        "\n".join([head, *reversed(rows)]),
        codecs.BOM_UTF8 + SPLIT.replace("\n", "\r\n").encode(),
        SPLIT.replace(",", ";"),
        SPLIT.replace(",", "\t"),
        SPLIT.replace(",", " , ").replace("\n", "\n\n,,\n"),
        SPLIT.replace("path", '"Path"').replace("label", "LABEL").replace("a/1.png", '"./a//1.png"'),
        "\n".join(",".join([cells[2], "x", cells[1], cells[0]]) for cells in (row.split(",") for row in [head, *rows])),
    ]
    for text in others:
        splits = load(images, text)  # type: ignore[arg-type]
        assert names(splits.train, images) == ["7.png", "a/1.png"]
        assert splits.table == expected.table and splits.classes == expected.classes
    assert splits.ignored == "column 'x'"
    changed = [SPLIT.replace("7.png,dog", "6.png,dog"), SPLIT.replace("test", "val"), SPLIT.replace("cat", "kat")]
    assert len({expected.table, *(load(images, text).table for text in changed)}) == 4


def test_columns_that_are_named(images: Path) -> None:
    """Also where others have the usual names; and the index of the same table is not that of its other columns."""
    text = "photo id,label,breed,genus\n6.png,x,poodle,canis\n7.png,x,siamese,felis\na/1.png,x,poodle,canis\n"
    for column, classes in (("breed", ("poodle", "siamese")), ("Genus", ("canis", "felis"))):
        for _ in range(2):  # then from the index
            splits = load(images, text, image_column="Photo ID", label_column=column)
            assert splits.classes == classes and splits.train.labels.tolist() == [0, 1, 0]
    with pytest.raises(UserError, match="has only one class, 'x'"):
        load(images, text, image_column="photo id")
    for options, message in (
        ({"label_column": "breeds"}, r"there is no column 'breeds'; found .* Did you mean 'breed'"),
        ({"label_column": "breed"}, r"no column 'path'; .* Name the column of the path with --data\.image-column"),
    ):
        with pytest.raises(UserError, match=message):
            load(images, text, **({"image_column": "photo id"} if "breeds" in options.values() else {}), **options)


@pytest.mark.parametrize(
    ("labels", "classes", "numbers"),
    [
        (["0", "1", "2", "10"], ("0", "1", "2", "10"), [0, 1, 2, 3]),
        (["10", "1", "7", "1"], ("1", "7", "10"), [2, 0, 1, 0]),
        (["-1", "1", "1", "-1"], ("-1", "1"), [0, 1, 1, 0]),
        (["10", "9", "x", "x"], ("10", "9", "x"), [0, 1, 2, 2]),
        (["001", "3", "02", "3"], ("001", "02", "3"), [0, 2, 1, 2]),
        (["dög", "Cat", "cat", '"a, b"'], ("Cat", "a, b", "cat", "dög"), [3, 0, 2, 1]),
    ],
)
def test_numbers_and_names(images: Path, labels: list[str], classes: tuple[str, ...], numbers: list[int]) -> None:
    rows = zip(sorted(IMAGES)[:4], labels, strict=True)
    splits = load(images, "path,label\n" + "".join(f"{path},{label}\n" for path, label in rows))
    assert splits.classes == classes and splits.train.labels.tolist() == numbers


def test_one_number_in_two_spellings_is_refused(images: Path) -> None:
    with pytest.raises(UserError, match="the labels '001' and '1' are one number"):
        load(
            images,
            "path,label\n" + "".join(f"{p},{n}\n" for p, n in zip(sorted(IMAGES)[:3], ("001", "1", "2"), strict=True)),
        )


def test_several_labels(images: Path) -> None:
    table = "path,label,split\n6.png,2;10,train\n7.png,2,train\na/1.png,;,train\na/2.png,10; 3,train\nb/3.png,3,val\n"
    splits = load(images, table)
    assert splits.task is SEVERAL_LABELS and splits.classes == ("2", "3", "10")
    assert splits.train.labels.dtype == torch.bool and splits.validation is not None
    assert splits.train.labels.int().tolist() == [[1, 0, 1], [1, 0, 0], [0, 0, 0], [0, 1, 1]]
    assert splits.validation.labels.int().tolist() == [[0, 1, 0]]
    halves = load(images, table.replace(",val", ",train"), val_fraction=0.4)
    assert halves.validation is not None and [len(halves.train), len(halves.validation)] == [3, 2]
    quoted = 'path;label\n6.png;"x;y"\n7.png;x\n'
    assert load(images, quoted).train.labels.int().tolist() == [[1, 1], [1, 0]]


def test_the_same_division_as_a_folder_of_the_same_images(tmp_path: Path) -> None:
    for n in range(40):
        (tmp_path / "ab"[n % 2]).mkdir(exist_ok=True)
        Image.new("L", (4, 4), n).save(tmp_path / "ab"[n % 2] / f"{n}.png")
    rows = [f"{'ab'[n % 2]}/{n}.png,{'ab'[n % 2]}" for n in reversed(range(40))]
    (tmp_path / "labels.csv").write_text("\n".join(["path,label", *rows]))
    (tmp_path / "bad").write_text("a/0.png\nb/11.png\n")
    skip = tmp_path / "bad"
    for name, root in (("folder", tmp_path), ("csv", tmp_path / "labels.csv")):
        splits = load_splits(Data(name, root, 0.2, 0.1, train_limit=25, skip_unreadable=skip), 5)
        found = [names(part, tmp_path) for part in (splits.train, splits.validation, splits.test)]
        assert splits.left_out == 2
        if name == "folder":
            expected = found
    assert found == expected and [len(part) for part in found] >= [25, 6, 3]


def test_links_into_the_tables_folder_are_followed(images: Path, tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(images / "a")
    (tmp_path / "6.png").symlink_to(images / "6.png")
    splits = load(tmp_path, "path,label\na/1.png,x\na/2.png,y\n6.png,x\n")
    assert len(splits.train) == 3 and len(splits.train.fetch([0, 1, 2])) == 3


GOOD = "path,label\n6.png,x\n7.png,y\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD + "8.png,x\n", "row 4: there is no file '8.png' in "),
        (GOOD + "a,x\n", "row 4: there is no file 'a' in "),
        (GOOD + f"{'long' * 100}.png,x\n", "row 4: there is no file"),
        (GOOD + f"{'long' * 1000}.png,x\n", " …"),
        (GOOD + "\n./7.png,x\n", "row 5: the image '7.png' is also in row 3"),
        (GOOD + "../x.png,x\n", "row 4: the path '../x.png' leads outside the table's folder"),
        (GOOD + "a/../7.png,x\n", "row 4: the path 'a/../7.png' leads outside"),
        (GOOD + "/x.png,x\n", "row 4: there is no file '/x.png'"),
        (GOOD + "C:\\x.png,x\n", "row 4: there is no file 'C:\\x.png' in "),
        (GOOD + "a/1.png,\n", "row 4: the label is empty."),
        (GOOD + "a/1.png,x;y\na/2.png,\n", "row 5: the label is empty."),
        (GOOD + ",x\n", "row 4: the path is empty."),
        (GOOD + "a/1.png,x,3\n", "row 4: it has 3 cells, but the header has 2; put a cell"),
        (GOOD + "a/1.png\n", "row 4: it has 1 cells, but the header has 2;"),
        (GOOD + 'a/1.png,"x\n', "row 4: it is not valid CSV (unexpected end of data)"),
        (GOOD + 'a/1.png,"x\ny"\n', "row 4: the label has a line break or another"),
        (GOOD + "a/1.png,x\0\n", "row 4: the label has a line break or another control character"),
        ((GOOD + "a/1.png,dög\n").encode("latin-1"), "row 4: it is not UTF-8"),
        (codecs.BOM_UTF16_LE + GOOD.encode("utf-16-le"), "row 1: it is not UTF-8"),
        ("", "TABLE is empty; its first row must name the columns, such as path,label."),
        ("\n\n", "TABLE is empty"),
        ("path,label\n", "TABLE has a header, but no row with an image."),
        ("paht,label\n6.png,x\n", "row 1: there is no column 'path'; found 'paht', 'label'. Did you mean 'paht'? Name "
         "the column of the path with --data.image-column."),
        ("path,class\n6.png,x\n", "row 1: there is no column 'label'; found 'path', 'class'. Name the column of the "
         "label with --data.label-column."),
        ("path,label,Label\n6.png,x,1\n", "row 1: 2 columns are named 'label'; keep one."),
        ("path,label\n6.png,x\n7.png,x\n", "only one class, 'x'"),
        ("path,label,split\n6.png,x,train\n7.png,y,vall\n", "row 3: unknown split 'vall'; expected train, val or test. "
         "Did you mean 'val'?"),
        ("path,label,split\n6.png,x,train\n7.png,y,\n", "row 3: the split is empty."),
        ("path,label,split\n6.png,x,val\n7.png,y,test\n", "no row has the split train, only test and validation."),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_the_rows_number(images: Path, text: str | bytes, expected: str) -> None:
    assert expected in mistake(images, text)


def test_of_many_mistakes_the_first_rows_and_their_number_are_named(images: Path) -> None:
    rows = "a/1.png,\n" * 2 + "\n\n" + "a/2.png,\n" * 1000
    found = mistakes(images, GOOD + rows)
    assert [line.partition(": the label is empty")[0] for line in found[:5]] == [
        f"TABLE, row {number}" for number in (4, 5, 8, 9, 10)
    ]
    assert found[5:] == ["TABLE: 1002 rows have mistakes; these are the first 5."]


def test_of_many_missing_files_the_first_and_their_number_are_named(images: Path) -> None:
    line = mistake(images, GOOD + "".join(f"{n}.jpg,x\n" for n in range(1000)))
    assert line.startswith(
        f"TABLE, row 4: there is no file '0.jpg' in {images}. 1000 of the table's 1002 files are not"
    )


def test_rows_are_numbered_as_an_editor_shows_them(images: Path) -> None:
    found = mistakes(images, 'path,label,text\r\n6.png,x,"two\r\nlines"\r\n\r\n7.png,,""\r\n8.png,')
    assert [line.partition(":")[0] for line in found] == ["TABLE, row 5", "TABLE, row 6"]


def test_a_class_without_a_training_image_is_named(images: Path) -> None:
    for labels in ("xy", ("x;y", "x;z")):
        splits = load(images, f"path,label,split\n6.png,{labels[0]},train\n7.png,{labels[1]},val\n")
        assert "1 of" in splits.notes[0] and "classes have no training image" in splits.notes[0]


def test_not_a_table(images: Path, tmp_path: Path) -> None:
    data(images, GOOD)
    os.mkfifo(tmp_path / "pipe.csv")
    for root, expected in (
        (images, "is not a regular file; name a CSV file."),
        (tmp_path / "none.csv", "does not exist; name a CSV file."),
        (tmp_path / "pipe.csv", "is not a regular file; name a CSV file."),
    ):
        with pytest.raises(UserError) as raised:
            load_splits(Data(name="csv", root=root), 0)
        assert expected in str(raised.value)
    for name, expected in (("folder", "give --data.name csv."), ("my.csv", "give --data.name csv --data.root my.csv.")):
        with pytest.raises(UserError) as raised:
            load_splits(Data(name=name, root=images / "labels.csv"), 0)
        assert expected in str(raised.value)


def test_check_data_and_shards(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    for path in ("a/1.png", "a/2.png", "6.png", "7.png"):
        (tmp_path / path).write_bytes((images / path).read_bytes())
    (tmp_path / "a/3.png").write_bytes(b"no image")
    rows = zip(("6.png", "7.png", "a/1.png", "a/2.png", "a/3.png"), ["x;y", "x", ";", "y", "y"], strict=True)
    table = data(tmp_path, "path,label,age\n" + "".join(f"{path},{label},9\n" for path, label in rows))
    line = f"check-data csv --data.root {table.root} --output {tmp_path / 'bad'} --processes 1"
    assert main(line.split()) == 1
    assert (tmp_path / "bad").read_text().splitlines()[1:] == ["a/3.png"]
    printed = capsys.readouterr().out
    assert "Not used: column 'age'" in printed and "--data.name csv" in printed

    skipping = Data(name="csv", root=table.root, skip_unreadable=tmp_path / "bad")
    with pytest.raises(UserError, match=r"a/3\.png cannot be read"):
        write_shards(table, tmp_path / "out", encoding="raw", processes=1)
    write_shards(skipping, tmp_path / "out", encoding="raw", processes=1)
    before, after = load_splits(skipping, 0), load_splits(Data("wds", tmp_path / "out"), 0)
    one, other = before.to_train_on, after.train
    assert after.classes == before.classes and len(other) == 4
    assert torch.equal(one.labels, other.labels) and one.labels.dtype == other.labels.dtype
    assert all(map(torch.equal, one.fetch(range(4)), other.fetch(range(4))))


def test_paths_may_be_absolute(images: Path, tmp_path: Path) -> None:
    rows = "path,label\n" + "".join(f"{images}/{path},{path[0]}\n" for path in IMAGES[:4])
    inside = load(images, rows)
    assert names(inside.train, images) == sorted(IMAGES[:4])
    assert inside.table == load(images, rows.replace(f"{images}/", "")).table
    assert names(load(tmp_path, rows).train, images) == sorted(IMAGES[:4])
