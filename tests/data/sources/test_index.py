"""The index of a data set of files: used while the data is the same, made again when it changed, complete or absent."""

import io
import json
import multiprocessing
import os
import resource
import shutil
import signal
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from test_tars import image, pack, values

from accel_train.config.schema import Data
from accel_train.data import worker_processes
from accel_train.data.sources import folder, index, load, table, webdataset
from accel_train.data.sources.splits import Splits
from accel_train.data.worker_processes import WorkerContext
from accel_train.errors import UserError

TABLE = "labels.csv"
KINDS = ("folder", "csv", "wds")


def pictures(kind: str) -> dict[str, bytes]:
    if kind == "wds":
        made = {f"{i:03}.png": image(i) for i in range(6)} | {f"{i:03}.cls": str(i % 2).encode() for i in range(6)}
        return {name: made[name] for name in sorted(made)}
    return {f"{'cat' if i % 2 else 'dog'}/{i}.png": image(i) for i in range(6)} | {"notes.txt": b"x"}


def make(root: Path, kind: str) -> Path:
    """Write a data set of each kind below `root`; return what data.root has to be."""
    root.mkdir(parents=True, exist_ok=True)
    if kind in ("folder", "csv"):
        for name, content in pictures(kind).items():
            (root / "train" / name).parent.mkdir(parents=True, exist_ok=True)
            (root / "train" / name).write_bytes(content)
        if kind == "csv":
            (root / TABLE).write_bytes(table_of(*ROWS))
    else:
        pack(root / "train-0.tar", pictures(kind))
    settle(root)
    return root


def packed(files: dict[str, bytes]) -> bytes:
    archive = io.BytesIO()
    pack(archive, files)
    return archive.getvalue()


ROWS = sorted(f"train/{name},{name[:3]}" for name in pictures("csv") if name.endswith(".png"))


def table_of(*rows: str) -> bytes:
    return "\n".join(["path,label", *rows]).encode()


def change(root: Path, files: dict[str, bytes | None]) -> None:
    """Write these files, or remove what has no content here."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if content is not None:
            (root / name).write_bytes(content)
        elif (root / name).is_dir():
            shutil.rmtree(root / name)
        else:
            (root / name).unlink()


def settle(root: Path) -> None:
    """Let everything below `root` have been changed some time ago."""
    for path in [root, *root.rglob("*")]:
        past = path.stat().st_mtime - 10
        os.utime(path, (past, past))


def content(root: Path, kind: str) -> Any:
    """All that is found in a data set, its pixels too."""
    splits: Splits = load.read_splits(Data(name=kind, root=root / TABLE if kind == "csv" else root))
    return (
        splits.classes, splits.ignored, splits.notes, splits.mistake,
        [[(source.name(i), int(source.labels[i])) for i in range(len(source))] for source in splits.sources.values()],
        [values(source) for source in splits.sources.values()], splits.table,
    )  # fmt: skip


def kept(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.name.startswith(".accel-train-index")]


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were looked through, in which `_look` of each kind was called."""
    found: list[Path] = []
    for module in (folder, table, webdataset):
        real = module._look

        def look(root: Path, *rest: Any, real: Callable[..., Any] = real) -> Any:
            found.append(root)
            return real(root, *rest)

        monkeypatch.setattr(module, "_look", look)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_start_does_not_look_again(tmp_path: Path, kind: str, looks: list[Path]) -> None:
    root = make(tmp_path / "data", kind)
    first = content(root, kind)
    where = root / TABLE if kind == "csv" else root
    assert len(first[5][0]) == 6 and looks == [where] and len(kept(root)) == 1
    assert content(root, kind) == first and content(root, kind) == first
    assert looks == [where]


