"""The commands on data that is on a storage: doctor, index, check-data, evaluate."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import helpers
import pytest

pytest.importorskip("aiohttp", reason="accel-train[remote] is not installed")

from shard_files import size_of, write_shards
from storage_server import StorageServer

from accel_train.cli import main
from accel_train.config.options import parse
from accel_train.config.schema import Data
from accel_train.data.sources.load import load_splits
from accel_train.data.tools.index import make_index
from accel_train.doctor import storage
from accel_train.doctor.check import FAIL, NOT_CHECKED, PASS, WARN

BRACES = "{train-{000..005},val-000}.tar"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StorageServer]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)
    with StorageServer(write_shards(tmp_path / "data")) as started:
        yield started


def exam_of(root: object, update_seconds: float) -> Any:
    config = parse(["digits", "--data.name", "wds", "--data.root", str(root), "--batch-size", "32"])
    exam = SimpleNamespace(config=config, splits=load_splits(config.data, 0), hosts=["here"], quick=True)
    exam.launch, exam.measured = SimpleNamespace(local_rank=0), {"update_seconds": update_seconds}
    exam.gather = lambda value: [value]
    return exam


@pytest.mark.ci
def test_the_doctor_compares_the_storage_with_the_recipe(
    server: StorageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.latency, exam = 0.1, exam_of(f"{server.url}/{BRACES}", 1.0)
    found = storage.remote(exam)  # 32 images a second
    assert found.status == PASS and "0 B to fetch" in found.measured and "/s to train" in found.expected
    assert 100 <= int(found.measured.partition(" ms")[0].rpartition(" ")[2]) < 1000
    for copy in exam.splits.train.cache.copies():
        copy.path.unlink()
    assert storage.remote(exam).status == PASS
    exam.measured["update_seconds"] = 1e-4
    slow = storage.remote(exam)
    assert slow.status == WARN and "The first epoch waits: 287 kB are not on this node yet." in slow.advice
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    assert storage.remote(exam).status == FAIL
    assert storage.remote(exam_of(tmp_path / "data", 1.0)).status == NOT_CHECKED


def test_index_and_check_data(server: StorageServer, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"{server.url}/{BRACES}"
    assert main(["index", "wds", "--root", url]) == 0
    out = capsys.readouterr().out
    assert "fetching 7 shards" in out and "112 images of 2 classes" in out and "the index written" in out
    server.reset()
    assert main(["index", "wds", "--root", url]) == 0
    assert "was there already" in capsys.readouterr().out
    assert main(["check-data", "wds", "--root", url, "--processes", "1"]) == 0
    assert "All 112 images can be read." in capsys.readouterr().out
    assert server.bytes == 0
    (listed,) = Path().glob("unreadable-*.txt")
    assert json.loads(listed.read_text().partition(": ")[2])["root"] == url and "{" not in listed.name


@pytest.mark.ci
def test_they_keep_copies_where_a_training_would(
    server: StorageServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, cache, size = f"{server.url}/{BRACES}", tmp_path / "cache", size_of(server.folder, "val-000.tar")
    options = ["--root", url, "--cache-dir", str(cache), "--cache-size", f"{3 * size}B"]
    assert main(["index", "wds", *options]) == 0
    assert str(cache) in capsys.readouterr().out
    assert main(["check-data", "wds", *options, "--processes", "1"]) == 0
    assert "All 112 images can be read." in capsys.readouterr().out
    assert 0 < size_of(cache, "*/*.tar") <= 3 * size
    assert not (tmp_path / "xdg").exists()
    assert main(["shards", "wds", str(tmp_path / "out"), *options, "--processes", "1"]) == 0
    assert not (tmp_path / "xdg" / "accel_train" / "shards").exists()
    for command in (["index", "wds"], ["check-data", "wds"], ["shards", "wds", "out"]):
        assert main([*command, "--root", url, "--cache-size", "much"]) == 2
        assert "--cache-size: expected a size such as 256MB or 1GB, found 'much'." in capsys.readouterr().err


@pytest.mark.ci
def test_the_quick_doctor_fetches_no_shards_to_make_an_index(server: StorageServer, tmp_path: Path) -> None:
    words = ["doctor", "digits", "--quick", "--json", str(tmp_path / "found.json"), "--batch-size", "32"]
    words += ["--data.name", "wds", "--data.root", f"{server.url}/{BRACES}", "--output-dir", str(tmp_path / "run")]

    def looked() -> Any:
        ended = helpers.python("-m", "accel_train", *words)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        (found,) = [
            each for each in json.loads((tmp_path / "found.json").read_text())["checks"] if each["name"] == "data"
        ]
        return found

    without = looked()
    assert without["status"] == NOT_CHECKED and "to make it, shards of 287 kB would be fetched" in without["measured"]
    assert not [path for method, path, _ in server.log if method == "GET" and path.endswith(".tar")]
    make_index(Data("wds", server.folder))
    there = looked()
    assert there["status"] == PASS and "96 training, 16 validation images of 2 classes" in there["measured"]
    read = {path for method, path, _ in server.log if method == "GET" and path.endswith(".tar")}
    assert len(read) <= 2  # one of which images are decoded, one by which the bandwidth is measured


@pytest.mark.slow
def test_an_evaluation_reads_where_the_run_has_read(server: StorageServer, tmp_path: Path) -> None:
    words = "digits --data.name wds --batch-size 16 --epochs 1 --model.image-size 8 --augment.crop resized"
    run, cache = tmp_path / "run", tmp_path / "cache"
    root = ["--data.root", f"{server.url}/{BRACES}", "--data.cache-dir", cache]
    trained = helpers.run(*words.split(), *root, "--data.workers", 1, "--output-dir", run)
    assert trained.returncode == 0, trained.stderr
    assert server.bytes <= 1.02 * size_of(server.folder)
    server.reset()
    assert main(["evaluate", str(run), "--split", "val", "--trust-code", "true"]) == 0
    assert json.loads((run / "evaluation-val.json").read_text())["split"] == "val"
    assert server.bytes == 0
