"""Shards in a bucket (moto's S3) and on the hub (a server that answers as it does): listed, copied, compared."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accel_train.config.schema import Data
from accel_train.config.url import Url
from accel_train.data.sources import staging
from accel_train.data.sources.load import load_splits
from accel_train.data.sources.staging import Storage
from accel_train.errors import UserError

pytest.importorskip("aiohttp", reason="accel-train[remote] is not installed")

from helpers import free_port
from shard_files import write_shards


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(staging, "_staged", {})
    monkeypatch.setattr(staging, "PAUSES", (0.01, 0.02))
    monkeypatch.setattr(staging, "PART", 10_000)
    return write_shards(tmp_path / "data", train=2)


@pytest.fixture
def s3(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of an S3 server, whose bucket has the folder."""
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    s3fs: Any = importlib.import_module("s3fs")
    port = free_port()
    line = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port]
    moto = subprocess.Popen(line, stderr=subprocess.DEVNULL)
    for name, value in (("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    client = s3fs.S3FileSystem(config_kwargs={"retries": {"max_attempts": 20}}, skip_instance_cache=True)
    client.mkdir("bucket")
    for path in folder.iterdir():
        client.pipe_file(f"bucket/some/data/{path.name}", path.read_bytes())
    client.pipe_file("bucket/some/data/.hidden/train-009.tar", b"")
    yield client
    moto.kill()
    moto.wait()


@pytest.mark.ci
def test_a_bucket_is_listed_and_copied(s3: Any, folder: Path, tmp_path: Path) -> None:
    url = Url("s3://bucket/some/data")
    splits = load_splits(Data("wds", url, stage=tmp_path / "stage"), 0)
    assert len(splits.train) == 32 and splits.train.name(0) == "s3://bucket/some/data/train-000.tar/0000000.png"
    copies = {path.name: path.read_bytes() for path in (tmp_path / "stage").rglob("*.tar")}
    assert copies == {path.name: path.read_bytes() for path in folder.glob("*.tar")}
    storage = Storage(url, "wds")
    (file, *_) = storage.manifest()
    assert file.version
    s3.pipe_file(f"bucket/some/data/{file.name}", bytes(file.size))
    with pytest.raises(UserError, match=f"{url}/{file.name} .*(is not the file that it was|no longer exists)"):
        storage.copy(file, tmp_path / "copy")
    s3.rm_file(f"bucket/some/data/{file.name}")
    with pytest.raises(UserError, match=f"{url}/{file.name} cannot be read"):
        storage.copy(file, tmp_path / "copy")


def test_the_hub_is_listed_and_copied(folder: Path, tmp_path: Path) -> None:
    huggingface_hub: Any = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    from hub_server import hub_of

    with hub_of(folder) as server:
        storage = Storage(Url("hf://datasets/somebody/shards"), "wds")
        storage.client = huggingface_hub.HfFileSystem(endpoint=server.url, token=False, skip_instance_cache=True)
        files = storage.manifest()
        assert [file.name for file in files] == ["train-000.tar", "train-001.tar", "val-000.tar"]
        assert all(file.sha256 and file.version for file in files)
        storage.copy(files[1], tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == (folder / "train-001.tar").read_bytes()
        (folder / "train-000.tar").write_bytes((folder / "train-000.tar").read_bytes()[::-1])
        with pytest.raises(UserError, match="is not the file that it was"):
            storage.copy(files[0], tmp_path / "another")
