"""Data on a file system that is slow, mounted by FUSE: a run is that on the disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

import helpers
import pytest
import slow_mount
from shard_files import write_shards
from slow_mount import SlowMount

pytestmark = pytest.mark.skipif(bool(slow_mount.missing()), reason=slow_mount.missing())
WORDS = "digits --data.name wds --data.workers 2 --model.image-size 8 --augment.crop resized --batch-size 16"
WORDS += " --virtual-batch-size 8 --bitwise true --epochs 2"


def trained(root: Path, run: Path, *words: object) -> str:
    """The weights of a run."""
    ended = helpers.run(*WORDS.split(), *words, "--data.root", root, "--output-dir", run)
    assert ended.returncode == 0, ended.stderr
    return hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()


def test_the_mount_has_the_same_files_and_counts_what_is_read(tmp_path: Path) -> None:
    folder, place = write_shards(tmp_path / "data", train=1, side=64), tmp_path / "mount"
    place.mkdir()
    with SlowMount(folder, place) as mount:
        assert sorted(path.name for path in place.iterdir()) == ["train-000.tar", "val-000.tar"]
        content = (place / "train-000.tar").read_bytes()
        assert content == (folder / "train-000.tar").read_bytes()
        assert (place / "train-000.tar").stat().st_mtime_ns == (folder / "train-000.tar").stat().st_mtime_ns
        reads, size = mount.counts()
        assert size == len(content) and 1 <= reads < len(content) / 4096  # it reads ahead
        with pytest.raises(OSError, match="Read-only"):
            (place / "new").touch()
        (place / "train-000.tar").read_bytes()
        assert mount.counts() == (reads, size)  # from the page cache
    assert not place.is_mount() and not [*place.iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["full", "shards"])
def test_a_run_is_that_on_the_disk(tmp_path: Path, order: str) -> None:
    folder, place = write_shards(tmp_path / "data"), tmp_path / "mount"
    place.mkdir()
    with SlowMount(folder, place, latency=0.01, bandwidth=5e6) as mount:
        slow = trained(place, tmp_path / "slow", "--data.order", order)
        assert mount.counts()[0] > 0
    assert slow == trained(folder, tmp_path / "local", "--data.order", order)
