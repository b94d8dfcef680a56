"""The index of a data set of files: used while the data is the same, made again when it changed, complete or absent."""

import json
import multiprocessing
import os
import shutil
import signal
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from test_tars import image, pack, values

from accel_train.config.schema import Data
from accel_train.data.sources import load
from accel_train.data.sources.files import folder, index, tars, webdataset
from accel_train.data.sources.splits import Splits
from accel_train.errors import UserError

KINDS = ("folder", "tar", "wds")


def pictures(kind: str) -> dict[str, bytes]:
    if kind == "wds":
        made = {f"{i:03}.png": image(i) for i in range(6)} | {f"{i:03}.cls": str(i % 2).encode() for i in range(6)}
        return {name: made[name] for name in sorted(made)}
    return {f"{'cat' if i % 2 else 'dog'}/{i}.png": image(i) for i in range(6)} | {"notes.txt": b"x"}


def make(root: Path, kind: str) -> Path:
    """Write a data set of each kind below `root`; return what data.root has to be."""
    root.mkdir(parents=True, exist_ok=True)
    if kind == "folder":
        for name, content in pictures(kind).items():
            (root / "train" / name).parent.mkdir(parents=True, exist_ok=True)
            (root / "train" / name).write_bytes(content)
    else:
        pack(root / "train-0.tar", pictures(kind))
    settle(root)
    return root


def settle(root: Path) -> None:
    """Let everything below `root` have been changed some time ago."""
    for path in [root, *root.rglob("*")]:
        past = path.stat().st_mtime - 10
        os.utime(path, (past, past))


