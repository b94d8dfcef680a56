"""Runs on shards that are copied to each node first: the same as on local shards, on several processes and nodes."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import helpers
import pytest

pytest.importorskip("aiohttp", reason="accel-train[remote] is not installed")

from shard_files import size_of, write_shards
from storage_server import StorageServer

BRACES = "{train-{000..005},val-000}.tar"
WORDS = "digits --data.name wds --batch-size 16 --epochs 2 --model.image-size 8 --augment.crop resized --data.workers 1"
WORDS += " --bitwise true --virtual-batch-size 8"


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


def words(root: object, tmp_path: Path) -> list[object]:
    places = ["--data.root", root, "--data.stage", tmp_path / "stage", "--output-dir", tmp_path / "run"]
    return [*WORDS.split(), *places]


def nodes(*lines: list[object], folders: list[Path]) -> list[helpers.Captured]:
    """A process on each of two nodes, which are folders here."""
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    world |= {"MASTER_PORT": helpers.free_port()}
    started = []
    for rank, (line, folder) in enumerate(zip(lines, folders, strict=True)):
        env = helpers.environment(RANK=str(rank), **world)
        started.append(helpers.Captured(["-m", "accel_train.train", *line], env, cwd=folder))
    return started


@pytest.mark.ci
def test_two_processes_of_a_node_copy_once_and_train_what_local_files_train(
    server: StorageServer, folder: Path, local: str, tmp_path: Path
) -> None:
    ended = helpers.run(*words(f"{server.url}/{BRACES}", tmp_path), processes=2)
    assert ended.returncode == 0, ended.stderr
    assert "copying 7 files" in ended.stdout
    assert weights(tmp_path / "run") == local
    assert server.bytes == size_of(folder)
    assert f"root: {server.url}/" in (tmp_path / "run" / "config.yaml").read_text()
    server.reset()
    evaluated = helpers.python(
        "-m", "accel_train", "evaluate", tmp_path / "run", "--split", "val", "--trust-code", "true"
    )
    assert evaluated.returncode == 0, evaluated.stderr
    assert server.bytes == 0


@pytest.mark.ci
def test_sigterm_leaves_parts_that_go_on(server: StorageServer, folder: Path, local: str, tmp_path: Path) -> None:
    server.bandwidth = 100_000.0
    run = helpers.Captured(
        ["-m", "accel_train.train", *words(f"{server.url}/{BRACES}", tmp_path)], helpers.environment()
    )
    deadline = time.monotonic() + 60
    while not size_of(tmp_path / "stage", "**/*.tar") and time.monotonic() < deadline:
        time.sleep(0.02)
    run.popen.send_signal(signal.SIGTERM)
    _, stderr = run.communicate()
    assert run.returncode == 2, stderr
    assert "Stopped by SIGTERM while staging the data: the same command goes on with what is there." in stderr
    there = size_of(tmp_path / "stage", "**/*.tar")
    assert 0 < there < size_of(folder)
    assert not (tmp_path / "run" / "owner.json").exists()
    server.bandwidth = None
    server.reset()
    again = helpers.run(*words(f"{server.url}/{BRACES}", tmp_path))
    assert again.returncode == 0, again.stderr
    assert server.bytes <= size_of(folder) - there
    assert weights(tmp_path / "run") == local


@pytest.mark.ci
def test_two_nodes_wait_for_the_slower_one_and_compare_what_they_have(
    server: StorageServer, folder: Path, local: str, tmp_path: Path
) -> None:
    places = [tmp_path / "node-0", tmp_path / "node-1"]
    for place in places:
        place.mkdir()
    line = [*WORDS.split(), "--data.root", "shards", "--data.stage", "stage", "--output-dir", tmp_path / "run"]
    for place in places:
        write_shards(place / "shards", side=32)
        for path in (place / "shards").iterdir():  # as on a file system that both mount
            os.utime(path, (1000, 1000))
    both = nodes(line, line, folders=places)
    texts = [node.communicate() for node in both]
    assert [node.returncode for node in both] == [0, 0], texts
    assert [size_of(place / "stage", "**/*.tar") for place in places] == [size_of(folder)] * 2
    assert weights(tmp_path / "run") == local
    (places[1] / "shards" / "train-000.tar").write_bytes((places[1] / "shards" / "train-001.tar").read_bytes())
    both = nodes([*line[:-1], tmp_path / "another"], [*line[:-1], tmp_path / "another"], folders=places)
    texts = [node.communicate() for node in both]
    assert [node.returncode for node in both] == [2, 2], texts
    assert "The nodes do not find the same while staging the data" in texts[0][1] and "\n" not in texts[0][1].strip()
    assert not texts[1][1]
