"""Runs on a web server's shards are those on local ones: killed, resumed, on several processes, with lost shards."""

from __future__ import annotations

import hashlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import helpers
import pytest

pytest.importorskip("aiohttp", reason="accel-train[remote] is not installed")

from shard_files import size_of, write_shards
from storage_server import StorageServer

from accel_train.config.schema import Data
from accel_train.data.order.plan import Plan
from accel_train.data.order.samplers import TrainingSampler
from accel_train.data.tools.index import make_index

WORDS = "digits --data.name wds --batch-size 16 --epochs 2 --model.image-size 8 --augment.crop resized --data.workers 1"
WORDS += " --bitwise true --checkpoint.every-updates 1 --virtual-batch-size 8"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"), side=32)


@pytest.fixture
def server(folder: Path) -> Iterator[StorageServer]:
    with StorageServer(folder) as started:
        yield started


@pytest.fixture(scope="module")
def local(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a run on the local shards."""
    run = tmp_path_factory.mktemp("local") / "run"
    ended = helpers.run(*WORDS.split(), "--data.root", folder, "--output-dir", run)
    assert ended.returncode == 0, ended.stderr
    return weights(run)


def weights(run: Path) -> str:
    return hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()


def words(server: StorageServer, tmp_path: Path, name: str = "run") -> list[object]:
    url = f"{server.url}/{{train-{{000..005}},val-000}}.tar"
    return [*WORDS.split(), "--data.root", url, "--data.cache-dir", tmp_path / "cache", "--output-dir", tmp_path / name]


@pytest.mark.slow
def test_one_and_two_processes_train_what_local_files_train(
    server: StorageServer, folder: Path, local: str, tmp_path: Path
) -> None:
    two = helpers.run(*words(server, tmp_path), processes=2)
    assert two.returncode == 0, two.stderr
    assert weights(tmp_path / "run") == local
    # Two epochs, two processes with a worker each, an index, and each byte once.
    assert size_of(folder) <= server.bytes <= 1.02 * size_of(folder)
    assert sorted(path for method, path, _ in server.log if method == "GET" and path.endswith(".tar")) == sorted(
        path.name for path in folder.glob("*.tar")
    )
    server.reset()
    one = helpers.run(*words(server, tmp_path, "another"))
    assert one.returncode == 0, one.stderr
    assert weights(tmp_path / "another") == local
    # It asks whether each shard is still the same, and for the two names that a list of them may have.
    assert server.bytes == 0 and server.requests == 7 + 2
    assert f"root: {server.url}/" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.ci
def test_killed_while_it_fetches_and_resumed(server: StorageServer, local: str, tmp_path: Path) -> None:
    server.bandwidth = 400_000.0
    run = helpers.Captured(["-m", "accel_train.train", *words(server, tmp_path)], helpers.environment())
    for _ in range(2):
        deadline = time.monotonic() + 60
        while server.bytes < 100_000 and time.monotonic() < deadline:
            time.sleep(0.01)
        run.popen.send_signal(signal.SIGKILL)
        run.popen.wait(30)
        server.reset()
        run = helpers.Captured(["-m", "accel_train.train", *words(server, tmp_path)], helpers.environment())
    _, stderr = run.communicate()
    assert run.returncode == 0, stderr
    assert weights(tmp_path / "run") == local


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_lost_shard_stops_the_run_after_it_is_saved(tmp_path: Path, processes: int) -> None:
    folder = write_shards(tmp_path / "data", train=5, val=0)
    write_shards(tmp_path / "one", train=1, val=0, per_shard=1)
    (tmp_path / "one" / "train-000.tar").rename(folder / "train-005.tar")  # one image, which comes in update 6 of 6
    make_index(Data("wds", folder))
    seeds = (seed for seed in range(100) if 80 in list(TrainingSampler(Plan(81, 16, 1, 1), seed))[4].ids)
    options = [*WORDS.split(), "--seed", next(seeds), "--checkpoint.every-updates", 100]
    with StorageServer(folder) as server:
        options += ["--data.root", server.url, "--data.cache-dir", tmp_path / "cache", "--output-dir", tmp_path / "run"]
        server.fault = lambda method, path, times: "404" if path == "train-005.tar" and method == "GET" else None
        lost = helpers.run(*options, processes=processes)
        assert lost.returncode == 0, lost.stderr
        said = f"{server.url}/train-005.tar cannot be read: the server answers 404"
        assert said in lost.stdout or f"{server.url}/train-005.tar cannot be read: there is no such file" in lost.stdout
        status = json.loads((tmp_path / "run" / "status.json").read_text())
        assert (status["state"], status["update"] > 0) == ("interrupted", True)
        again = helpers.run(*options, processes=processes)
        assert again.returncode != 0 and f"{server.url}/train-005.tar cannot be read" in again.stderr
        server.fault = lambda method, path, times: None
        there = helpers.run(*options, processes=processes)
        assert there.returncode == 0, there.stderr
    assert f"update {status['update']}" in there.stdout


@pytest.mark.ci
def test_a_lost_shard_of_validation_stops_the_run_before_the_epoch_ends(server: StorageServer, tmp_path: Path) -> None:
    make_index(Data("wds", server.folder))
    server.fault = lambda method, path, times: "404" if path == "val-000.tar" and method == "GET" else None
    lost = helpers.run(*words(server, tmp_path), "--checkpoint.every-updates", 100)
    assert lost.returncode == 0, lost.stderr
    assert f"Stopped by data that is lost ({server.url}/val-000.tar cannot be read" in lost.stdout
    assert 0 < json.loads((tmp_path / "run" / "status.json").read_text())["update"] < 6


@pytest.mark.slow
def test_a_cache_smaller_than_the_data_with_the_order_of_shards(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "data", train=12, val=1, side=32, per_shard=64)
    make_index(Data("wds", folder))
    order = ["--data.order", "shards", "--data.canonical-nodes", 1, "--data.open-shards", 2, "--data.workers", 0]
    size = size_of(folder) // 13
    with StorageServer(folder) as server:
        options = [*WORDS.split(), *order, "--data.cache-dir", tmp_path / "cache", "--data.cache-size", f"{8 * size}B"]
        ended = helpers.run(*options, "--data.root", server.url, "--output-dir", tmp_path / "run", "--epochs", 1)
        assert ended.returncode == 0, ended.stderr
        assert server.bytes <= 1.02 * size_of(folder) + (folder / ".accel-train-index-wds.safetensors").stat().st_size
    local = helpers.run(
        *WORDS.split(), *order, "--data.root", folder, "--output-dir", tmp_path / "local", "--epochs", 1
    )
    assert local.returncode == 0, local.stderr
    assert weights(tmp_path / "run") == weights(tmp_path / "local")
    assert size_of(tmp_path / "cache", "*/*.tar") <= 8 * size
