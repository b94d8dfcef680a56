"""`accel-train shards --encoding raw|jpeg`: images made smaller, and pixels that are read without decoding."""

from __future__ import annotations

import pickle
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from accel_train.cli.data import shards as shards_command
from accel_train.config.schema import Augment, Config, Data
from accel_train.data.loading import create_input_pipeline
from accel_train.data.order.samplers import EvaluationSampler
from accel_train.data.sources.files import index, tars
from accel_train.data.sources.files.tars import RawImage, TarImages
from accel_train.data.sources.load import load_splits
from accel_train.data.sources.splits import Source, Splits, unwrap_subset
from accel_train.data.transforms.image import ImageTransform
from accel_train.errors import UserError
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.environment import Launch
from accel_train.tools.audit import check_data
from accel_train.tools.shards import write_shards

NUMBERS = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait until the data has been left alone for some seconds."""
    monkeypatch.setattr(index, "SETTLED_SECONDS", -60.0)


def picture(width: int, height: int) -> Image.Image:
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
                image = picture(int(NUMBERS.integers(20, 90)), int(NUMBERS.integers(20, 90)))
                if i % 10 == 1:
                    image.convert("L").save(root / split / kind / f"{i}.jpg")
                elif i % 10 == 2:
                    image.convert("CMYK").save(root / split / kind / f"{i}.jpg")
                elif i % 10 == 3:
                    image.save(root / split / kind / f"{i}.png")
                else:
                    image.save(root / split / kind / f"{i}.jpg", quality=95)
    return root


def written(data: Data, output: Path, **options: Any) -> Data:
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
def shards(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Data:
    return written(Data(name="folder", root=original), tmp_path_factory.mktemp("shards") / "pets")


class TestContent:
    @pytest.mark.ci
    @pytest.mark.parametrize("processes", [1, 2])
    def test_the_same_samples_in_the_same_order_and_in_evaluation_the_same_pixels(
        self, original: Path, tmp_path: Path, processes: int
    ) -> None:
        data = Data(name="folder", root=original)
        before, after = load_splits(data, 0), load_splits(written(data, tmp_path / "out", processes=processes), 0)
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

    def test_pillow_reads_what_is_read_without_it(self, shards: Data) -> None:
        source = unwrap_subset(load_splits(shards, 0).train)[0]
        assert isinstance(source, TarImages) and isinstance(source.open(3), RawImage)
        again = pickle.loads(pickle.dumps(source))
        grey = load_splits(replace(shards, channels=1), 0).train
        for id in range(10):
            with tarfile.open(shards.root / "train-000000.tar") as archive:
                members = [member for member in archive if member.name.endswith(".ppm")]
                file: Any = archive.extractfile(members[id])
                image = Image.open(file)
                assert torch.equal(source.fetch([id])[0], torch.from_numpy(np.array(image)).permute(2, 0, 1))
                assert torch.equal(grey.fetch([id])[0][0], torch.from_numpy(np.array(image.convert("L"))))
                assert torch.equal(source.fetch([id])[0], again.fetch([id])[0])

    def test_jpeg_is_smaller_and_nearly_the_same(self, original: Path, shards: Data, tmp_path: Path) -> None:
        jpeg = written(Data(name="folder", root=original), tmp_path / "jpeg", encoding="jpeg", keep_order=True)
        sizes = [sum(path.stat().st_size for path in each.root.glob("*.tar")) for each in (jpeg, shards)]
        assert sizes[0] < sizes[1]
        pairs = zip(*(load_splits(each, 0).train.fetch(range(100)) for each in (shards, jpeg)), strict=True)
        assert max(float((one.float() - other.float()).abs().mean()) for one, other in pairs) < 12

    @pytest.mark.parametrize("encoding", ["raw", "jpeg"])
    def test_grey(self, original: Path, tmp_path: Path, encoding: str) -> None:
        data = written(Data(name="folder", root=original, channels=1), tmp_path / "grey", encoding=encoding)
        found = load_splits(data, 0)
        assert found.channels == 1 and {len(image) for image in found.train.fetch(range(100))} == {1}
        if encoding == "raw":
            assert isinstance(unwrap_subset(found.train)[0].open(0), RawImage)  # type: ignore[attr-defined]

    def test_arrays_and_shards_of_shards(self, shards: Data, tmp_path: Path) -> None:
        digits, again = written(Data(), tmp_path / "digits"), written(shards, tmp_path / "again", encoding="copy")
        expected = load_splits(Data(), 0).train.fetch(range(20))
        found = load_splits(replace(digits, channels=1), 0).train.fetch(range(20))
        assert all(map(torch.equal, found, expected))
        source = unwrap_subset(load_splits(again, 0).train)[0]
        assert isinstance(source, TarImages) and isinstance(source.open(0), RawImage)


class TestReading:
    def test_no_more_files_are_mapped_than_a_process_may_open(
        self, shards: Data, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tars, "MOST_MAPPED", 2)
        source = unwrap_subset(load_splits(shards, 0).train)[0]
        assert isinstance(source, TarImages) and len(source.tars) > 3
        images = source.fetch(range(100))  # views of what is not mapped for others any more
        assert len(source._maps) == 2
        assert all(map(torch.equal, images, (source.fetch([id])[0] for id in range(100))))

    def test_a_place_in_memory_cannot_be_chosen(self, shards: Data) -> None:
        config = Config(data=replace(shards, placement="device"))
        splits, order = load_splits(config.data, 0), EvaluationSampler(100, 50)
        with pytest.raises(UserError, match=r"--data\.placement device: the images are files of different sizes"):
            create_input_pipeline(
                config, splits, splits.train, order, create_accelerator(Launch()), training=False, size=24
            )

    def test_an_altered_image_is_named(self, shards: Data, tmp_path: Path) -> None:
        data = replace(shards, root=Path(shutil.copytree(shards.root, tmp_path / "altered")))
        source = unwrap_subset(load_splits(data, 0).train)[0]
        assert isinstance(source, TarImages)
        tar, offset, _ = map(int, source.positions.array[7])
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
            picture(9, 5).save(tmp_path / "pets" / "ab"[number % 2] / f"{number}.png")
        data = written(Data(name="folder", root=tmp_path / "pets"), tmp_path / "out")
        file = tmp_path / "out" / "train-000000.tar"
        file.write_bytes(file.read_bytes().replace(old, new))
        source = load_splits(data, 0).train
        if not message:
            assert source.fetch([0])[0].shape == (3, 5, 9)
            return
        with pytest.raises(UserError, match=message):
            source.fetch([0])

    def test_a_shard_that_was_cut_is_not_read_beyond_its_end(self, shards: Data, tmp_path: Path) -> None:
        data = replace(shards, root=Path(shutil.copytree(shards.root, tmp_path / "cut")))
        source = unwrap_subset(load_splits(data, 0).train)[0]
        assert isinstance(source, TarImages)
        tar, offset, _ = map(int, source.positions.array[7])
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


def test_a_range_is_in_the_pixels_and_in_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("dark", "light"):
        (tmp_path / "scans" / kind).mkdir(parents=True)
        for number in range(3):
            values = NUMBERS.integers(0, 4096, (8, 8)).astype(np.uint16)
            Image.fromarray(values).save(tmp_path / "scans" / kind / f"{number}.png")
    words = ["folder", str(tmp_path / "out"), "--data.root", str(tmp_path / "scans"), "--data.channels", "1"]
    words += ["--encoding", "raw", "--data.range", "0", "4095", "--processes", "1"]
    assert shards_command(words) == 0
    assert "--data.channels 1 --data.range 0 4095" in capsys.readouterr().out
    direct = load_splits(Data(name="folder", root=tmp_path / "scans", channels=1, range=(0, 4095)), 0)
    found = load_splits(Data(name="wds", root=tmp_path / "out", channels=1, range=(0, 4095)), 0)
    assert found.value_range == (0, 4095)  # so that the run's model knows it
    assert all(map(torch.equal, found.train.fetch(range(6)), direct.train.fetch(range(6))))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--short-side", "32"], "--short-side: files are copied as they are; add --encoding jpeg or --encoding raw."),
        (["--data.range", "0", "1"], "--data.range: files are copied as they are"),
        (["--data.channels", "1"], "--data.channels: files are copied as they are"),
    ],
)
def test_wrong_words_on_the_command_line(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        shards_command(["folder", "out", *words])
    assert error.value.messages[0].startswith(message)