def content(root: Path, kind: str) -> Any:
    """All that is found in a data set, its pixels too."""
    splits: Splits = load.read_splits(Data(name=kind, root=root))
    return (
        splits.classes, splits.ignored, splits.notes, splits.mistake, splits.semantics,
        [[(source.name(i), int(source.labels[i])) for i in range(len(source))] for source in splits.sources],
        [values(source) for source in splits.sources],
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
    for module in (folder, tars, webdataset):
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
    assert len(first[5][0]) == 6 and looks == [root] and len(kept(root)) == 1
    assert content(root, kind) == first and content(root, kind) == first
    assert looks == [root]


def test_a_tar_file_alone(tmp_path: Path, looks: list[Path]) -> None:
    root = make(tmp_path / "data", "tar") / "train-0.tar"
    first = content(root, "tar")
    assert content(root, "tar") == first and looks == [root]
    pack(root, pictures("tar") | {"cat/7.png": image(70)})
    assert 70 in content(root, "tar")[6][0] and len(looks) == 2


def add(root: Path) -> None:
    (root / "train/cat/new.png").write_bytes(image(200))


def replace_by_another(root: Path) -> None:
    os.replace(root / "train/cat/1.png", root / "train/cat/1.jpeg")  # noqa: PTH105


def add_class(root: Path) -> None:
    (root / "train/eel").mkdir()
    (root / "train/eel/1.png").write_bytes(image(201))


def add_deep(root: Path) -> None:
    (root / "train/cat/more").mkdir()
    (root / "train/cat/more/1.png").write_bytes(image(202))


def add_split(root: Path) -> None:
    shutil.copytree(root / "train", root / "val")


def remove_class(root: Path) -> None:
    (root / "train/eel").mkdir()  # so that two are left
    (root / "train/eel/1.png").write_bytes(image(203))
    shutil.rmtree(root / "train/dog")


def unused_file(root: Path) -> None:
    (root / "train/cat/readme.md").write_text("x")


def repack(root: Path) -> None:
    kind = "wds" if "-wds" in str(root) else "tar"
    extra = {"900.cls": b"1", "900.png": image(204)} if kind == "wds" else {"cat/900.png": image(204)}
    pack(root / "train-0.tar", pictures(kind) | extra)


def add_tar(root: Path) -> None:
    kind = "wds" if "-wds" in str(root) else "tar"
    pack(root / "val-0.tar", pictures(kind))


def list_shards(root: Path) -> None:
    pack(root / "other.tar", {"1.png": image(205), "1.cls": b"0", "2.png": image(206), "2.cls": b"1"})
    (root / "_info.json").write_text(json.dumps({"splits": {"train": {"filenames": ["other.tar"]}}}))


CHANGES = [
    *(("folder", change) for change in (add, replace_by_another, add_class, add_deep, add_split, remove_class)),
    ("folder", unused_file), ("tar", repack), ("wds", repack), ("tar", add_tar), ("wds", add_tar), ("wds", list_shards),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change"), CHANGES)
def test_changed_data_is_looked_at_again(
    tmp_path: Path, kind: str, change: Callable[[Path], None], looks: list[Path]
) -> None:
    root = make(tmp_path / f"data-{kind}", kind)
    before = content(root, kind)
    change(root)
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
    assert looks == [root] and copied[6] == first[6]
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


def test_a_tar_file_that_changed_without_a_new_size_or_time(tmp_path: Path) -> None:
    root = make(tmp_path / "data", "tar")
    content(root, "tar")
    status = (root / "train-0.tar").stat()
    with tarfile.open(root / "train-0.tar") as archive:
        members = {info.name: archive.extractfile(info).read() for info in archive}  # type: ignore[union-attr]
    pack(root / "train-0.tar", {name: members[name] for name in ["notes.txt", *members]})  # in another order
    os.utime(root / "train-0.tar", ns=(status.st_mtime_ns, status.st_mtime_ns))
    assert (root / "train-0.tar").stat().st_size == status.st_size
    with pytest.raises(UserError, match=r"cat/1\.png cannot be read: the tar file has changed"):
        content(root, "tar")


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


def test_a_full_disk_costs_the_index_and_nothing_else(
    tmp_path: Path, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make(tmp_path / "data", "folder")

    def write(tensors: object, file: Path, **more: object) -> None:
        file.write_bytes(b"half")
        raise safetensors.SafetensorError("Error while serializing: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", write)
    assert len(content(root, "folder")[5][0]) == 6
    assert sorted(path.name for path in root.iterdir()) == ["train"] and not [*caches.rglob("*.safetensors*")]


def _start(root: Path, marks: Path, began: Any, writable: bool) -> None:
    real = tars._look

    def look(where: Path, names: list[str]) -> index.Index:
        (marks / str(os.getpid())).touch()
        time.sleep(1)  # as long as a real one, so that the others come meanwhile
        if not writable and len([*marks.iterdir()]) > 1:  # the second one that looks
            until = time.monotonic() + 60
            while len([*marks.iterdir()]) < 3:  # does not keep the third one from it
                assert time.monotonic() < until
                time.sleep(0.01)
        return real(where, names)

    if not writable:
        index._write = lambda *_: None

    tars._look = look  # type: ignore[assignment]
    began.wait()
    assert len(content(root, "tar")[5][0]) == 6


@pytest.mark.parametrize("writable", [True, False])
def test_of_processes_that_start_at_once_one_looks(tmp_path: Path, writable: bool) -> None:
    root, marks = make(tmp_path / "data", "tar"), tmp_path / "marks"
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


def _die_while_writing(root: Path) -> None:
    index.set_default_permissions = lambda path: os.kill(os.getpid(), signal.SIGKILL)
    content(root, "wds")


def test_killed_while_it_is_written(tmp_path: Path, looks: list[Path]) -> None:
    root = make(tmp_path / "data", "wds")
    process = multiprocessing.get_context("fork").Process(target=_die_while_writing, args=(root,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    first = content(root, "wds")
    assert content(root, "wds") == first and looks == [root]


def test_a_long_look_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    root, real = make(tmp_path / "data", "folder"), folder._look
    monkeypatch.setattr(index, "SLOW_SECONDS", 0.05)
    monkeypatch.setattr(folder, "_look", lambda where: (time.sleep(0.3), real(where))[1])
    with caplog.at_level("INFO", logger="accel_train"):
        content(root, "folder")
    assert f"Looking through {root}" in caplog.text
