"""Which shards a URL means, and where their index comes from."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="accel-train[remote] is not installed")

import torch
from helpers import free_port
from shard_files import add, size_of, write_shards
from storage_server import StorageServer

from accel_train.config.schema import Data
from accel_train.config.url import Url
from accel_train.data.sources.load import load_splits, read_splits
from accel_train.data.sources.splits import sample_keys
from accel_train.data.tools.index import make_index
from accel_train.errors import UserError

INDEX = ".accel-train-index-wds.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_shards(tmp_path / "data")
    for path in [folder, *folder.iterdir()]:
        past = path.stat().st_mtime - 10
        os.utime(path, (past, past))
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[StorageServer]:
    with StorageServer(folder) as started:
        yield started


def data(root: object, tmp_path: Path, name: str = "wds", **options: Any) -> Data:
    where = Url(str(root)) if "://" in str(root) else Path(str(root))
    return Data(name=name, root=where, cache_dir=tmp_path / "cache", **options)


def everything(data: Data) -> Any:
    """All that a training gets of the data: keys, labels and pixels of each split."""
    splits = load_splits(data, 0)
    found = {}
    for name, source in (("train", splits.train), ("val", splits.validation), ("test", splits.test)):
        if source is not None:
            root = Path(str(data.root)) if not isinstance(data.root, Url) else data.root
            base = root.parent if "{" in root.name else root
            pixels = [image.tolist() for image in source.fetch(range(len(source)))]
            found[name] = list(sample_keys(source, base)), source.labels.tolist(), pixels
    return splits.classes, found


def test_braces_mean_the_same_data_as_the_folder(server: StorageServer, folder: Path, tmp_path: Path) -> None:
    url = f"{server.url}/{{train-{{000..005}},val-000}}.tar"
    local, there = (everything(data(root, tmp_path, test_fraction=0.2)) for root in (folder, url))
    assert there == local
    assert server.bytes <= 1.02 * size_of(folder) + 20_000


def test_an_index_beside_the_shards_spares_fetching_them(server: StorageServer, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a web server does not list its files.*train-\{0000\.\.0127\}\.tar"):
        load_splits(data(server.url, tmp_path), 0)
    assert make_index(data(folder, tmp_path)).file == folder / INDEX
    server.reset()
    splits = load_splits(data(server.url, tmp_path), 0)
    assert len(splits.train) == 96
    assert {path for method, path, _ in server.log if method == "GET"} <= {INDEX, "_info.json", "info.json"}
    server.reset()
    load_splits(data(server.url, tmp_path), 0)
    assert INDEX not in {path for method, path, _ in server.log if method == "GET" and path.endswith(".tar")}


@pytest.mark.ci
@pytest.mark.parametrize("root", ["", "/{train-{000..005},val-000}.tar"], ids=["folder", "braces"])
def test_few_requests_follow_one_another_until_the_data_is_known(
    server: StorageServer, folder: Path, tmp_path: Path, root: str
) -> None:
    """The index and the lists are asked for at the same time, then all shards at the same time; the next start asks
    for the index's version, and does not fetch it again."""
    make_index(data(folder, tmp_path))
    load = partial(load_splits, data(f"{server.url}{root}", tmp_path), 0)
    server.latency = 1.0
    load()
    asked = [(method, path) for method, path, _ in server.log]
    assert len(asked) == len({*asked}) and ("HEAD", "train-000.tar") in asked
    assert server.sequential <= 2
    server.reset()
    load()
    assert server.sequential <= 2
    assert INDEX not in {path for method, path, _ in server.log if method == "GET"}


def test_a_new_index_beside_the_shards_is_noticed(server: StorageServer, folder: Path, tmp_path: Path) -> None:
    make_index(data(folder, tmp_path))
    assert len(load_splits(data(server.url, tmp_path), 0).train) == 96
    write_shards(folder, train=7)
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    make_index(data(folder, tmp_path))
    assert len(load_splits(data(server.url, tmp_path), 0).train) == 112


def test_an_index_of_other_shards_is_not_used(server: StorageServer, folder: Path, tmp_path: Path) -> None:
    make_index(data(folder, tmp_path))
    shutil.copy(folder / "train-001.tar", folder / "train-000.tar")
    write_shards(folder, train=1, val=0, per_shard=3)
    splits = load_splits(data(f"{server.url}/train-{{000..005}}.tar", tmp_path), 0)
    assert len(splits.train) == 3 + 5 * 16


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ("another size", r"train-000\.tar has [\d,]+ bytes, in the index \d+\."),
        ("another shard", r"it does not know train-006\.tar\."),
        ("one shard less", r"it has val-000\.tar, which is not among them\."),
        ("damaged", r"it is damaged or of another version:"),
    ],
)
def test_it_is_said_why_an_index_is_not_used(
    server: StorageServer,
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: str,
    difference: str,
) -> None:
    make_index(data(folder, tmp_path))
    names = "{train-{000..005},val-000}.tar"
    if change == "another size":
        write_shards(folder, train=1, val=0, per_shard=3)
    elif change == "another shard":
        shutil.copy(folder / "train-001.tar", folder / "train-006.tar")
        names = "{train-{000..006},val-000}.tar"
    elif change == "one shard less":
        names = "train-{000..005}.tar"
    else:
        (folder / INDEX).write_bytes(b"nothing")
    load_splits(data(f"{server.url}/{names}", tmp_path), 0)
    (said,) = [record for record in caplog.records if record.levelname == "WARNING"]
    text = said.getMessage()
    assert re.match(rf"{server.url}/{re.escape(INDEX)} is not used, because .*{difference}", text), text
    assert "accel-train index wds --root FOLDER" in text and "\n" not in text


