"""`accel-train cache-data`: one file with all preprocessed images, complete or refused, with the same data."""

import json
import os
import re
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

from accel_train.audit import check_data
from accel_train.config.schema import Augment, Config, Data
from accel_train.data.loading import create_input_pipeline
from accel_train.data.order.plan import Plan
from accel_train.data.order.samplers import EvaluationSampler, TrainingSampler
from accel_train.data.sources.cache import CachedImages, CacheFile
from accel_train.data.sources.load import load_splits
from accel_train.data.sources.splits import Source, Splits
from accel_train.data.tools import cache_writer
from accel_train.data.tools.cache_writer import write_cache
from accel_train.data.torch_loader import create_loader
from accel_train.data.transforms.image import ImageTransform
from accel_train.errors import UserError
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.environment import Launch

NUMBERS = np.random.default_rng(0)


def picture(width: int, height: int) -> Image.Image:
    coarse = Image.fromarray(NUMBERS.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 100 images to train/ and 6 to val/, of many sizes, some of them grey, CMYK or PNG."""
    root = tmp_path_factory.mktemp("cached") / "pets"
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


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Data:
    """Return a copy that a test may damage."""
    root = tmp_path / "pets"
    shutil.copytree(original, root)
    return Data(name="folder", root=root)


def written(data: Data, output: Path, *, short_side: int = 32, encoding: str = "raw", processes: int = 1) -> Data:
    assert write_cache(data, output, short_side=short_side, encoding=encoding, processes=processes) == 0
    assert not list(output.parent.glob(f".{output.name}.*"))
    return Data(name="cache", root=output)


def named(source: Source, root: Path) -> list[str]:
    return [source.name(id).removeprefix(f"{root}/") for id in range(len(source))]


def parts(splits: Splits) -> list[Source]:
    return list(splits.sources.values())


class TestContent:
    @pytest.mark.ci
    @pytest.mark.parametrize("processes", [1, 2])
    def test_the_same_samples_and_in_evaluation_the_same_pixels(
        self, original: Path, tmp_path: Path, processes: int
    ) -> None:
        data = Data(name="folder", root=original)
        cached = written(data, tmp_path / "new" / "pets.cache", processes=processes)
        before, after = load_splits(data, 0), load_splits(cached, 0)
        assert (after.classes, after.channels, after.mean) == (("cat", "dög"), 3, before.mean)
        assert [len(part) for part in parts(after)] == [100, 6]
        evaluated = ImageTransform(Augment(resize=32), 28, training=False)
        for one, other in zip(parts(before), parts(after), strict=True):
            assert named(one, original) == named(other, cached.root)
            assert torch.equal(one.labels, other.labels)
            keys = torch.zeros(len(one), dtype=torch.int64)
            images, again = one.fetch(range(len(one))), other.fetch(range(len(one)))
            assert torch.equal(evaluated(list(images), keys), evaluated(list(again), keys))
            for image, ready in zip(images, again, strict=True):
                short = min(image.shape[1:])
                assert min(ready.shape[1:]) == min(short, 32)
                assert abs(ready.shape[1] / ready.shape[2] - image.shape[1] / image.shape[2]) < 0.1  # none of it is cut
                if short <= 32:
                    assert torch.equal(ready, image)

    def test_a_division_takes_the_same_samples(self, original: Path, tmp_path: Path) -> None:
        data = Data(name="folder", root=original, test_fraction=0.2, train_limit=50)
        cached = written(data, tmp_path / "pets")
        before, after = load_splits(data, 3), load_splits(replace(data, name="cache", root=cached.root), 3)
        assert [len(part) for part in parts(after)] == [50, 6, 20]
        for one, other in zip(parts(before), parts(after), strict=True):
            assert named(one, original) == named(other, cached.root)

    def test_jpeg_is_smaller_and_nearly_the_same(self, original: Path, tmp_path: Path) -> None:
        data = Data(name="folder", root=original)
        raw, jpeg = (written(data, tmp_path / encoding, encoding=encoding) for encoding in ("raw", "jpeg"))
        assert jpeg.root.stat().st_size < raw.root.stat().st_size
        pairs = zip(*(load_splits(each, 0).train.fetch(range(100)) for each in (raw, jpeg)), strict=True)
        assert max(float((one.float() - other.float()).abs().mean()) for one, other in pairs) < 12

    @pytest.mark.parametrize("encoding", ["raw", "jpeg"])
    def test_grey(self, original: Path, tmp_path: Path, encoding: str) -> None:
        data = Data(name="folder", root=original, channels=1)
        cached = load_splits(written(data, tmp_path / "grey", encoding=encoding), 0)
        assert cached.channels == 1 and len(cached.mean) == 1
        images = cached.train.fetch(range(100))
        assert {len(image) for image in images} == {1}
        coloured = written(Data(name="folder", root=original), tmp_path / "coloured")
        with pytest.raises(UserError, match="contains colour images"):
            load_splits(replace(coloured, channels=1), 0)

    def test_tar_files(self, original: Path, tmp_path: Path) -> None:
        with tarfile.open(tmp_path / "pets.tar", "w") as archive:
            archive.add(original, "pets")
        data = Data(name="tar", root=tmp_path / "pets.tar")
        before, after = load_splits(data, 0), load_splits(written(data, tmp_path / "cache"), 0)
        assert named(before.train, data.root) == named(after.train, tmp_path / "cache")
        assert [len(part) for part in parts(after)] == [100, 6]

    def test_a_set_in_memory_needs_no_cache(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="nothing to cache"):
            write_cache(Data(), tmp_path / "digits", short_side=8, encoding="raw", processes=1)


@pytest.fixture(scope="module")
def cached(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Data:
    return written(Data(name="folder", root=original), tmp_path_factory.mktemp("cache") / "pets")


class TestReading:
    @pytest.mark.ci
    def test_any_batch_any_worker_any_restart(self, cached: Data) -> None:
        source = load_splits(cached, 0).train

        def seen(batch_size: int, workers: int, update: int = 0) -> dict[int, bytes]:
            order = TrainingSampler(Plan(100, batch_size, 1, 1), 5)
            order.seek(3, update * batch_size)
            loader = create_loader(
                source, order, Augment(crop="resized", flip=0.5), training=True, size=24, seed=5, workers=workers,
                device=torch.device("cpu"),
            )  # fmt: skip
            found: dict[Any, Any] = {}
            for batch in loader:
                for number, image in zip(batch["ids"].tolist(), batch["images"], strict=True):
                    pixels = image.contiguous().numpy().tobytes()
                    assert found.setdefault(number, pixels) == pixels
            return found

        expected = seen(10, 0)
        assert len(expected) == 100
        assert seen(32, 2) == expected
        tail = seen(10, 1, update=6)
        assert len(tail) == 40 and tail.items() <= expected.items()

    @pytest.mark.parametrize("place", ["auto", "disk", "host"])
    def test_where_it_lies(self, cached: Data, place: str) -> None:
        config = Config(data=replace(cached, placement=place, workers=0))  # type: ignore[arg-type]
        splits = load_splits(config.data, 0)
        order = EvaluationSampler(100, 50)
        feed = create_input_pipeline(
            config, splits, splits.train, order, create_accelerator(Launch()), training=False, size=24
        )
        assert feed.placement.place == ("host" if place == "host" else "disk")
        assert feed.placement.bytes == cached.root.stat().st_size
        assert sum(len(batch["ids"]) for batch in feed.batches) == 100

    def test_what_cannot_be(self, cached: Data, original: Path) -> None:
        accelerator = create_accelerator(Launch())
        for data, place, message in (
            (cached, "device", "differ in size"),
            (Data(name="folder", root=original), "device", "cache-data"),
            (Data(name="folder", root=original), "host", "cache-data"),
        ):
            config = Config(data=replace(data, placement=place))  # type: ignore[arg-type]
            splits = load_splits(config.data, 0)
            with pytest.raises(UserError, match=rf"--data\.placement {place}: .*{message}"):
                order = EvaluationSampler(100, 50)
                create_input_pipeline(config, splits, splits.train, order, accelerator, training=False, size=24)

    def test_a_file_that_was_cut_or_altered_is_not_taken(self, cached: Data, tmp_path: Path) -> None:
        whole = cached.root.read_bytes()
        torn = tmp_path / "torn"
        for end in (0, 1, 8, 63, len(whole) // 2, len(whole) - 100, len(whole) - 1):
            torn.write_bytes(whole[:end])
            with pytest.raises(UserError, match="is not a complete cache"):
                CacheFile(torn)
        for at in (len(whole) - 3, len(whole) - 30, len(whole) - 1000):  # digest, place, index
            altered = bytearray(whole)
            altered[at] ^= 1
            torn.write_bytes(altered)
            with pytest.raises(UserError, match="is not a complete cache"):
                CacheFile(torn)
        torn.write_bytes(whole + b"\0")
        with pytest.raises(UserError, match="is not a complete cache"):
            CacheFile(torn)
        for missing in (tmp_path / "nowhere", tmp_path):
            with pytest.raises(UserError, match="cannot be read"):
                CacheFile(missing)

    def test_an_altered_image_is_named(self, cached: Data, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        altered = tmp_path / "altered"
        content = bytearray(cached.root.read_bytes())
        content[int(CacheFile(cached.root).columns["offsets"][7]) + 5] ^= 1
        altered.write_bytes(content)
        data = replace(cached, root=altered)
        source = load_splits(data, 0).train
        assert isinstance(source, CachedImages)
        for read in (source.fetch, lambda ids: source.open(ids[0])):
            with pytest.raises(UserError, match=r"train/cat/15\.jpg cannot be read: it was changed") as caught:
                read([7])
            assert f"accel-train check-data cache --root {altered}" in str(caught.value)
        source.fetch([6, 8])
        assert len(check_data(data, output=tmp_path / "list", processes=1).unreadable) == 1
        assert (tmp_path / "list").read_text().splitlines()[1:] == ["train/cat/15.jpg"]
        capsys.readouterr()
        assert load_splits(replace(data, skip_unreadable=tmp_path / "list"), 0).left_out == 1


class TestWriting:
    def test_unreadable_images_are_all_named_and_can_be_left_out(
        self, folder: Data, tmp_path: Path, capsys: pytest.CaptureFixture
    ) -> None:
        bad = ["train/cat/0.jpg", "train/dög/49.jpg", "val/cat/0.jpg"]
        for path, content in zip(bad, (b"", b"not an image", b"\xff\xd8\xff"), strict=True):
            (folder.root / path).write_bytes(content)
        output = tmp_path / "pets.cache"
        assert write_cache(folder, output, short_side=32, encoding="raw", processes=1) == 3
        listed = tmp_path / "pets.cache.unreadable.txt"
        assert listed.read_text().splitlines()[1:] == bad
        printed = capsys.readouterr().out
        assert "3 of 106 images cannot be read" in printed and f"--skip-unreadable {listed}" in printed
        assert f"{folder.root}/train/cat/0.jpg: the file is empty" in printed
        assert not output.exists()

        cached = written(replace(folder, skip_unreadable=listed), output)
        printed = capsys.readouterr().out
        assert "continuing after 106 images" in printed and "cached " not in printed  # none is decoded again
        skipped, after = load_splits(replace(folder, skip_unreadable=listed), 0), load_splits(cached, 0)
        for one, other in zip(parts(skipped), parts(after), strict=True):
            assert named(one, folder.root) == named(other, output)
            assert torch.equal(one.labels, other.labels)
        assert torch.equal(skipped.unreadable, after.unreadable) and after.left_out == 3
        after.to_train_on.fetch(range(98))
        with pytest.raises(UserError, match=r"cat/0\.jpg cannot be read: it was skipped when the cache was written"):
            after.train.fetch(range(100))
        assert len(check_data(cached, output=tmp_path / "list", processes=1).unreadable) == 0
        for seed in range(4):  # divided like the folder, whatever was left out
            divided: dict[str, Any] = {"val_fraction": 0.0, "test_fraction": 0.3}
            one = load_splits(replace(folder, skip_unreadable=listed, **divided), seed)
            other = load_splits(replace(cached, **divided), seed)
            assert named(one.train, folder.root) == named(other.train, output)
            assert named(one.test, folder.root) == named(other.test, output)

    def test_a_cache_of_another_format_is_refused(
        self, folder: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cache_writer, "FORMAT", 1)
        with pytest.raises(UserError, match="was written by another accel-train; write the cache again"):
            load_splits(written(folder, tmp_path / "other"), 0)

    def test_a_class_that_loses_all_images(self, folder: Data, tmp_path: Path) -> None:
        names = [f"train/cat/{path.name}" for path in (folder.root / "train/cat").iterdir()]
        (tmp_path / "list").write_text("\n".join(names))
        with pytest.raises(UserError, match="no training image of class 'cat'"):
            write_cache(
                replace(folder, skip_unreadable=tmp_path / "list"), tmp_path / "c", short_side=32, encoding="raw",
                processes=1,
            )  # fmt: skip
        assert not (tmp_path / ".c.lock").exists()  # whatever the end

    def test_once_more_is_nothing_and_other_images_are_refused(
        self, folder: Data, tmp_path: Path, capsys: pytest.CaptureFixture
    ) -> None:
        output = tmp_path / "cache"
        written(folder, output)
        state = output.stat()
        written(folder, output)
        assert "nothing is left to do" in capsys.readouterr().out and output.stat() == state
        with pytest.raises(UserError, match="with other images or settings"):
            written(folder, output, short_side=16)
        picture(50, 50).save(folder.root / "train" / "cat" / "0.jpg")
        with pytest.raises(UserError, match="with other images or settings"):
            written(folder, output)
        with pytest.raises(UserError, match="is a folder"):
            written(folder, tmp_path)

    def test_a_place_that_cannot_be_written(self, folder: Data, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(UserError, match="cannot be written"):
            written(folder, tmp_path / "file" / "cache")

    def killed(self, folder: Data, output: Path) -> Path:
        """Start the command, kill it while it works, and return the journal."""
        script = (
            "import sys, time; from accel_train.data.tools import cache_writer, pool\n"
            "cache_writer.SYNC_SECONDS, pool.CHUNK, encode = 0, 4, cache_writer.encode\n"
            "def slowly(*arguments):\n    time.sleep(0.05); return encode(*arguments)\n"
            "cache_writer.encode = slowly\n"
            "from accel_train.cli import main; sys.exit(main(sys.argv[1:]))\n"
        )
        words = ["cache-data", "folder", "--root", folder.root, "--output", output, "--short-side", 32]
        with Path(os.devnull).open("wb") as nothing, (output.parent / "errors").open("wb") as errors:
            line = ("-c", script, *words, "--processes", 1)
            popen = helpers.forked(line, 1, helpers.environment(), nothing, errors)
        journal = output.with_name(f".{output.name}.journal")
        deadline = time.monotonic() + 60
        while not journal.exists() or journal.read_text().count("\n") < 6:
            assert popen.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        popen.send_signal(signal.SIGKILL)
        popen.wait()
        assert not output.exists()
        return journal

    def test_after_a_kill_it_goes_on_to_the_same_file(
        self, folder: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
    ) -> None:
        expected = written(folder, tmp_path / "at once").root.read_bytes()
        output = tmp_path / "killed"
        journal = self.killed(folder, output)
        partial = output.with_name(".killed.partial")
        with pytest.raises(UserError, match="is not a complete cache"):
            CacheFile(partial)
        with partial.open("ab") as file:  # a chunk that the journal does not know yet, and half a line
            file.write(b"torn" * 1000)
        lines = journal.read_text().splitlines(keepends=True)
        journal.write_text("".join(lines) + lines[-1][:20])
        monkeypatch.setattr("accel_train.data.tools.pool.CHUNK", 4)
        capsys.readouterr()
        written(folder, output)
        done = re.search(r"continuing after (\d+) images", capsys.readouterr().out)
        assert done and 0 < int(done[1]) < 106
        assert output.read_bytes() == expected

    @pytest.mark.parametrize("change", ["image", "setting", "file"])
    def test_after_a_change_it_begins_anew(
        self, folder: Data, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
    ) -> None:
        output = tmp_path / "killed"
        self.killed(folder, output)
        side = 32
        if change == "image":
            picture(50, 60).save(folder.root / "train" / "cat" / "0.jpg")
        elif change == "setting":
            side = 30
        else:
            picture(50, 60).save(folder.root / "train" / "cat" / "new.jpg")
        capsys.readouterr()
        written(folder, output, short_side=side)
        assert "starting over" in capsys.readouterr().out
        assert output.read_bytes() == written(folder, tmp_path / "again", short_side=side).root.read_bytes()

    def test_a_disk_that_has_other_bytes_is_noticed(
        self, folder: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        finish = cache_writer._finish

        def damaged(partial: Path, *arguments: object) -> None:
            with partial.open("r+b") as file:
                file.seek(1000)
                file.write(b"\0\0\0\0\1\2\3\4")
            finish(partial, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(cache_writer, "_finish", damaged)
        with pytest.raises(UserError, match=r"is altered: train/cat/0\.jpg differs from what was written"):
            written(folder, tmp_path / "cache")
        assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_trained_from_a_cache_by_the_command_line(original: Path, tmp_path: Path) -> None:
    cached, run = tmp_path / "pets.cache", tmp_path / "run"
    words = ["cache-data", "folder", "--root", str(original), "--output", str(cached), "--short-side", "40"]
    done = helpers.python("-m", "accel_train", *words, "--encoding", "raw", "--processes", 1)
    assert done.returncode == 0, done.stderr
    assert f"accel-train train RECIPE --data.name cache --data.root {cached}" in done.stdout
    options = (
        "digits --epochs 2 --batch-size 20 --model.image-size 32 --augment.crop resized --augment.flip 0.5 "
        f"--data.name cache --data.root {cached} --data.test-fraction 0.2 --output-dir {run}"
    )
    results = []
    for processes in (1, 2):
        # Starting workers takes seconds: those of one process show that they can read a cache.
        workers = ["--data.workers", 2 - processes]
        done = helpers.run(*options.split(), *workers, processes=processes)
        assert done.returncode == 0, done.stderr
        result = json.loads((run / "result.json").read_text())
        results.append({key: result[key] for key in ("train_images", "test_images", "test_loss")})
        shutil.rmtree(run)
    assert results[0]["train_images"] == 80 and results[0]["test_images"] == 20
    assert results[1] == {**results[0], "test_loss": pytest.approx(results[0]["test_loss"], rel=1e-3)}


def test_wrong_words_on_the_command_line(tmp_path: Path) -> None:
    for words, message in (
        (["folder"], "--output is missing"),
        (["folder", "--output", "x", "--channels", "2"], "--channels: expected 1 or 3, found 2"),
        (["folder", "--output", "x", "--short-side", "0"], "--short-side: expected at least 1"),
        (["folder", "--output", "x", "--encoding", "png"], "--encoding: expected one of raw, jpeg"),
        (["folder", "--output", "x", "--root", str(tmp_path / "none")], "does not exist"),
    ):
        done = helpers.python("-m", "accel_train", "cache-data", *words, cwd=tmp_path)
        assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1
