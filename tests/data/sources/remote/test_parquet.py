"""Images in Parquet files: what a training gets of them, where they are unpacked, and what is refused."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="accel-train[parquet] is not installed")
pytest.importorskip("datasets", reason="datasets is not installed")
pytest.importorskip("aiohttp", reason="accel-train[remote] is not installed")

import pyarrow
from parquet_files import images, table, write_hub
from pyarrow import parquet
from storage_server import StorageServer

from accel_train.cli import main
from accel_train.config.options import parse
from accel_train.config.schema import Data
from accel_train.config.url import Url
from accel_train.data.sources.load import load_splits
from accel_train.data.sources.remote import unpacked
from accel_train.data.sources.remote.parquet import unpacked as parquet_pieces
from accel_train.data.sources.remote.storage import Storage
from accel_train.data.sources.remote.unpacked import UnpackedCache
from accel_train.data.sources.sharded import shard_table
from accel_train.data.sources.splits import Source, sample_keys
from accel_train.doctor import storage
from accel_train.doctor.check import PASS
from accel_train.errors import UserError

TRAIN = "data/train-00000-of-00001.parquet"
KILLED = """
import os, signal, sys
from pathlib import Path
from accel_train.config.schema import Data
from accel_train.config.url import Url
from accel_train.data.sources.load import load_splits
from accel_train.data.sources.remote import unpacked
pieces = unpacked.unpacked
def some(*words):
    for number, piece in enumerate(pieces(*words)):
        if number == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        yield piece
