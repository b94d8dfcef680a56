"""Datasets in memory: the embedded digits, and torchvision's, from files in torchvision's layout."""

import gzip
import hashlib
import http.server
import os
import pickle
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.datasets
from sklearn.datasets import load_digits

from accel_train.config.schema import Data
from accel_train.data.sources.arrays import all_digits
from accel_train.data.sources.load import load_splits
from accel_train.errors import UserError

NUMBERS = np.random.default_rng(0)


def pixels_of(source) -> torch.Tensor:
    return source.fetch(range(len(source)))


class TestDigits:
    def test_images_and_splits(self) -> None:
        found = load_splits(Data(), 0)
        assert (len(found.train), len(found.test), found.validation) == (1438, 359, None)
        assert (len(found.classes), found.channels, found.image_size) == (10, 1, 8)
        images = pixels_of(found.train)
        assert images.shape == (1438, 1, 8, 8) and images.dtype == torch.uint8
        assert (images.min(), images.max()) == (0, 255)
        assert torch.bincount(found.test.labels).min() >= 34
        assert found.train.in_memory and found.train.name(0).startswith("digits image ")

    def test_they_are_those_of_scikit_learn(self) -> None:
        expected, found = load_digits(), all_digits()
        assert torch.equal(found.labels, torch.from_numpy(expected.target).long())
        assert (found.pixels[:, 0].numpy() == (expected.images * 255 / 16).round()).all()

    def test_mean_and_deviation(self) -> None:
        found = load_splits(Data(), 0)
        images = pixels_of(found.train) / 255
        assert found.mean == (round(images.mean().item(), 4),) and found.std == (round(images.std().item(), 4),)

    def test_the_test_images_are_always_the_same_ones(self) -> None:
        first, second = (load_splits(Data(val_fraction=0.1), seed) for seed in (0, 1))
        assert first.test.ids.tolist() == second.test.ids.tolist()
        assert first.validation.ids.tolist() != second.validation.ids.tolist()
        ids = torch.cat([first.train.ids, first.validation.ids, first.test.ids])  # type: ignore[attr-defined]
        assert ids.unique().numel() == len(ids) == 1797


