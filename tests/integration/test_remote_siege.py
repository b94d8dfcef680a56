"""Data on a storage: what two nodes fetch of it, and runs that are killed at random moments while they fetch."""

from __future__ import annotations

import hashlib
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import helpers
import pytest

pytest.importorskip("aiohttp", reason="accel-train[remote] is not installed")

from shard_files import size_of, write_shards
from storage_server import StorageServer

from accel_train.config.schema import Data
from accel_train.data.tools.index import make_index

pytestmark = pytest.mark.slow
WORDS = "digits --data.name wds --data.order shards --data.canonical-nodes 2 --data.open-shards 2 --data.workers 1"
WORDS += " --model.image-size 8 --batch-size 16 --virtual-batch-size 4 --bitwise true --checkpoint.every-updates 1"


def weights(run: Path) -> str:
    return hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()


def local_weights(folder: Path, run: Path, *words: object) -> str:
    ended = helpers.run(*WORDS.split(), *words, "--data.root", folder, "--output-dir", run)
    assert ended.returncode == 0, ended.stderr
    return weights(run)


def test_two_nodes_fetch_a_share_each(tmp_path: Path) -> None:
    """Each node has its own cache, and reads the shards of its canonical node. One shard may be cut between both."""
    folder = write_shards(tmp_path / "data", train=60, val=0, per_shard=16)
    make_index(Data("wds", folder))
    port = helpers.free_port()
    with StorageServer(folder) as server:
        nodes = []
        for rank in range(2):
            launcher = f"--nnodes=2 --node-rank={rank} --nproc-per-node=1 --master-addr=127.0.0.1 --master-port={port}"
            line = [sys.executable, "-m", "torch.distributed.run", *launcher.split(), "-m", "accel_train.train"]
            line += [*WORDS.split(), "--epochs", "1", "--data.root", server.url, "--output-dir", str(tmp_path / "run")]
            cache = helpers.environment(XDG_CACHE_HOME=str(tmp_path / f"node-{rank}"))
            nodes.append(subprocess.Popen(line, env=cache, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        outputs = [node.communicate(timeout=240) for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], outputs
        fetched = Counter(path for method, path, _ in server.log if method == "GET" and path.endswith(".tar"))
    assert set(fetched) == {path.name for path in folder.glob("*.tar")}
    assert fetched.total() <= len(fetched) + 1
    assert weights(tmp_path / "run") == local_weights(folder, tmp_path / "local", "--epochs", "1")


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_killed_ten_times_at_random_moments(tmp_path: Path, processes: int) -> None:
    folder = write_shards(tmp_path / "data", train=24, val=1, per_shard=16, side=32)
    expected = local_weights(folder, tmp_path / "local", "--epochs", 16)
    draw, kills = random.Random(processes), 0
    with StorageServer(folder, latency=0.02, bandwidth=2_000_000.0) as server:
        url = f"{server.url}/{{train-{{000..023}},val-000}}.tar"
        options = [*WORDS.split(), "--epochs", 16, "--data.root", url, "--data.cache-dir", tmp_path / "cache"]
        options += ["--data.cache-size", f"{18 * size_of(folder) // 25}B", "--output-dir", tmp_path / "run"]
        while True:
            run = helpers.Captured(["-m", "accel_train.train", *options], helpers.environment(), processes=processes)
            deadline = time.monotonic() + (draw.uniform(1, 4) if kills < 10 else 240)
            while run.popen.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            if run.popen.poll() is not None:
                break
            run.popen.send_signal(signal.SIGKILL)
            run.communicate()
            kills += 1
    _, stderr = run.communicate()
    assert run.returncode == 0, stderr
    assert kills == 10, f"it ended after {kills} kills: the test must train for longer"
    assert weights(tmp_path / "run") == expected


def test_two_runs_at_once_with_room_for_one(tmp_path: Path) -> None:
    """They share a cache folder that has not room for what both need. Each removes what it needs last itself, which the
    other may need first; both go on, and train what they would alone."""
    folder = write_shards(tmp_path / "data", train=24, val=1, per_shard=16, side=32)
    make_index(Data("wds", folder))
    limit, places = 8 * size_of(folder) // 25, ["--epochs", 4, "--data.cache-dir", tmp_path / "cache"]
    with StorageServer(folder, latency=0.01) as server:
        places += ["--data.root", server.url, "--data.cache-size", f"{limit}B"]
        line = ["-m", "accel_train.train", *WORDS.split(), *places]
        options = [["--seed", seed, "--output-dir", tmp_path / f"run-{seed}"] for seed in (0, 1)]
        runs = [helpers.Captured([*line, *each], helpers.environment(), processes=2) for each in options]
        most = 0
        while any(run.popen.poll() is None for run in runs):
            # A file may be renamed or removed between its name and its size.
            held = [path for path in (tmp_path / "cache").glob("*/*.tar") if path.exists()]
            most = max(most, len(held))
            time.sleep(0.02)
        ended = [run.communicate() for run in runs]
        assert [run.returncode for run in runs] == [0, 0], ended
        fetched = [path for method, path, _ in server.log if method == "GET" and path.endswith(".tar")]
    # Who needs a shard now gets room in any case: one more for each of the four processes and their workers.
    assert most <= 8 + 8
    # Alone, at most each of 25 shards in each of 4 epochs; together some that the other has removed, too.
    assert len(fetched) <= 3 * 2 * 4 * (24 + 1), "they take shards from each other again and again"
    for seed in (0, 1):
        local = local_weights(folder, tmp_path / f"local-{seed}", "--epochs", 4, "--seed", seed)
        assert weights(tmp_path / f"run-{seed}") == local
