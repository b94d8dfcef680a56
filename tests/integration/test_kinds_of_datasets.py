"""A user's Dataset trains to the same weights on any number of processes and workers, whatever it keeps its images in.

All with 256 open files, the least that a machine may allow: more tensors than that cannot be sent one by one.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import helpers
import pytest

CODE = """
import multiprocessing

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset
from torchvision.transforms import v2

COUNT = 960


def image(number):
    noise = torch.randint(0, 100, (1, 8, 8), generator=torch.Generator().manual_seed(number))
    return (noise + 100 * (number % 2)).to(torch.uint8)


def named(dataset):
    dataset.classes, dataset.targets = ["dark", "light"], [number % 2 for number in range(len(dataset))]
    return dataset


class Items(Dataset):
    def __init__(self, images, transform=None):
        self.images, self.transform = images, transform
        named(self)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        found = self.images[number]
        found = torch.from_numpy(found) if isinstance(found, np.ndarray) else found
        return found if self.transform is None else self.transform(found), number % 2


class Opened(Items):
    def __init__(self, images):
        super().__init__(images)
        self.file = open(__file__)


class Locked(Items):
    def __getstate__(self):
        raise TypeError("h5py objects cannot be pickled")


def spawning(images):
    multiprocessing.set_start_method("spawn", force=True)
    return Items(images)


def by_file_name(images):
    torch.multiprocessing.set_sharing_strategy("file_system")
    return Items(images)


KINDS = {
    "list of tensors": Items,
    "dict of tensors": lambda images: Items(dict(enumerate(images))),
    "list of arrays": lambda images: Items([image.numpy() for image in images]),
    "list of PIL images": lambda images: Items([v2.functional.to_pil_image(image) for image in images]),
    "nested Subsets": lambda images: Subset(Subset(Items(images), range(COUNT)), range(COUNT)),
    "ConcatDataset": lambda images: named(ConcatDataset([Items(images[:480]), Items(images[480:])])),
    "TensorDataset": lambda images: named(TensorDataset(torch.stack(images), torch.arange(COUNT) % 2)),
    "transforms": lambda images: Items(images, v2.Compose([v2.RandomCrop(8, padding=1), v2.RandomErasing(0.5)])),
    "100000 tensors": lambda images: Items([images[number % COUNT].clone() for number in range(100_000)]),
    "spawn": spawning,
    "file_system": by_file_name,
    "lambda": lambda images: Items(images, lambda image: image),
    "open file": Opened,
    "h5py": Locked,
}


def data():
    return {
        "train": KINDS[KIND](list(map(image, range(COUNT)))),
        "test": Items(list(map(image, range(COUNT, COUNT + 96)))),
    }


def net(num_classes, in_chans):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))
"""
RECIPE = """
batch_size: 96
virtual_batch_size: 24
epochs: 2
bitwise: true
data: {name: "mine.py:data", channels: 1, train_limit: 960}
model: {name: "mine.py:net", image_size: 8}
optim: {name: adamw, lr: 1e-2}
"""
LIMITED = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
runpy.run_module("accel_train.train", run_name="__main__", alter_sys=True)
"""
FEW = [(0, 1), (2, 1), (4, 2)]  # workers of each process, processes
ONE, ENDS = FEW[:2], FEW[::2]
ALL = [(0, 1), (2, 1), (4, 1), (0, 2), (2, 2), (4, 2)]


def train(folder: Path, kind: str, workers: int, processes: int) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Several processes are started by accelerate's launcher, in a shell; a single one is forked."""
    (folder / "mine.py").write_text(f"KIND = {kind!r}\n{CODE}")
    (folder / "recipe.yaml").write_text(RECIPE)
    run = folder / f"run-{workers}-{processes}"
    words = (folder / "recipe.yaml", "--data.workers", workers, "--output-dir", run)
    if processes == 1:
        return helpers.python("-c", LIMITED, *words, FRESH_WORKERS="1", timeout=250), run
    line = ["bash", "-c", 'ulimit -n 256; exec "$@"', "bash", *helpers.command(*words, processes=processes)]
    done = subprocess.run(line, env=helpers.environment(), capture_output=True, text=True, timeout=250)
    return done, run


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "worlds"),
    [
        ("list of tensors", ALL), ("dict of tensors", ENDS), ("list of arrays", ENDS), ("list of PIL images", FEW),
        ("nested Subsets", ENDS), ("ConcatDataset", ENDS), ("TensorDataset", ENDS), ("transforms", FEW),
        ("100000 tensors", FEW), ("spawn", ONE), ("file_system", ONE),
    ],
)  # fmt: skip
def test_it_trains_the_same_on_any_processes_and_workers(
    kind: str, worlds: list[tuple[int, int]], tmp_path: Path
) -> None:
    found = {}
    for workers, processes in worlds:
        done, run = train(tmp_path, kind, workers, processes)
        assert done.returncode == 0, (workers, processes, done.stdout + done.stderr)
        result = json.loads((run / "result.json").read_text())
        assert (result["updates"], result["world_size"]) == (20, processes)
        found[workers, processes] = (run / "model.safetensors").read_bytes(), result["test_accuracy"]
    assert [world for world in worlds if found[world] != found[0, 1]] == []
    assert found[0, 1][1] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "reason"),
    [("lambda", "lambda"), ("open file", "TextIOWrapper"), ("h5py", "h5py objects cannot be pickled")],
)
def test_what_workers_cannot_be_sent_is_one_line(kind: str, reason: str, tmp_path: Path) -> None:
    for processes in (1, 2) if kind == "lambda" else (1,):
        done, run = train(tmp_path, kind, 2, processes)
        own = [line for line in done.stderr.splitlines() if line.startswith("accel-train: ")]
        assert len(own) == 1 and reason in own[0] and "--data.workers 0" in own[0], done.stderr
        assert "Traceback" not in done.stderr or processes == 2, done.stderr  # the launcher's own
        assert done.returncode == (2 if processes == 1 else 1) and not (run / "metrics.jsonl").exists()
    done, _ = train(tmp_path, kind, 0, 1)
    assert done.returncode == 0, done.stderr