NEW, BESIDE = {"train/cat/new.png": image(200)}, {"0.png": image(208), TABLE: table_of(*ROWS, "0.png,cat")}
LISTED = {"1.png": image(205), "1.cls": b"0", "2.png": image(206), "2.cls": b"1"}
CHANGES: dict[str, tuple[str, dict[str, bytes | None]]] = {
    "another image": ("folder", {**NEW}),
    "one image for another": ("folder", {"train/cat/1.png": None, "train/cat/1.jpeg": image(1)}),
    "another class": ("folder", {"train/eel/1.png": image(201)}),
    "a folder in a class": ("folder", {"train/cat/more/1.png": image(202)}),
    "another split": ("folder", {"val/cat/1.png": image(1), "val/dog/2.png": image(2)}),
    "one class for another": ("folder", {"train/dog": None, "train/eel/1.png": image(203)}),
    "a file that is no image": ("folder", {"train/cat/readme.md": b"x"}),
    "another label": ("csv", {TABLE: table_of("train/cat/1.png,dog", *ROWS[1:])}),
    "another row": ("csv", {**NEW, TABLE: table_of(*ROWS, "train/cat/new.png,cat")}),
    "an image beside the table": ("csv", {**BESIDE}),
    "another sample in a shard": (
        "wds", {"train-0.tar": packed(pictures("wds") | {"900.cls": b"1", "900.png": image(204)})},
    ),
    "another shard": ("wds", {"val-0.tar": packed(pictures("wds"))}),
    "a list of shards": (
        "wds", {"other.tar": packed(LISTED), "_info.json": b'{"splits": {"train": {"filenames": ["other.tar"]}}}'},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_changed_data_is_looked_at_again(tmp_path: Path, name: str, looks: list[Path]) -> None:
    kind, files = CHANGES[name]
    root = make(tmp_path / "data", kind)
    before = content(root, kind)
    change(root, files)
    changed = content(root, kind)
    for path in kept(root):
        path.unlink()
    assert changed == content(root, kind) != before  # what is found without an index
    settle(root)
    assert content(root, kind) == changed
    seen = len(looks)
    assert content(root, kind) == changed and len(looks) == seen  # the new index is kept


@pytest.mark.parametrize("kind", KINDS)
def test_data_that_is_still_changing_has_no_index(tmp_path: Path, kind: str, looks: list[Path]) -> None:
    root = make(tmp_path / "data", kind)
    for path in [*root.rglob("*")]:
        os.utime(path)  # now
    content(root, kind)
    assert not kept(root) and not [*(tmp_path / "caches").rglob("*.safetensors")]
    content(root, kind)
    assert len(looks) == 2


def test_a_class_that_appears_while_the_folder_is_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, real = make(tmp_path / "data", "folder") / "train", folder._look

    def look(where: Path) -> index.Index:
        found = real(where)
        (where / "eel").mkdir()
        (where / "eel" / "1.png").write_bytes(image(207))
        return found

    monkeypatch.setattr(folder, "_look", look)
    assert "eel" not in content(root, "folder")[0]
    monkeypatch.setattr(folder, "_look", real)
    assert content(root, "folder")[0] == ("cat", "dog", "eel")


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_goes_with_copied_data(tmp_path: Path, kind: str, looks: list[Path]) -> None:
    root = make(tmp_path / "data", kind)
    if kind == "folder":
        (root / "train/again").symlink_to("cat")  # a note names the folder
        settle(root)
    first = content(root, kind)
    shutil.copytree(root, tmp_path / "copy", symlinks=True)  # keeps times, as `cp -a` and `rsync -a` do
    shutil.rmtree(root)
    copied = content(tmp_path / "copy", kind)
    assert len(looks) == 1 and copied[6] == first[6]
    assert str(root) not in str(copied) and str(copied[2]) == str(first[2]).replace(str(root), str(tmp_path / "copy"))


def garble(file: Path) -> Iterator[bytes]:
    whole = file.read_bytes()
    yield b""
    yield whole[: len(whole) // 2]
    yield whole[:-1]
    yield whole + b"x"
    for place in range(0, len(whole), max(1, len(whole) // 60)):
        yield whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_index_is_never_believed(tmp_path: Path, kind: str) -> None:
    root = make(tmp_path / "data", kind)
    first = content(root, kind)
    (file,) = kept(root)
    assert file.read_bytes()[8:10] == b'{"'  # or nothing here would damage it
    for damaged in garble(file):
        file.write_bytes(damaged)
        assert content(root, kind) == first


def test_an_index_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: list[Path]) -> None:
    root = make(tmp_path / "data", "folder")
    content(root, "folder")
    monkeypatch.setattr(index, "VERSION", index.VERSION + 1)
    content(root, "folder")
    content(root, "folder")
    assert looks == [root, root]


@pytest.mark.parametrize("image", ["train/cat/1.png", "0.png"])
def test_a_table_whose_image_is_gone(tmp_path: Path, image: str, looks: list[Path]) -> None:
    root = make(tmp_path / "data", "csv")
    change(root, BESIDE)
    settle(root)
    assert content(root, "csv")[3] == ""
    (root / image).unlink()
    settle(root)
    for _ in range(2):  # an index of incomplete data is not kept
        assert f"there is no file '{image}'" in content(root, "csv")[3]
    assert len(looks) == 3


@pytest.mark.parametrize("kind", ["folder", "csv"])
def test_an_image_that_is_replaced_is_read_as_it_is(tmp_path: Path, kind: str, looks: list[Path]) -> None:
    root = make(tmp_path / "data", kind)
    before = content(root, kind)
    (root / "train/cat/1.png").write_bytes(image(200) + b"more")
    after = content(root, kind)
    assert after[4] == before[4] and len(looks) == 1
    assert [new != old for new, old in zip(after[5][0], before[5][0], strict=True)].count(True) == 1


def test_a_tar_file_that_changed_without_a_new_size_or_time(tmp_path: Path) -> None:
    root = make(tmp_path / "data", "wds")
    content(root, "wds")
    status = (root / "train-0.tar").stat()
    with tarfile.open(root / "train-0.tar") as archive:
        members = {info.name: archive.extractfile(info).read() for info in archive}  # type: ignore[union-attr]
    pack(root / "train-0.tar", {name: members[name] for name in ["005.cls", *members]})  # in another order
    os.utime(root / "train-0.tar", ns=(status.st_mtime_ns, status.st_mtime_ns))
    assert (root / "train-0.tar").stat().st_size == status.st_size
    with pytest.raises(UserError, match=r"000\.png cannot be read: the tar file has changed"):
        content(root, "wds")
    os.utime(root / "train-0.tar", ns=(status.st_mtime_ns, status.st_mtime_ns + 1))  # as `touch` does
    assert sorted(values(load.read_splits(Data(name="wds", root=root)).train)) == list(range(6))


def test_a_read_only_folder_has_its_index_among_the_caches(
    tmp_path: Path, caches: Path, looks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as where:  # other users may not enter the folders above tmp_path
        Path(where).chmod(0o755)
        root = make(Path(where) / "data", "folder")
        monkeypatch.setenv("XDG_CACHE_HOME", f"{where}/caches")
        (Path(where) / "caches").mkdir()
        (Path(where) / "caches").chmod(0o777)
        root.chmod(0o555)
        try:
            if os.geteuid() == 0:
                os.seteuid(65534)  # the superuser may write anywhere
            first = content(root, "folder")
            assert content(root, "folder") == first and looks == [root]
        finally:
            os.seteuid(os.getuid())
            root.chmod(0o755)
        assert not kept(root) and len([*Path(where).glob("caches/**/*.safetensors")]) == 1


def _fill_the_disk(root: Path, most: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))  # as a full disk or a quota: a write fails half-way
    assert len(content(root, "folder")[4][0]) == 6


@pytest.mark.parametrize("most", [0, 100, 700])
def test_a_full_disk_costs_the_index_and_nothing_else(tmp_path: Path, caches: Path, most: int) -> None:
    root = make(tmp_path / "data", "folder")
    process = multiprocessing.get_context("fork").Process(target=_fill_the_disk, args=(root, most))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert sorted(path.name for path in root.iterdir()) == ["train"] and not [*caches.rglob("*.safetensors*")]
    content(root, "folder")
    (file,) = kept(root)
    assert file.stat().st_size > 700


def _start(root: Path, marks: Path, began: Any, writable: bool) -> None:
    real = webdataset._look

    def look(where: Path) -> index.Index:
        (marks / str(os.getpid())).touch()
        time.sleep(1)  # as long as a real one, so that the others come meanwhile
        if not writable and len([*marks.iterdir()]) > 1:  # the second one that looks
            until = time.monotonic() + 60
            while len([*marks.iterdir()]) < 3:  # does not keep the third one from it
                assert time.monotonic() < until
                time.sleep(0.01)
        return real(where)

    if not writable:
        module: Any = index
        module.write_index = lambda files, root, found, states: found

    webdataset._look = look  # type: ignore[assignment]
    began.wait()
    assert len(content(root, "wds")[4][0]) == 6


@pytest.mark.parametrize("writable", [True, False])
def test_of_processes_that_start_at_once_one_looks(tmp_path: Path, writable: bool) -> None:
    root, marks = make(tmp_path / "data", "wds"), tmp_path / "marks"
    marks.mkdir()
    context = multiprocessing.get_context("fork")
    began = context.Barrier(3)
    processes = [context.Process(target=_start, args=(root, marks, began, writable)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (len([*marks.iterdir()]), len(kept(root))) == ((1, 1) if writable else (3, 0))


STEPS = ("set_default_permissions", "save_file", "fsync", "replace")


def _die_while_writing(root: Path, step: str, *, after: bool) -> None:
    holder: Any = {
        "set_default_permissions": index, "save_file": safetensors.torch, "fsync": os, "replace": Path,
    }[step]  # fmt: skip
    real = getattr(holder, step)

    def die(*given: Any, **more: Any) -> None:
        if after:
            real(*given, **more)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(holder, step, die)
    content(root, "wds")


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_killed_while_it_is_written(tmp_path: Path, step: str, after: bool, looks: list[Path]) -> None:
    root = make(tmp_path / "data", "wds")
    process = multiprocessing.get_context("fork").Process(
        target=_die_while_writing, args=(root, step), kwargs={"after": after}
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    whole = (step, after) == ("replace", True)
    assert len([path for path in kept(root) if path.suffix == ".safetensors"]) == whole
    first = content(root, "wds")
    assert content(root, "wds") == first and looks == [root] * (not whole)


@pytest.mark.ci
def test_a_worker_keeps_the_index_that_it_was_given(tmp_path: Path) -> None:
    """Though another file has its name: the workers of a training may start when the data has a new index."""
    root = make(tmp_path / "data", "folder")
    content(root, "folder")
    source = load.read_splits(Data(name="folder", root=root)).train
    (file,) = kept(root)
    names, before = [source.name(i) for i in range(6)], file.stat().st_ino
    change(root, NEW)
    settle(root)
    content(root, "folder")
    assert file.stat().st_ino != before
    with ProcessPoolExecutor(1, WorkerContext("accel_train.data.workers")) as pool:
        assert [*pool.map(source.name, range(6))] == names
    assert [source.name(i) for i in range(6)] == names and len(values(source)) == 6


@pytest.mark.ci
def test_what_needs_many_processes_finds_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        root = make(tmp_path / kind, kind)
        for number in range(1, 4):
            if kind == "wds":
                shutil.copy2(root / "train-0.tar", root / f"train-{number}.tar")
        first = content(root, kind)
        (file,) = kept(root)
        file.unlink()
        with monkeypatch.context() as patch:
            patch.setattr(worker_processes, "PATIENCE_SECONDS", -1.0)
            patch.setattr(worker_processes, "available_cores", lambda: 2)
            assert content(root, kind) == first
        assert len(kept(root)) == 1


def test_a_mistake_that_another_process_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make(tmp_path / "data", "wds")
    (root / "val-0.tar").write_bytes((root / "train-0.tar").read_bytes()[:-9000])
    monkeypatch.setattr(worker_processes, "PATIENCE_SECONDS", -1.0)
    monkeypatch.setattr(worker_processes, "available_cores", lambda: 2)
    with pytest.raises(UserError, match=r"the tar file .*val-0\.tar cannot be read"):
        content(root, "wds")


def test_a_long_look_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    root, real = make(tmp_path / "data", "folder"), folder._look
    monkeypatch.setattr(index, "SLOW_SECONDS", 0.05)
    monkeypatch.setattr(folder, "_look", lambda *given: (time.sleep(0.3), real(*given))[1])
    with caplog.at_level("INFO", logger="accel_train"):
        content(root, "folder")
    assert f"Looking through {root}" in caplog.text


def damages(content: bytes) -> Iterator[bytes]:
    """The file of an index with one damage each: in its header, and in what it says with a right checksum."""
    start = 8 + int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8:start]), content[start:]

    def packed(changed: Any) -> bytes:
        text = json.dumps(changed).encode()
        return len(text).to_bytes(8, "little") + text + data

    odd: tuple[Any, ...] = (None, True, -1, 0, 1, 10**18, 10**40, 1.5, "", "x", [], [1], [-1, 3], [[]], {}, {"a": 1})
    yield from (packed(value) for value in odd)
    for name, entry in header.items():
        for key in entry:
            for value in odd:
                yield packed({**header, name: {**entry, key: value}})
        yield packed({key: value for key, value in header.items() if key != name})
    about = json.loads(header["__metadata__"]["index"])
    arrays = {key: entry for key, entry in header.items() if key != "__metadata__"}
    for key in about:
        for value in odd:
            text = json.dumps({**about, key: value})
            checksum = zlib.crc32(text.encode())
            for name in sorted(arrays):
                first, last = arrays[name]["data_offsets"]
                kind = {"U8": "uint8", "BOOL": "bool", "I64": "int64"}[arrays[name]["dtype"]]
                described = f"{name} {kind} {tuple(arrays[name]['shape'])}"
                checksum = zlib.crc32(data[first:last], zlib.crc32(described.encode(), checksum))
            yield packed({**arrays, "__metadata__": {"index": text, "checksum": str(checksum)}})


@pytest.mark.parametrize("kind", ["folder", pytest.param("wds", marks=pytest.mark.ci)])
def test_a_damaged_index_is_made_again(tmp_path: Path, kind: str) -> None:
    root = make(tmp_path / "data", kind)
    right = content(root, kind)
    file, elsewhere = index.index_places(root, kind)
    whole = file.read_bytes()
    for number, damaged in enumerate(damages(whole)):
        file.write_bytes(damaged)
        elsewhere.unlink(missing_ok=True)
        try:
            found = content(root, kind)
        except UserError:
            continue
        except Exception as error:
            raise AssertionError(f"damage {number}: {damaged[:3000]!r}") from error
        assert found[0] and len(found) == len(right)
    file.unlink()
    os.mkfifo(file)  # would wait for ever
    assert content(root, kind) == right
