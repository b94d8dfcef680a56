"""--data.order shards in real runs over tar files: the same bits on any number of processes, also after a kill."""

from __future__ import annotations

import io
import re
import shutil
import tarfile
from pathlib import Path

import helpers
import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

WORDS = """
digits --epochs 2 --model.name mnist_cnn --model.image-size 28 --model.dropout 0.2 --batch-size 48
--virtual-batch-size 12 --bitwise true --augment.crop random --augment.pad 1 --log-every-updates 1 --data.workers 0
--data.name wds --data.channels 1 --data.val-fraction 0.1 --checkpoint.every-updates 2 --checkpoint.keep 50
--data.order shards --data.open-shards 3
""".split()  # noqa: SIM905


def write_shards(root: Path, images: int, of_shard: int) -> Path:
    """Some of the digits as PNG files in WebDataset shards, sorted by class."""
    root.mkdir()
    digits = load_digits()
    numbers = digits.target[:images].argsort(kind="stable")
    for first in range(0, images, of_shard):
        with tarfile.open(root / f"digits-train-{first:04d}.tar", "w") as shard:
            for number in numbers[first : first + of_shard]:
                png = io.BytesIO()
                Image.fromarray((digits.images[number] * 15.9375).astype(np.uint8)).save(png, "png")
                for extension, content in (("png", png.getvalue()), ("cls", str(digits.target[number]).encode())):
                    member = tarfile.TarInfo(f"{number:04d}.{extension}")
                    member.size = len(content)
                    shard.addfile(member, io.BytesIO(content))
    return root


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_same_bits_on_any_number_of_processes_also_after_a_kill(tmp_path: Path) -> None:
    words = (*WORDS, "--data.root", write_shards(tmp_path / "shards", 600, 25))
    models = []
    for processes in (1, 2, 4):
        run = tmp_path / f"on-{processes}"
        done = helpers.run(*words, "--output-dir", run, processes=processes, launcher=processes > 1, timeout=200)
        assert done.returncode == 0, done.stderr
        models.append((run / "model.safetensors").read_bytes())
    assert models[0] == models[1] == models[2]

    run = tmp_path / "killed"
    with helpers.started(run, *words, processes=2) as started:
        started.until(lambda: (run / "checkpoints/update-00000006").exists())
    helpers.go_back_to(8, run)  # of the 12 of the first epoch: so that it is always in its middle
    resumed = helpers.run(*words, "--output-dir", run, processes=3)
    assert resumed.returncode == 0, resumed.stderr
    assert re.search("continuing after update [2-8], in epoch 1", resumed.stdout)
    assert (run / "model.safetensors").read_bytes() == models[0]
    assert [line["count"] for line in helpers.lines_of(run, "eval", "train")] == [540, 540]


@pytest.mark.ci
def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    root = write_shards(tmp_path / "shards", 100, 25)
    words = (*WORDS, "--data.root", root, "--output-dir", tmp_path / "run")
    drawn = helpers.run(*words, "--data.sampler", "balanced")
    assert drawn.returncode == 2 and "shuffle with data.order=shards, or give loss.class-weights" in drawn.stderr
    none = helpers.run("digits", "--data.order", "shards", "--output-dir", tmp_path / "run", processes=2)
    assert none.returncode == 2 and none.stderr.count("the images of 'digits' are not in shards; write them") == 1

    done = helpers.run(*words, "--stop.updates", 1)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(root)
    write_shards(root, 100, 20)
    helpers.unfinish(tmp_path / "run")
    other = helpers.run(*words, "--stop.updates", 2, "--allow-change", "stop.updates")
    assert other.returncode == 2 and "data: the shards have changed" in other.stderr
    assert all(len(each.stderr.splitlines()) == 1 for each in (drawn, none, other))