def list_of(folder: Path, classes: tuple[str, ...] = ("cat", "dog")) -> None:
    """Write _info.json; the names of its splits are not those in the shards' names."""
    splits = {"train": [f"train-{number:03d}.tar" for number in range(5)], "val": ["train-005.tar", "val-000.tar"]}
    listed = {split: {"filenames": names} for split, names in splits.items()}
    (folder / "_info.json").write_text(json.dumps({"splits": listed, "classes": classes}))


def test_the_list_beside_named_shards_is_read(server: StorageServer, folder: Path, tmp_path: Path) -> None:
    list_of(folder)
    all_of_it = data(f"{server.url}/{{train-{{000..005}},val-000}}.tar", tmp_path)
    there = everything(all_of_it)
    assert there == everything(data(folder, tmp_path)) and there[0] == ("cat", "dog")
    a_part = load_splits(data(f"{server.url}/train-{{003..005}}.tar", tmp_path), 0)
    assert a_part.validation is not None
    assert (a_part.classes, len(a_part.train), len(a_part.validation)) == (("cat", "dog"), 32, 16)
    list_of(folder, ("dog", "cat"))  # another list, of the same shards
    assert load_splits(all_of_it, 0).classes == ("dog", "cat")


def test_a_list_of_other_shards_is_not_read(
    server: StorageServer, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    list_of(folder)
    shutil.copy(folder / "train-001.tar", folder / "train-006.tar")
    splits = load_splits(data(f"{server.url}/{{train-{{000..006}},val-000}}.tar", tmp_path), 0)
    assert splits.classes == ("0", "1") and len(splits.train) == 7 * 16
    assert f"{server.url}/_info.json is not used, because it does not list train-006.tar" in caplog.text


def test_one_tar_file_with_class_folders(server: StorageServer, folder: Path, tmp_path: Path) -> None:
    import io
    import tarfile

    from PIL import Image

    with tarfile.open(folder / "all.tar", "w") as archive:
        for number in range(12):
            image = io.BytesIO()
            Image.new("RGB", (4, 4), (number * 20, 0, 0)).save(image, "PNG")
            add(archive, f"train/{'cat' if number % 3 else 'dog'}/{number}.png", image.getvalue())
    local, there = (everything(data(f"{root}/all.tar", tmp_path, "tar")) for root in (folder, server.url))
    assert there == local and there[0] == ("cat", "dog")


def test_several_tar_files_of_classes(server: StorageServer, folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "classes"
    write_shards(root, train=2, val=2)
    server.folder = root
    url = f"{server.url}/{{train,val}}-{{000..001}}.tar"
    assert everything(data(url, tmp_path, "tar")) == everything(data(root, tmp_path, "tar"))


def test_data_that_is_no_shards_is_refused(tmp_path: Path) -> None:
    for name in ("folder", "csv", "cache", "hfds/x", "wds/x"):
        with pytest.raises(UserError, match=f"a storage is read by --data.name tar, wds or parquet only, found {name}"):
            read_splits(data("s3://bucket/x", tmp_path, name))


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The URL of a prefix of a bucket on moto's S3 server, and the folder with the same content."""
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    s3fs = pytest.importorskip("s3fs")
    folder = write_shards(tmp_path_factory.mktemp("s3"))
    splits = {"train": ["train-000.tar", "train-001.tar"], "val": ["val-000.tar"]}
    listed = {"splits": {split: {"filenames": names} for split, names in splits.items()}}
    (folder / "_info.json").write_text(json.dumps(listed))
    port = free_port()
    moto = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port], stderr=subprocess.DEVNULL
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()
        client = s3fs.S3FileSystem(config_kwargs={"retries": {"max_attempts": 20}})
        client.mkdir("bucket")
        client.put(str(folder), "bucket/some/data", recursive=True)
        yield "s3://bucket/some/data", folder
    moto.kill()
    moto.wait()


@pytest.mark.ci
def test_a_bucket_is_listed_and_read(bucket: tuple[str, Path], tmp_path: Path) -> None:
    url, folder = bucket
    assert everything(data(url, tmp_path)) == everything(data(folder, tmp_path))


def test_a_bucket_that_is_not_there_is_refused(bucket: tuple[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"s3://bucket/nothing"):
        load_splits(data("s3://bucket/nothing", tmp_path), 0)
    with pytest.raises(UserError, match=r"s3://no-such-bucket/x"):
        load_splits(data("s3://no-such-bucket/x", tmp_path), 0)


def test_labels_are_as_in_the_shards(server: StorageServer, tmp_path: Path) -> None:
    splits = load_splits(data(f"{server.url}/train-{{000..005}}.tar", tmp_path), 0)
    assert torch.equal(splits.train.labels, torch.arange(96) % 2)