unpacked.unpacked = some
load_splits(Data("parquet", Url(sys.argv[1]), cache_dir=Path(sys.argv[2])), 0)
"""
PEAK = """
import resource, sys
from pathlib import Path
from accel_train.data.sources.remote.parquet import unpacked
sum(len(piece) for piece in unpacked(Path(sys.argv[1]), "small", None, None))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
size = sum(len(piece) for piece in unpacked(Path(sys.argv[2]), "large", None, None))
print(size, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def data(root: object, tmp_path: Path, **options: Any) -> Data:
    where = Url(str(root)) if "://" in str(root) else Path(str(root))
    return Data("parquet", where, cache_dir=tmp_path / "cache", **options)


def files_of(source: Source | None) -> list[bytes]:
    read: Any = source
    return [read.read(id) for id in range(len(read))]


def write(folder: Path, name: str = TRAIN, **columns: Any) -> Path:
    """A file of plain pyarrow with these columns; return the folder."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), folder / name)
    return folder


def copies(tmp_path: Path) -> list[Path]:
    return sorted(path for path in tmp_path.glob("cache/*/*") if path.suffix in (".tar", ".part"))


def test_a_folder_as_the_hub_has_it(tmp_path: Path) -> None:
    folder = write_hub(tmp_path / "data")
    splits = load_splits(data(folder, tmp_path), 0)
    assert splits.classes == ("cat", "dog") and splits.test is None
    assert files_of(splits.train) == images(96) and files_of(splits.validation) == images(16, seed=1)
    assert splits.train.labels.tolist() == [0, 1] * 48
    keys = list(sample_keys(splits.train, folder))
    assert (keys[0], keys[17]) == (TRAIN.replace("1.", "6.") + "/000000", "data/train-00001-of-00006.parquet/000001")
    assert shard_table(Data("parquet", folder), splits.train).prefix.tolist() == [0, 16, 32, 48, 64, 80, 96]
    with tarfile.open(copies(tmp_path)[0]) as archive:
        assert archive.getnames() == ["about.json", *(f"{row:06d}" for row in range(16))]


@pytest.mark.parametrize("braces", [False, True])
def test_a_folder_and_a_web_server_are_the_same_data(tmp_path: Path, braces: bool) -> None:
    folder = write_hub(tmp_path / "data", below="")
    found = load_splits(data(folder, tmp_path / "local", val_fraction=0.0), 0)
    with StorageServer(folder) as server:
        names = "{train-{00000..00005}-of-00006,validation-00000-of-00001}.parquet"
        if not braces:  # a server does not list: the index is beside the files
            (index,) = tmp_path.glob("local/cache/*/.accel-train-index-parquet.safetensors")
            (folder / index.name).write_bytes(index.read_bytes())
        there = load_splits(data(f"{server.url}/{names}" if braces else server.url, tmp_path), 0)
        assert not server.bytes > 20_000 or braces
        assert files_of(there.train) == files_of(found.train) and there.classes == found.classes
        assert files_of(there.validation) == files_of(found.validation)
        sent = sorted(path for method, path, _ in server.log if method == "GET" and path.endswith(".parquet"))
        assert sent == sorted(path.name for path in folder.glob("*.parquet"))
    assert [path.suffix for path in copies(tmp_path)] == [".tar"] * 7  # no download is left


def test_bytes_and_texts_of_another_program(tmp_path: Path) -> None:
    names = pyarrow.array(["zebra", "ant", "bee", "ant"]).dictionary_encode()
    folder = write(tmp_path / "data", "train.parquet", picture=images(4), species=names)
    write(folder, "sub/test/0000.parquet", picture=images(2, seed=3), species=["cow", "ant"])
    with pytest.raises(UserError, match="its Parquet files are in 2 folders"):
        load_splits(data(folder, tmp_path), 0)
    (folder / "sub/test/0000.parquet").rename(folder / "test.parquet")
    splits = load_splits(data(folder, tmp_path), 0)
    assert splits.classes == ("ant", "bee", "cow", "zebra")
    assert splits.train.labels.tolist() == [3, 0, 1, 0] and files_of(splits.train) == images(4)
    assert splits.test is not None and splits.test.labels.tolist() == [2, 0]


def test_numbers_without_names(tmp_path: Path) -> None:
    folder = write(tmp_path, pixels=images(4), label=pyarrow.array([2, 0, 1, 0], pyarrow.uint8()), id=[*range(4)])
    splits = load_splits(data(folder, tmp_path), 0)
    assert splits.classes == ("0", "1", "2") and splits.train.labels.tolist() == [2, 0, 1, 0]


def test_columns_are_chosen_as_hfds_chooses_them_or_given(tmp_path: Path) -> None:
    contents = images(4)
    struct = [{"bytes": content, "path": None} for content in images(4, seed=5)]
    made = table(contents, label_too=["a", "b", "c", "a"]).add_column("image_too", struct)
    (tmp_path / "data").mkdir()
    made.to_parquet(tmp_path / TRAIN)
    usual = load_splits(data(tmp_path, tmp_path), 0)
    assert usual.classes == ("cat", "dog") and files_of(usual.train) == contents
    given = data(tmp_path, tmp_path, image_column="image_too", label_column="label_too")
    other = load_splits(given, 0)  # with the same cache
    assert other.classes == ("a", "b", "c") and files_of(other.train) == images(4, seed=5)
    again = load_splits(data(tmp_path, tmp_path), 0)
    assert again.classes == ("cat", "dog") and files_of(again.train) == contents
    with pytest.raises(UserError, match=r"--data\.label-column labl: .*train-00000.* has the columns .*'label_too'"):
        load_splits(data(tmp_path, tmp_path, label_column="labl"), 0)


def test_a_split_without_labels_and_other_splits_are_left_out(tmp_path: Path) -> None:
    folder = write_hub(tmp_path / "data", train=1, val=0, per_shard=4)
    table(images(3)).map(lambda row: {"label": -1}).to_parquet(folder / "data" / "test-00000-of-00001.parquet")
    table(images(3)).to_parquet(folder / "data" / "extra-00000-of-00001-0123abcd.parquet")
    splits = load_splits(data(folder, tmp_path), 0)
    assert len(splits.train) == 4 and splits.test is None and splits.validation is None
    assert splits.ignored == "1 Parquet file, such as data/extra-00000-of-00001-0123abcd.parquet"
    assert splits.train.__dict__["tars"] == (TRAIN,)


PNG = images(2)
WRONG = [
    ({"text": ["a", "b"], "label": [0, 1]}, "has no column of images .* it has the columns 'text', 'label'"),
    ({"a": PNG, "b": PNG, "label": [0, 1]}, r"has several columns of images .*, a, b: name one with --data\.image-col"),
    ({"image": PNG, "a": [0, 1], "b": ["x", "y"]}, r"several columns of labels .*, a, b: name one with --data\.label-"),
    ({"image": PNG, "score": [0.5, 1.5]}, r"has no column of labels \(integers or strings\)"),
    ({"image": PNG, "label": [[0], [1]]}, "has no column of labels"),
    ({"image": [PNG[0], None], "label": [0, 1]}, "row 1 has no image in the column 'image'"),
    ({"image": [{"bytes": None, "path": "a.png"}] * 2, "label": [0, 1]}, "has no column of images"),
    ({"image": [{"bytes": PNG[0], "path": ""}, {"bytes": None, "path": "a.png"}], "label": [0, 1]}, "row 1 has no im"),
    ({"image": [{"bytes": PNG[0], "path": ""}, None], "label": [0, 1]}, "row 1 has no image"),
    ({"image": PNG, "label": [0, None]}, "row 1 has no label in the column 'label'"),
    ({"image": PNG, "label": [0, 1 << 40]}, "the largest label is 1099511627776"),
    ({"image": PNG, "label": pyarrow.array([0, 1 << 63], pyarrow.uint64())}, "labels are larger than"),
    ({"image": PNG, "label": [0, -1]}, "1 labels outside its 1 classes|only one class"),
    ({"image": [], "label": []}, "column of images|no image"),
]


@pytest.mark.parametrize(("columns", "said"), WRONG)
def test_what_cannot_be_trained_on_is_refused(tmp_path: Path, columns: dict[str, Any], said: str) -> None:
    write(tmp_path, **columns)
    with pytest.raises(UserError, match=said) as raised:
        load_splits(data(tmp_path, tmp_path), 0)
    assert "\n" not in str(raised.value)
    if "row" in said:
        assert str(tmp_path / TRAIN) in str(raised.value)


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    folder = write_hub(tmp_path, train=1, val=0, per_shard=4)
    other = table(images(4)).cast_column("label", table(images(1)).features["label"].__class__(names=["dog", "cat"]))
    other.to_parquet(folder / "data" / "test-00000-of-00001.parquet")
    with pytest.raises(UserError, match=r"data/train-.* has other columns or other names of classes than data/test-"):
        load_splits(data(folder, tmp_path), 0)


def test_folders_without_a_split_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_splits(data(tmp_path / "nothing", tmp_path), 0)
    folder = write_hub(tmp_path / "data", train=0)
    with pytest.raises(UserError, match=r"no Parquet file of a train split, .* found data/validation-00000-of-00001"):
        load_splits(data(folder, tmp_path), 0)


@pytest.mark.parametrize("damage", ["cut", "no end", "empty", "page", "text"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    folder = write_hub(tmp_path / "data", train=2)
    file = folder / "data" / "train-00001-of-00002.parquet"
    content = bytearray(file.read_bytes())
    if damage == "page":
        about = parquet.ParquetFile(file).metadata.row_group(0).column(0)
        start = about.dictionary_page_offset or about.data_page_offset
        content[start : start + 200] = bytes(200)
    damaged = {"cut": content[:-100], "no end": content[:2000], "empty": b"", "text": b"hello", "page": content}[damage]
    file.write_bytes(bytes(damaged))
    with pytest.raises(UserError, match=f"the Parquet file {re.escape(str(file))} cannot be read .* damaged or incom"):
        load_splits(data(folder, tmp_path), 0)
    assert not [path for path in copies(tmp_path) if "train-00001" in path.name]


def test_random_damage_ends_in_an_error_or_in_images(tmp_path: Path) -> None:
    folder = write_hub(tmp_path / "data", train=1, val=0)
    file, numbers = folder / TRAIN, np.random.default_rng(0)
    whole = file.read_bytes()
    for _ in range(60):
        content = bytearray(whole)
        for position in numbers.integers(0, len(content), 3):
            content[position] = numbers.integers(256)
        file.write_bytes(content)
        try:
            list(parquet_pieces(file, "it", None, None))
        except UserError as error:
            assert str(error).startswith("it") or "Parquet file it" in str(error)


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_hub(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"needs the package pyarrow .*: pip install 'accel-train\[parquet\]'"):
        load_splits(data(folder, tmp_path), 0)


def test_hfds_says_what_reads_its_files_in_shards() -> None:
    source: Any = object()
    with pytest.raises(UserError, match=r"--data\.name parquet --data\.root hf://datasets/somebody/pets reads"):
        shard_table(Data("hfds/somebody/pets"), source)
    with pytest.raises(UserError, match="are not in shards; write them"):
        shard_table(Data("folder"), source)


@pytest.mark.ci
def test_killed_while_it_unpacks(tmp_path: Path) -> None:
    folder = write_hub(tmp_path / "data", train=1, val=0, below="")
    with StorageServer(folder) as server:
        url = f"{server.url}/{(folder / TRAIN).name}"
        killed = subprocess.run([sys.executable, "-c", KILLED, url, str(tmp_path / "cache")], check=False)
        assert killed.returncode == -signal.SIGKILL
        assert sorted(path.suffixes[-2:] for path in copies(tmp_path)) == [[".download", ".part"], [".tar", ".part"]]
        assert files_of(load_splits(data(url, tmp_path), 0).train) == images(16)
    assert [path.suffix for path in copies(tmp_path)] == [".tar"]


@pytest.mark.ci
def test_what_a_killed_process_has_left_makes_room(tmp_path: Path) -> None:
    folder = write_hub(tmp_path / "data", train=2, val=0, below="", side=64)
    size = (folder / "train-00000-of-00002.parquet").stat().st_size
    with StorageServer(folder) as server:
        first, second = (f"{server.url}/train-0000{number}-of-00002.parquet" for number in range(2))
        subprocess.run([sys.executable, "-c", KILLED, first, str(tmp_path / "cache")], check=False)
        left = copies(tmp_path)
        assert len(left) == 2
        folder = UnpackedCache(data(second, tmp_path), Storage(Url(second), ".parquet")).folder
        for path in left:
            path.rename(folder / path.name)
        load_splits(data(second, tmp_path, cache_size=f"{int(2.4 * size)}B"), 0)
    assert [path.suffix for path in copies(tmp_path)] == [".tar"]


class Small:
    """A cache of six unpacked files from a web server, in which only some have room."""

    def __init__(self, folder: Path, tmp_path: Path, server: StorageServer, room: float) -> None:
        names = "train-{00000..00005}-of-00006.parquet"
        options = data(f"{server.url}/{names}", tmp_path)
        images: Any = load_splits(options, 0).train
        self.cache: UnpackedCache = images.cache
        for copy in self.cache.copies():
            copy.path.unlink()
        self.names = [path.name for path in sorted(folder.glob("*.parquet"))]
        self.size = self.cache.size_of(self.names[0]) or 0
        self.cache.limit = int(room * self.size)

    @property
    def there(self) -> list[int]:
        return [number for number, name in enumerate(self.names) if self.cache.has(name)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StorageServer]:
    with StorageServer(write_hub(tmp_path / "data", val=0, below="", side=64)) as started:
        yield started


def test_room_is_taken_for_the_copy_and_its_download(server: StorageServer, tmp_path: Path) -> None:
    small = Small(tmp_path / "data", tmp_path, server, room=2.9)
    cache, names = small.cache, small.names
    assert cache.fetch(names[0], worth=100.0)  # one copy, and the download of the second
    assert small.cache.path(names[0]).stat().st_size == small.size
    assert not cache.fetch(names[1], worth=50.0) or small.there == [0, 1]
    cache.limit = int(2.0 * small.size)
    assert not cache.fetch(names[2], worth=40.0)  # there is room for the copy, but not for its download
    assert cache.fetch(names[2], worth=200.0)
    assert small.there == [2]
    cache.limit = int(1.5 * small.size)
    with pytest.raises(UserError, match=r"--data\.cache-size: .*train-00003-of-00006\.parquet alone has"):
        cache.open(names[3])


def test_a_copy_of_unknown_size_takes_room_as_it_grows(
    server: StorageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Small(tmp_path / "data", tmp_path, server, room=100)
    cache, names, most = small.cache, small.names, 0
    cache.limit, cache.sizes = int(4.5 * small.size), {}
    reserve = cache.reserve

    def watched(*words: Any) -> bool:
        nonlocal most
        done = reserve(*words)
        most = max(most, sum(copy.size for copy in cache.copies()))
        return done

    monkeypatch.setattr(cache, "reserve", watched)
    for name in names:
        cache.open(name).close()
        assert cache.path(name).stat().st_size == small.size
    assert 3.5 * small.size < most <= cache.limit
    assert len(small.there) == 3


def test_a_file_that_is_replaced_while_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_hub(tmp_path / "data", train=1, val=0)
    before = load_splits(data(folder, tmp_path), 0)
    write_hub(folder, train=1, val=0, per_shard=20)
    after = load_splits(data(folder, tmp_path), 0)
    assert (len(before.train), len(after.train)) == (16, 20) and files_of(before.train) == images(16)

    def replaced(*words: Any) -> Iterator[Any]:
        yield from parquet_pieces(*words)
        os.utime(folder / TRAIN, (1, 1))

    monkeypatch.setattr(unpacked, "unpacked", replaced)
    write_hub(folder, train=1, val=0, per_shard=18)
    with pytest.raises(UserError, match="is not the file any more that it was"):
        load_splits(data(folder, tmp_path), 0)


@pytest.mark.slow
def test_memory_does_not_grow_with_a_row_group(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).bytes(1 << 20)
    for name, count in (("small", 4), ("large", 300)):
        rows = [noise[number:] for number in range(count)]
        made = pyarrow.table({"image": pyarrow.array(rows, pyarrow.binary()), "label": [0] * count})
        parquet.write_table(made, tmp_path / name, row_group_size=count)
    words = [sys.executable, "-c", PEAK, str(tmp_path / "small"), str(tmp_path / "large")]
    size, grown = map(int, subprocess.run(words, capture_output=True, check=True, text=True).stdout.split())
    assert size > 300e6
    assert grown < 100e6


def test_the_commands_on_data(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_hub(tmp_path / "data", train=2, val=0)
    for shard, file in enumerate(sorted(folder.glob("*/*"))):
        broken = [*images(15, seed=shard), b"no image"]
        table(broken, other=["a", "b"] * 8).to_parquet(file)
    options = ["--root", str(folder), "--cache-dir", str(tmp_path / "cache"), "--label-column", "other"]
    assert main(["index", "parquet", *options]) == 0
    assert "32 images of 2 classes" in capsys.readouterr().out
    assert main(["index", "parquet", *options]) == 0
    assert "was there already" in capsys.readouterr().out
    assert main(["check-data", "parquet", *options, "--processes", "1"]) == 1
    listed = Path("unreadable-data.txt").read_text()
    assert "data/train-00000-of-00002.parquet/000015" in listed and "data/train-00001-of-00002.parquet/000015" in listed
    given = data(folder, tmp_path, label_column="other", skip_unreadable=Path("unreadable-data.txt"))
    splits = load_splits(given, 0)
    assert splits.left_out == 2 and splits.classes == ("a", "b")
    with pytest.raises(UserError, match=f"--label-column other --cache-dir {tmp_path}/cache` lists all such images"):
        splits.train.fetch([15])
    exam = exam_of(["--data.label-column", "other", "--data.cache-dir", str(tmp_path / "cache")], folder)
    found = storage.remote(exam)
    assert found.status == PASS and "0 B to fetch" in found.measured


def exam_of(options: list[str], root: Path) -> Any:
    """What the doctor's check of a storage needs, of a recipe of 32 images a second."""
    config = parse(["digits", "--data.name", "parquet", "--data.root", str(root), "--batch-size", "32", *options])
    exam = SimpleNamespace(config=config, splits=load_splits(config.data, 0), hosts=["here"], quick=True)
    exam.launch, exam.measured = SimpleNamespace(local_rank=0), {"update_seconds": 1.0}
    exam.gather = lambda value: [value]
    return exam
