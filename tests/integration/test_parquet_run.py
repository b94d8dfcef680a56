"""Runs on Parquet files are those on tar shards of the same images, on any storage and number of processes."""

from __future__ import annotations

import hashlib
import json
import signal
import tarfile
import time
from pathlib import Path

import helpers
import pytest

pytest.importorskip("pyarrow", reason="accel-train[parquet] is not installed")
pytest.importorskip("datasets", reason="datasets is not installed")
pytest.importorskip("aiohttp", reason="accel-train[remote] is not installed")

from hub_server import hub_of
from parquet_files import images, write_hub
from shard_files import add, size_of
from storage_server import StorageServer

from accel_train.cli import main

WORDS = "digits --batch-size 16 --epochs 2 --model.image-size 8 --augment.crop resized --data.workers 1"
WORDS += " --bitwise true --checkpoint.every-updates 1 --virtual-batch-size 8"
IN_SHARDS = ["--data.order", "shards", "--data.canonical-nodes", "2", "--data.open-shards", "2"]
BRACES = "{train-{00000..00005}-of-00006,validation-00000-of-00001}.parquet"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hub(tmp_path_factory.mktemp("parquet"), side=32)


@pytest.fixture(scope="module")
def in_tars(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The weights of runs on tar shards with the same images, with each order."""
    shards, found = tmp_path_factory.mktemp("tars"), {}
    contents = {"train": images(96, side=32), "validation": images(16, side=32, seed=1)}
    for split, files in contents.items():
        for start in range(0, len(files), 16):
            with tarfile.open(shards / f"{split}-{start:05d}.tar", "w") as archive:
                for number in range(start, start + 16):
                    add(archive, f"{number:06d}.png", files[number])
                    add(archive, f"{number:06d}.cls", str(number % 2).encode())
    (shards / "_info.json").write_text(
        json.dumps(
            {
                "splits": {s: {"filenames": sorted(p.name for p in shards.glob(f"{s}*"))} for s in contents},
                "classes": ["cat", "dog"],
            }
        )
    )
    for order in ("full", "shards"):
        run = shards / order
        options = ["--data.name", "wds", "--data.root", shards, *(IN_SHARDS if order == "shards" else ())]
        ended = helpers.run(*WORDS.split(), *options, "--output-dir", run)
        assert ended.returncode == 0, ended.stderr
        found[order] = weights(run)
    assert found["full"] != found["shards"]
    return found


def weights(run: Path) -> str:
    return hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()


def words(root: object, tmp_path: Path, order: str = "shards", name: str = "run") -> list[object]:
    data = ["--data.name", "parquet", "--data.root", root, "--data.cache-dir", tmp_path / "cache"]
    return [*WORDS.split(), *data, *(IN_SHARDS if order == "shards" else ()), "--output-dir", tmp_path / name]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["full", "shards"])
def test_local_files_train_what_tar_shards_train(
    folder: Path, in_tars: dict[str, str], tmp_path: Path, order: str
) -> None:
    one = helpers.run(*words(folder, tmp_path, order))
    assert one.returncode == 0, one.stderr
    two = helpers.run(*words(folder, tmp_path, order, "two"), processes=2)
    assert two.returncode == 0, two.stderr
    assert weights(tmp_path / "run") == weights(tmp_path / "two") == in_tars[order]
    assert "cat" in one.stdout and "looking through" not in two.stdout.lower()
    assert main(["evaluate", str(tmp_path / "run"), "--split", "val"]) == 0


@pytest.mark.slow
def test_two_processes_fetch_from_a_web_server(folder: Path, in_tars: dict[str, str], tmp_path: Path) -> None:
    with StorageServer(folder) as server:
        two = helpers.run(*words(f"{server.url}/data/{BRACES}", tmp_path), processes=2, launcher=True)
        assert two.returncode == 0, two.stderr
        assert server.bytes == size_of(folder, "*/*.parquet")  # each byte once
        server.reset()
        again = helpers.run(*words(f"{server.url}/data/{BRACES}", tmp_path, name="again"))
        assert again.returncode == 0, again.stderr
        assert server.bytes == 0
    assert weights(tmp_path / "run") == weights(tmp_path / "again") == in_tars["shards"]


@pytest.mark.slow
def test_the_hub(folder: Path, in_tars: dict[str, str], tmp_path: Path) -> None:
    with hub_of(folder) as server:
        # fresh: huggingface_hub reads HF_ENDPOINT when it is imported.
        asked = words("hf://datasets/somebody/shards", tmp_path)
        home = str(tmp_path / "hf")
        run = helpers.run(*asked, fresh=True, timeout=240, HF_ENDPOINT=server.url, HF_HOME=home)
        assert run.returncode == 0, run.stderr
        assert any("/resolve/" in path for path in server.asked)
    assert weights(tmp_path / "run") == in_tars["shards"]


@pytest.mark.ci
def test_killed_while_it_fetches_and_resumed_on_two(folder: Path, in_tars: dict[str, str], tmp_path: Path) -> None:
    with StorageServer(folder, bandwidth=400_000.0) as server:
        asked = words(f"{server.url}/data/{BRACES}", tmp_path)
        run = helpers.Captured(["-m", "accel_train.train", *asked], helpers.environment())
        deadline = time.monotonic() + 90
        while server.bytes < 100_000 and time.monotonic() < deadline:
            time.sleep(0.01)
        run.popen.send_signal(signal.SIGKILL)
        run.popen.wait(30)
        server.bandwidth = None
        run = helpers.Captured(["-m", "accel_train.train", *asked], helpers.environment())
        deadline = time.monotonic() + 90
        while not list(tmp_path.glob("run/checkpoints/update-*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        run.popen.send_signal(signal.SIGKILL)
        run.popen.wait(30)
        assert not (tmp_path / "run" / "model.safetensors").exists()
        ended = helpers.run(*asked, processes=2)
    assert ended.returncode == 0, ended.stderr
    assert "update" in ended.stdout and weights(tmp_path / "run") == in_tars["shards"]


@pytest.mark.slow
def test_a_cache_smaller_than_the_data(tmp_path: Path) -> None:
    folder = write_hub(tmp_path / "data", train=12, val=1, side=32, per_shard=64)
    options = ["--data.order", "shards", "--data.canonical-nodes", 1, "--data.open-shards", 2, "--epochs", 1]
    local = helpers.run(*words(folder, tmp_path / "local"), *options)
    assert local.returncode == 0, local.stderr
    size = size_of(tmp_path / "local" / "cache", "*/*.tar") // 13
    names = "{train-{00000..00011}-of-00012,validation-00000-of-00001}.parquet"
    with StorageServer(folder) as server:
        small = words(f"{server.url}/data/{names}", tmp_path)
        refused = helpers.run(*small, *options, "--data.cache-size", f"{3 * size}B")
        assert refused.returncode == 2 and "--data.cache-size" in refused.stderr
        server.reset()
        ended = helpers.run(*small, *options, "--data.cache-size", f"{9 * size}B")
        assert ended.returncode == 0, ended.stderr
        # The index is there. What it did not leave in the cache is fetched once more, and little twice.
        assert server.bytes <= 1.5 * size_of(folder, "*/*.parquet")
    assert weights(tmp_path / "run") == weights(tmp_path / "local" / "run")
    assert size_of(tmp_path / "cache", "*/*.tar") <= 9 * size