def idx(array: np.ndarray) -> bytes:
    """Return a file in MNIST's format: 0, 0, type 8 (uint8), dimensions, sizes (big-endian), values."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def mnist_files() -> dict[str, bytes]:
    files = {}
    for part, count in (("train", 20), ("t10k", 10)):
        files[f"{part}-images-idx3-ubyte"] = idx(NUMBERS.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        files[f"{part}-labels-idx1-ubyte"] = idx(np.arange(count, dtype=np.uint8) % 10)
    return files


def write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "folder"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST"), ("torch/kmnist", "KMNIST")]
)
def test_sets_in_mnists_format(tmp_path: Path, name: str, folder: str) -> None:
    files = mnist_files()
    write(tmp_path / folder / "raw", files)
    found = load_splits(Data(name=name, root=tmp_path), 0)
    assert (len(found.train), len(found.test), found.validation) == (20, 10, None)
    assert (len(found.classes), found.channels, found.image_size, len(found.mean)) == (10, 1, 28, 1)
    assert pixels_of(found.train).numpy().tobytes() == files["train-images-idx3-ubyte"][16:]
    assert found.test.labels.tolist() == list(range(10)) and found.test.labels.dtype == torch.int64
    assert found.train.name(17) == f"{name.removeprefix('torch/')} train image 17"
    assert list(tmp_path.iterdir()) == [tmp_path / folder]  # nothing was written


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_sets_in_cifars_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kind = getattr(torchvision.datasets, name.upper())
    key, classes = ("fine_labels", 100) if name == "cifar100" else ("labels", 10)
    images: dict[str, np.ndarray] = {}
    for list_name in ("train_list", "test_list"):
        listed = []
        for file, _ in getattr(kind, list_name):
            images[file] = NUMBERS.integers(0, 256, (7, 3072), dtype=np.uint8)
            content = pickle.dumps({"data": images[file], key: [1, 2, 3, 4, 5, 6, 7]})
            write(tmp_path / kind.base_folder, {file: content})
            listed.append([file, hashlib.md5(content).hexdigest()])
        monkeypatch.setattr(kind, list_name, listed)
    content = pickle.dumps({kind.meta["key"]: [f"class {i}" for i in range(classes)]})
    write(tmp_path / kind.base_folder, {kind.meta["filename"]: content})
    monkeypatch.setattr(kind, "meta", kind.meta | {"md5": hashlib.md5(content).hexdigest()})

    found = load_splits(Data(name=name, root=tmp_path), 0)
    assert (len(found.classes), found.channels, found.image_size, len(found.std)) == (classes, 3, 32, 3)
    assert len(found.train) == 7 * len(kind.train_list) and len(found.test) == 7
    last = kind.train_list[-1][0]  # rows of red, then green, then blue pixels: [3, 32, 32]
    assert np.array_equal(found.train.fetch([len(found.train) - 1])[0].numpy().ravel(), images[last][-1])
    assert found.test.labels.tolist() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.skipif(
    "ACCEL_TRAIN_TEST_DATA" not in os.environ, reason="ACCEL_TRAIN_TEST_DATA names no folder with MNIST"
)
def test_the_real_mnist() -> None:
    found = load_splits(Data(name="mnist", root=Path(os.environ["ACCEL_TRAIN_TEST_DATA"])), 0)
    assert (len(found.train), len(found.test)) == (60000, 10000)
    images = pixels_of(found.train) / 255
    assert found.mean == (round(images.mean().item(), 4),) and found.std == (round(images.std().item(), 4),)


class TestDownload:
    """Download files in MNIST's format from a server on this machine."""

    @pytest.fixture
    def served(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        """The requested paths."""
        self.files = mnist_files()
        archives = {f"{name}.gz": gzip.compress(content) for name, content in self.files.items()}
        write(tmp_path / "server", archives)
        asked: list[str] = []

        class Handler(http.server.SimpleHTTPRequestHandler):
            def do_GET(self):
                asked.append(self.path)
                super().do_GET()

            def log_message(self, *_):
                pass

        kind = torchvision.datasets.MNIST
        sums = [(name, hashlib.md5(archives[name]).hexdigest()) for name, _ in kind.resources]
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=tmp_path / "server"))
        monkeypatch.setattr(kind, "resources", sums)
        monkeypatch.setattr(kind, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
        thread = threading.Thread(target=server.serve_forever, args=[0.05])
        thread.start()
        yield asked
        server.shutdown()
        thread.join()
        server.server_close()

    def test_missing_files_are_downloaded_by_one_while_the_others_wait(self, tmp_path: Path, served: list[str]) -> None:
        load_splits(Data(name="mnist", root=tmp_path / "alone"), 0)
        alone, root = sorted(served), tmp_path / "deep" / "data"
        served.clear()
        with ThreadPoolExecutor(3) as pool:  # the lock is the file's, so that threads wait as processes do
            found = list(pool.map(lambda _: load_splits(Data(name="mnist", root=root), 0), range(3)))
        assert [len(each.train) for each in found] == [20] * 3
        assert sorted(served) == alone and {f"/{name}.gz" for name in self.files} == set(alone)
        load_splits(Data(name="mnist", root=root), 0)
        assert sorted(served) == alone
        assert not list(root.glob(".download-*"))

    def test_files_cut_short_are_replaced(self, tmp_path: Path, served: list[str]) -> None:
        cut = {name: content[:100] for name, content in self.files.items()}
        write(tmp_path / "data" / "MNIST" / "raw", cut)
        assert len(load_splits(Data(name="mnist", root=tmp_path / "data"), 0).train) == 20

    def test_no_network(self, tmp_path: Path, served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [f"http://127.0.0.1:9/{'mirror/' * 20}"] * 2)
        root = tmp_path / "data"
        with pytest.raises(UserError) as caught:
            load_splits(Data(name="mnist", root=root), 0)
        assert f"'mnist' is not in {root}" in str(caught.value) and "\n" not in str(caught.value)
        assert "put MNIST/raw/train-images-idx3-ubyte.gz, " in str(caught.value)
        assert " …). Without a network" in str(caught.value), "a long reason ends between two words"
        assert not (root / "MNIST").exists() and not list(root.glob(".download-*"))
        # What the message advises works:
        (root / "MNIST" / "raw").mkdir(parents=True)
        for archive in (tmp_path / "server").iterdir():
            archive.rename(root / "MNIST" / "raw" / archive.name)
        assert len(load_splits(Data(name="mnist", root=root), 0).test) == 10

    def test_a_damaged_download_leaves_nothing(self, tmp_path: Path, served: list[str]) -> None:
        for archive in (tmp_path / "server").iterdir():
            archive.write_bytes(archive.read_bytes()[:-9])
        with pytest.raises(UserError, match="could not be downloaded"):
            load_splits(Data(name="mnist", root=tmp_path / "data"), 0)
        assert not (tmp_path / "data" / "MNIST").exists()

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path, served: list[str]) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(UserError, match="could not be downloaded"):
            load_splits(Data(name="mnist", root=tmp_path / "file" / "data"), 0)
