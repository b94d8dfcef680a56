"""`accel-train shards`: the same images, labels, classes and splits as WebDataset shards, each complete or absent;
and as `--encoding raw|jpeg`: images made smaller, and pixels that are read without decoding."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import signal
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
import torch
from PIL import Image

from accel_train.cli.data import shards as shards_command
from accel_train.config.schema import Augment, Data
from accel_train.config.url import Url
from accel_train.data.image_transform import ImageTransform
from accel_train.data.sources import index, tars
from accel_train.data.sources.folder import FileImages
from accel_train.data.sources.load import load_splits
from accel_train.data.sources.splits import Source, Splits, unwrap_subset
from accel_train.data.sources.tars import RawImage, TarImages
from accel_train.errors import UserError
from accel_train.tools.audit import check_data
from accel_train.tools.shards import ShardsResult, ShardWriter, write_shards
from accel_train.user_code import GIVEN, provided

SIZE = "60kB"  # of a shard: a few hold all images of a test
NUMBERS = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait until the data has been left alone for some seconds."""
    monkeypatch.setattr(index, "SETTLED_SECONDS", -60.0)


def picture(path: Path, format: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    size = int(NUMBERS.integers(20, 60)), int(NUMBERS.integers(20, 60)), 3
    Image.fromarray(NUMBERS.integers(0, 256, size, dtype=np.uint8)).save(path, format)


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train/ and val/ of three classes, of which val/ has two: JPEG, PNG and WebP."""
    root = tmp_path_factory.mktemp("shards") / "pets"
    for split, count in (("train", 20), ("val", 4)):
        for kind in ("cat", "dög", "a \n name"):
            for number in range(count):
                ending, format = (("JPEG", "JPEG"), ("png", "PNG"), ("webp", "WEBP"))[number % 3]
                picture(root / split / kind / f"v1.{number}.{ending}", format)
    return root


def written(data: Data, output: Path, **options: Any) -> tuple[ShardsResult, Data]:
    result = write_shards(data, output, **{"shard_size": SIZE, "processes": 1, **options})
    assert not list(output.parent.glob(".*.accel-train-shards*"))
    channels = (
        result.options[result.options.index("--data.channels") + 1 :] if "--data.channels" in result.options else ()
    )
    return result, Data(name="wds", root=output, channels=int(channels[0]) if channels else 3)


def content(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in output.iterdir() if not path.name.startswith(".")}


def samples(source: Source | None) -> list[tuple[bytes, int]]:
    """Pixels and label of each sample, whatever their order."""
    if source is None:
        return []
    images = [source.fetch([id])[0] for id in range(len(source))]
    return sorted(
        (bytes(str(list(x.shape)), "ascii") + x.numpy().tobytes(), int(y))
        for x, y in zip(images, source.labels, strict=True)
    )


def assert_same(original: Splits, shards: Splits) -> None:
    assert shards.classes == original.classes and shards.channels == original.channels
    for split in ("train", "validation", "test"):
        assert samples(getattr(shards, split)) == samples(getattr(original, split)), split


class TestWhatIsWritten:
    def test_a_folder_byte_for_byte(self, pets: Path, tmp_path: Path) -> None:
        data = Data(name="folder", root=pets)
        result, shards = written(data, tmp_path / "out")
        assert_same(load_splits(data, 0), load_splits(shards, 0))
        assert result.images == 72 and result.shards == len(list(shards.root.glob("*.tar"))) > 3
        assert result.options == ("--data.name", "wds", "--data.root", str(shards.root))
        found = {}
        for path in shards.root.glob("*.tar"):
            assert path.stat().st_size <= 60_000
            with tarfile.open(path) as archive:
                for member in archive.getmembers():
                    found[member.name] = archive.extractfile(member).read()  # type: ignore[union-attr]
                    assert (member.mtime, member.uid, member.uname) == (0, 0, "")
        for path in pets.rglob("*.*"):
            if path.is_file() and not path.name.startswith("."):
                folder, (_, number, ending) = path.parent.relative_to(pets), path.name.split(".")
                extension = {"JPEG": "jpg"}.get(ending, ending)
                assert found.pop(f"{folder}/v1_{number}.{extension}") == path.read_bytes()
                assert (
                    found.pop(f"{folder}/v1_{number}.cls")
                    == str(["a \n name", "cat", "dög"].index(folder.name)).encode()
                )
        assert not found

    def test_the_index_is_there(self, pets: Path, tmp_path: Path) -> None:
        _, shards = written(Data(name="folder", root=pets), tmp_path / "out")
        assert (shards.root / ".accel-train-index-wds.safetensors").is_file()

    @pytest.mark.ci
    def test_digits_and_user_tensors_are_png(self, tmp_path: Path) -> None:
        result, shards = written(Data(), tmp_path / "digits", shard_size="1MB")
        assert_same(load_splits(Data(), 0), load_splits(shards, 0))
        size, normal = (
            ["--model.image-size", "8", "--augment.resize", "8"],
            ["--augment.mean", "0.305", "--augment.std"],
        )
        assert [*result.options[4:]] == ["--data.channels", "1", *size, *normal, "0.3759"]

    def test_a_table_and_shards(self, pets: Path, tmp_path: Path) -> None:
        (tmp_path / "pets").symlink_to(pets)
        rows = [
            f"pets/{path.relative_to(pets)},{path.parent.name},{path.relative_to(pets).parts[0]}"
            for path in pets.rglob("*.*") if path.is_file() and not path.name.startswith(".") and "\n" not in str(path)
        ]  # fmt: skip
        (tmp_path / "table.csv").write_text("\n".join(["path,label,split", *rows]))
        _, again = written(Data(name="folder", root=pets), tmp_path / "again")
        for data in (Data(name="csv", root=tmp_path / "table.csv"), again):
            _, shards = written(data, tmp_path / f"of {data.name}")
            assert_same(load_splits(data, 0), load_splits(shards, 0))

    def test_a_dataset_of_the_hub(self, tmp_path: Path) -> None:
        datasets = pytest.importorskip("datasets")
        for number in range(8):
            picture(tmp_path / "hub" / "train" / ("cat", "dog")[number % 2] / f"{number}.png", "PNG")
        data = Data(name=f"hfds/{tmp_path / 'hub'}", root=tmp_path / "cache")
        assert datasets is not None
        _, shards = written(data, tmp_path / "out")
        assert_same(load_splits(data, 0), load_splits(shards, 0))

    def test_datasets_of_a_user(self, tmp_path: Path) -> None:
        images = torch.randint(0, 256, (30, 3, 9, 9), dtype=torch.uint8)
        numbers = torch.arange(30) % 2

        def write(images: torch.Tensor, name: str) -> ShardsResult:
            data = torch.utils.data.TensorDataset(images, numbers)
            with provided({"data.name": {"train": data, "test": data}}):
                return write_shards(Data(name=GIVEN["data.name"][0]), tmp_path / name, processes=1)

        result = write(images, "out")
        found = load_splits(Data(name="wds", root=tmp_path / "out"), 0)
        expected = sorted((b"[3, 9, 9]" + x.numpy().tobytes(), id % 2) for id, x in enumerate(images))
        assert samples(found.train) == samples(found.test) == expected and result.images == 60
        with pytest.raises(UserError, match=r"is float32 \[3, 9, 9\]: only images of 8 bits with 1 or 3 channels"):
            write(images / 255, "floats")
        assert not list((tmp_path / "floats").glob("*.tar"))

    def test_a_division_is_written_as_splits(self, pets: Path, tmp_path: Path) -> None:
        data = Data(name="folder", root=pets, test_fraction=0.2)
        _, shards = written(data, tmp_path / "out", seed=3)
        assert_same(load_splits(data, 3), load_splits(shards, 3))
        assert samples(load_splits(data, 3).test) != samples(load_splits(data, 0).test)

    def test_listed_images_are_left_out(self, pets: Path, tmp_path: Path) -> None:
        (tmp_path / "list.txt").write_text("train/cat/v1.0.JPEG\nval/cat/v1.1.png\n")
        data = Data(name="folder", root=pets, skip_unreadable=tmp_path / "list.txt")
        _, shards = written(data, tmp_path / "out")
        original = load_splits(data, 0)
        assert_same(replace(original, train=original.to_train_on), load_splits(shards, 0))

    def test_names_that_are_no_keys_become_numbers(self, tmp_path: Path) -> None:
        for name in ("train/cat/1.png", "train/cat/1.jpg", "train/dog/2.png"):
            picture(tmp_path / "pets" / name, "PNG")
        data = Data(name="folder", root=tmp_path / "pets")
        _, shards = written(data, tmp_path / "out", keep_order=True)
        assert_same(load_splits(data, 0), load_splits(shards, 0))
        assert load_splits(shards, 0).train.name(0).endswith("train-000000.tar/000000000.png")

    def test_several_labels(self, tmp_path: Path) -> None:
        for labels in (("a;b", "c", ";", "b"), ("a;", "b", "c", "a")):
            for number in range(4):
                picture(tmp_path / f"{number}.png", "PNG")
            rows = [f"{number}.png,{label}" for number, label in enumerate(labels)]
            (tmp_path / "t.csv").write_text("\n".join(["path,label", *rows]))
            data = Data(name="csv", root=tmp_path / "t.csv")
            _, shards = written(data, tmp_path / f"of {labels[0]}", keep_order=True)
            before, after = load_splits(data, 0), load_splits(shards, 0)
            assert after.classes == before.classes and torch.equal(after.train.labels, before.train.labels)
            assert all(map(torch.equal, before.train.fetch(range(4)), after.train.fetch(range(4))))


class TestOrder:
    def test_shuffled_by_the_seed_alone(self, pets: Path, tmp_path: Path) -> None:
        data = Data(name="folder", root=pets)
        _, shards = written(data, tmp_path / "a")
        labels = load_splits(shards, 0).train.labels.tolist()
        assert max(labels[:10].count(label) for label in range(3)) < 10
        _, other = written(data, tmp_path / "b", seed=1)
        assert load_splits(other, 0).train.labels.tolist() != labels

    def test_the_same_bytes_whoever_works_and_where(self, pets: Path, tmp_path: Path, monkeypatch: Any) -> None:
        shutil.copytree(pets, tmp_path / "copy")
        monkeypatch.setattr("accel_train.tools.shards.WORTH_A_PROCESS", 10)
        written(Data(name="folder", root=pets), tmp_path / "a")
        written(Data(name="folder", root=tmp_path / "copy"), tmp_path / "b", processes=2)
        assert content(tmp_path / "a") == content(tmp_path / "b")

    @pytest.mark.slow
    def test_in_a_kept_order_the_same_is_learned_to_the_bit(self, pets: Path, tmp_path: Path) -> None:
        data = Data(name="folder", root=pets)
        of_files, _ = written(data, tmp_path / "out", keep_order=True)
        of_arrays, _ = written(Data(), tmp_path / "digits", keep_order=True, shard_size="1MB")
        common = ["digits", "--epochs", "1", "--data.workers", "0"]
        photos = ["--model.image-size", "16", "--augment.crop", "resized", "--augment.flip", "0.5", "--batch-size", "8"]
        digits = ["--augment.crop", "center", "--augment.pad", "0"]  # random crops of arrays draw other numbers
        files = ["--data.name", "folder", "--data.root", pets]
        losses: list[list[float]] = []
        for words in ([*photos, *files], [*photos, *of_files.options], digits, [*digits, *of_arrays.options]):
            run = tmp_path / str(len(losses))
            done = helpers.run(*common, *words, "--output-dir", run)
            assert done.returncode == 0, done.stderr
            lines = (run / "metrics.jsonl").read_text().splitlines()
            losses.append([each["loss"] for each in map(json.loads, lines) if each["kind"] in ("train", "eval")])
        assert losses[0] == losses[1] and losses[2] == losses[3] and losses[0] != losses[2]


class TestCompleteOrAbsent:
    def test_a_folder_with_something_else_is_refused(self, pets: Path, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").touch()
        with pytest.raises(UserError, match=r"is not empty \(found notes\.txt\); name a new or an empty folder"):
            written(Data(name="folder", root=pets), tmp_path)
        with pytest.raises(UserError, match=r"notes\.txt cannot be written, by way of "):
            written(Data(name="folder", root=pets), tmp_path / "notes.txt")
        assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]

    def test_a_url_is_refused(self, pets: Path) -> None:
        with pytest.raises(UserError, match="into a folder of this machine; upload them from there"):
            written(Data(name="folder", root=pets), Url("s3://bucket/shards"))

    def test_a_folder_within_the_data_is_refused(self, pets: Path) -> None:
        for output in (pets, pets / "train" / "shards"):
            with pytest.raises(UserError, match="is in the data's own folder, which would have the shards, too"):
                written(Data(name="folder", root=pets), output)
        assert sorted(path.name for path in (pets / "train").iterdir()) == ["a \n name", "cat", "dög"]

    @pytest.mark.slow
    def test_after_a_kill_there_is_nothing_and_the_same_command_writes_all(self, pets: Path, tmp_path: Path) -> None:
        script = (
            "import sys, time; from accel_train.tools import shards\n"
            "complete = shards.ShardWriter.complete\n"
            "def slowly(self):\n    time.sleep(0.3); complete(self)\n"
            "shards.ShardWriter.complete = slowly\n"
            "from accel_train.cli import main; sys.exit(main(sys.argv[1:]))\n"
        )
        output = tmp_path / "out"
        words = ["shards", "folder", output, "--data.root", pets, "--shard-size", SIZE, "--processes", 1]
        with Path(os.devnull).open("wb") as nothing, (tmp_path / "errors").open("wb") as errors:
            popen = helpers.forked(("-c", script, *words), 1, helpers.environment(), nothing, errors)
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".*/train-000001.tar")):
            assert popen.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        popen.send_signal(signal.SIGKILL)
        popen.wait()
        assert not output.exists()
        written(Data(name="folder", root=pets), output)
        written(Data(name="folder", root=pets), tmp_path / "at once")
        assert content(output) == content(tmp_path / "at once")

    def test_altered_bytes_are_noticed(self, pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        complete = ShardWriter.complete

        def damaged(self: ShardWriter) -> None:
            complete(self)
            if self.shards:
                with (self.folder / self.shards[0].name).open("r+b") as file:
                    file.seek(700)
                    file.write(b"\1\2\3\4\5\6\7")

        monkeypatch.setattr(ShardWriter, "complete", damaged)
        with pytest.raises(UserError, match=r"train-000000\.tar differs from what was written"):
            written(Data(name="folder", root=pets), tmp_path / "out")
        assert not list(tmp_path.iterdir())

    def test_an_image_that_cannot_be_read(self, pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(self: FileImages, id: int) -> bytes:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(FileImages, "read", refuse)
        with pytest.raises(UserError, match=r"(?s)pets/.*/v1\.\d+\.\w+ cannot be read: Permission denied"):
            written(Data(name="folder", root=pets), tmp_path / "out")
        assert not list(tmp_path.iterdir())

    def test_a_full_disk_is_left_empty(self, pets: Path, tmp_path: Path) -> None:
        with helpers.small_disk(tmp_path / "disk", "200k") as disk:
            with pytest.raises(UserError, match=r"cannot be written, .*: No space left on device\."):
                written(Data(name="folder", root=pets), disk / "out")
            assert not list(disk.iterdir())


def test_class_names_that_do_not_fit(pets: Path, tmp_path: Path) -> None:
    _, shards = written(Data(name="folder", root=pets), tmp_path / "out")
    info = json.loads((shards.root / "_info.json").read_text())
    for classes, message in (
        (["a", "b"], r"the labels go up to 2, but _info\.json names 2 classes"),
        ("abc", "not a list"),
    ):
        (shards.root / "_info.json").write_text(json.dumps({**info, "classes": classes}))
        with pytest.raises(UserError, match=message):
            load_splits(shards, 0)


def test_timm_reads_them(pets: Path, tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    from timm.data import create_dataset

    _, shards = written(Data(name="folder", root=pets), tmp_path / "out")
    dataset = create_dataset("wds/", root=str(shards.root), split="validation", is_training=False, batch_size=4)
    assert sorted(int(label) for _, label in dataset) == [0] * 4 + [1] * 4 + [2] * 4


def smooth(width: int, height: int) -> Image.Image:
    coarse = Image.fromarray(NUMBERS.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 100 images to train/ and 6 to val/, of many sizes, some of them grey, CMYK or PNG."""
    root = tmp_path_factory.mktemp("pixels") / "pets"
    for split, count in (("train", 50), ("val", 3)):
        for kind in ("cat", "dög"):
            (root / split / kind).mkdir(parents=True)
            for i in range(count):
                image = smooth(int(NUMBERS.integers(20, 90)), int(NUMBERS.integers(20, 90)))
                if i % 10 == 1:
                    image.convert("L").save(root / split / kind / f"{i}.jpg")
                elif i % 10 == 2:
                    image.convert("CMYK").save(root / split / kind / f"{i}.jpg")
                elif i % 10 == 3:
                    image.save(root / split / kind / f"{i}.png")
                else:
                    image.save(root / split / kind / f"{i}.jpg", quality=95)
    return root


def encoded(data: Data, output: Path, **options: Any) -> Data:
    write_shards(
        data, output, **{"encoding": "raw", "short_side": 32, "processes": 1, "shard_size": "100kB", **options}
    )
    return Data(name="wds", root=output, channels=data.channels)


def keys(source: Source, root: Path) -> list[str]:
    """The names without the shard and the extension."""
    names = [source.name(id).removeprefix(f"{root}/") for id in range(len(source))]
    return [name.partition(".tar/")[2].rpartition(".")[0] or name.rpartition(".")[0] for name in names]


def parts(splits: Splits) -> list[Source]:
    return list(splits.sources.values())


@pytest.fixture(scope="module")
def pixels(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Data:
    return encoded(Data(name="folder", root=original), tmp_path_factory.mktemp("shards") / "pets")


class TestEncodedContent:
    @pytest.mark.ci
    @pytest.mark.parametrize("processes", [1, 2])
    def test_the_same_samples_in_the_same_order_and_in_evaluation_the_same_pixels(
        self, original: Path, tmp_path: Path, processes: int
    ) -> None:
        data = Data(name="folder", root=original)
        before, after = load_splits(data, 0), load_splits(encoded(data, tmp_path / "out", processes=processes), 0)
        assert (after.classes, after.channels, after.mean) == (("cat", "dög"), 3, before.mean)
        assert [len(part) for part in parts(after)] == [100, 6]
        evaluated = ImageTransform(Augment(resize=32), 28, training=False)
        for one, other in zip(parts(before), parts(after), strict=True):
            assert keys(one, original) == keys(other, tmp_path / "out")
            assert torch.equal(one.labels, other.labels)
            seeds = torch.zeros(len(one), dtype=torch.int64)
            images, again = one.fetch(range(len(one))), other.fetch(range(len(one)))
            assert torch.equal(evaluated(list(images), seeds), evaluated(list(again), seeds))
            for image, ready in zip(images, again, strict=True):
                short = min(image.shape[1:])
                assert min(ready.shape[1:]) == min(short, 32)
                assert abs(ready.shape[1] / ready.shape[2] - image.shape[1] / image.shape[2]) < 0.1  # none of it is cut
                if short <= 32:
                    assert torch.equal(ready, image)

    def test_pillow_reads_what_is_read_without_it(self, pixels: Data) -> None:
        source = unwrap_subset(load_splits(pixels, 0).train)[0]
        assert isinstance(source, TarImages) and isinstance(source.open(3), RawImage)
        again = pickle.loads(pickle.dumps(source))
        grey = load_splits(replace(pixels, channels=1), 0).train
        for id in range(10):
            with tarfile.open(pixels.root / "train-000000.tar") as archive:
                members = [member for member in archive if member.name.endswith(".ppm")]
                file: Any = archive.extractfile(members[id])
                image = Image.open(file)
                assert torch.equal(source.fetch([id])[0], torch.from_numpy(np.array(image)).permute(2, 0, 1))
                assert torch.equal(grey.fetch([id])[0][0], torch.from_numpy(np.array(image.convert("L"))))
                assert torch.equal(source.fetch([id])[0], again.fetch([id])[0])

    def test_jpeg_is_smaller_and_nearly_the_same(self, original: Path, pixels: Data, tmp_path: Path) -> None:
        jpeg = encoded(Data(name="folder", root=original), tmp_path / "jpeg", encoding="jpeg", keep_order=True)
        sizes = [sum(path.stat().st_size for path in each.root.glob("*.tar")) for each in (jpeg, pixels)]
        assert sizes[0] < sizes[1]
        pairs = zip(*(load_splits(each, 0).train.fetch(range(100)) for each in (pixels, jpeg)), strict=True)
        assert max(float((one.float() - other.float()).abs().mean()) for one, other in pairs) < 12

    @pytest.mark.parametrize("encoding", ["raw", "jpeg"])
    def test_grey(self, original: Path, tmp_path: Path, encoding: str) -> None:
        data = encoded(Data(name="folder", root=original, channels=1), tmp_path / "grey", encoding=encoding)
        found = load_splits(data, 0)
        assert found.channels == 1 and {len(image) for image in found.train.fetch(range(100))} == {1}
        if encoding == "raw":
            assert isinstance(unwrap_subset(found.train)[0].open(0), RawImage)  # type: ignore[attr-defined]

    def test_arrays_and_shards_of_shards(self, pixels: Data, tmp_path: Path) -> None:
        digits, again = encoded(Data(), tmp_path / "digits"), encoded(pixels, tmp_path / "again", encoding="copy")
        expected = load_splits(Data(), 0).train.fetch(range(20))
        found = load_splits(replace(digits, channels=1), 0).train.fetch(range(20))
        assert all(map(torch.equal, found, expected))
        source = unwrap_subset(load_splits(again, 0).train)[0]
        assert isinstance(source, TarImages) and isinstance(source.open(0), RawImage)


class TestReadingPixels:
    def test_no_more_files_are_mapped_than_a_process_may_open(
        self, pixels: Data, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tars, "MOST_MAPPED", 2)
        source = unwrap_subset(load_splits(pixels, 0).train)[0]
        assert isinstance(source, TarImages) and len(source.tars) > 3
        images = source.fetch(range(100))  # views of what is not mapped for others any more
        assert len(source._maps) == 2
        assert all(map(torch.equal, images, (source.fetch([id])[0] for id in range(100))))

    def test_an_altered_image_is_named(self, pixels: Data, tmp_path: Path) -> None:
        data = replace(pixels, root=Path(shutil.copytree(pixels.root, tmp_path / "altered")))
        source = unwrap_subset(load_splits(data, 0).train)[0]
        assert isinstance(source, TarImages)
        tar, offset, _ = source.positions[7].tolist()
        source.fetch([6])
        with (data.root / source.tars[tar]).open("r+b") as file:
            file.seek(offset + 100)
            byte = file.read(1)
            file.seek(offset + 100)
            file.write(bytes([byte[0] ^ 1]))
        for read in (source.fetch, lambda ids: source.open(ids[0])):
            with pytest.raises(UserError, match=r"cat/15\.ppm cannot be read: it was changed \(its checksum") as caught:
                read([7])
            assert f"accel-train check-data wds --data.root {data.root}" in str(caught.value)
        source.fetch([6, 8])
        assert len(check_data(data, output=tmp_path / "list", processes=1).unreadable) == 1
        assert (tmp_path / "list").read_text().splitlines()[1:] == ["train-000000.tar/train/cat/15.ppm"]
        assert load_splits(replace(data, skip_unreadable=tmp_path / "list"), 0).left_out == 1

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            (b"raw 1 ", b"raw 2 ", r"its raw format has the number 2, and this version of accel-train reads 1: write"),
            (b"\n9 ", b"\n8 ", "its size is not that of its pixels"),
            (b"# accel_train", b"# another_pro", ""),  # then it is a PPM file like others
        ],
    )
    def test_a_header_that_nobody_wrote(self, tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
        for number in range(4):
            (tmp_path / "pets" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
            smooth(9, 5).save(tmp_path / "pets" / "ab"[number % 2] / f"{number}.png")
        data = encoded(Data(name="folder", root=tmp_path / "pets"), tmp_path / "out")
        file = tmp_path / "out" / "train-000000.tar"
        file.write_bytes(file.read_bytes().replace(old, new))
        source = load_splits(data, 0).train
        if not message:
            assert source.fetch([0])[0].shape == (3, 5, 9)
            return
        with pytest.raises(UserError, match=message):
            source.fetch([0])

    def test_a_shard_that_was_cut_is_not_read_beyond_its_end(self, pixels: Data, tmp_path: Path) -> None:
        data = replace(pixels, root=Path(shutil.copytree(pixels.root, tmp_path / "cut")))
        source = unwrap_subset(load_splits(data, 0).train)[0]
        assert isinstance(source, TarImages)
        tar, offset, _ = source.positions[7].tolist()
        for size, message in (
            (offset + 10, "ends before"),
            (offset - 300, "ends before"),
            (offset - 600, "ends before"),
            (0, "empty"),
        ):
            with (data.root / source.tars[tar]).open("r+b") as file:
                file.truncate(size)
            with pytest.raises(UserError, match=message):
                pickle.loads(pickle.dumps(source)).fetch([7])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["folder"], "accel-train shards: OUTPUT is missing; accel-train shards NAME OUTPUT [--key value …]"),
        (
            ["folder", "o", "--shard-size", "big"],
            "--shard-size: expected a size such as 256MB or 1GB, found 'big' (command line).",
        ),
        (["folder", "o", "--short-side", "32"], "--short-side: files are copied as they are; add --encoding jpeg or"),
        (["folder", "o", "--data.channels", "1"], "--data.channels: files are copied as they are"),
    ],
)
def test_wrong_words_on_the_command_line(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        shards_command(words)
    (found,) = error.value.messages
    assert found.startswith(message)
