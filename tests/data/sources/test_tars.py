"""Images in tar files: WebDataset shards."""

import io
import json
import multiprocessing
import pickle
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from PIL import Image

from accel_train.config.schema import Data
from accel_train.data.sources.load import load_splits
from accel_train.errors import UserError


def image(value: int, size: tuple[int, int] = (4, 3)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (value, 0, 0)).save(file, "PNG")
    return file.getvalue()


def pack(path: Path | io.BytesIO, files: dict[str, bytes]) -> Path:
    options = {"fileobj": path} if isinstance(path, io.BytesIO) else {"name": path}
    if isinstance(path, Path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(mode="w", **options) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path  # type: ignore[return-value]


def values(source) -> list[int]:
    return [int(source.fetch([i])[0][0, 0, 0]) for i in range(len(source))]


def load(root: Path, name: str = "wds", **options):
    return load_splits(Data(name=name, root=root, **options), 0)


def samples(values: Iterable[int]) -> dict[str, bytes]:
    """The files of a shard with these images."""
    named = {f"{value:04}": value for value in values}
    return {f"{key}.png": image(value) for key, value in named.items()} | {
        f"{key}.cls": str(value % 3).encode() for key, value in named.items()
    }


class TestTarFiles:
    def test_the_same_images_divide_alike_in_any_order(self, tmp_path: Path) -> None:
        files = samples(range(18))
        pack(tmp_path / "1" / "a.tar", files)
        pack(tmp_path / "2" / "a.tar", dict(reversed(files.items())))
        one, other = (load(tmp_path / folder, val_fraction=0.3) for folder in "12")
        assert sorted(values(one.validation)) == sorted(values(other.validation))

    def test_forked_and_pickled_copies_read_alike(self, tmp_path: Path) -> None:
        pack(tmp_path / "s.tar", samples(range(40)))
        source = load(tmp_path).train
        expected = values(source)
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(values, [source, source]) == [expected, expected]
        assert values(pickle.loads(pickle.dumps(source))) == expected

    def test_wherever_it_is_cut_it_is_not_taken_as_whole(self, tmp_path: Path) -> None:
        path = pack(tmp_path / "s.tar", samples(range(6)) | {"notes": b"x"})
        content = path.read_bytes()
        end = len(content.rstrip(b"\0")) // 512 * 512 + 512  # of the last file
        for cut in (*range(1, end, 97), *range(512, end, 512), end, end + 511):
            path.write_bytes(content[:cut])
            with pytest.raises(UserError, match=r"s.tar cannot be read .* complete and not compressed"):
                load(tmp_path)
        for cut in (end + 512, end + 1024, len(content)):  # all files are whole
            path.write_bytes(content[:cut])
            assert len(load(tmp_path).train) == 6
        path.write_bytes(content + content)
        with pytest.raises(UserError, match="data follows its end marker"):
            load(tmp_path)

    def test_links_are_not_passed_over(self, tmp_path: Path) -> None:
        with tarfile.open(tmp_path / "s.tar", "w") as archive:
            link = tarfile.TarInfo("a/1.png")
            link.type, link.linkname = tarfile.SYMTYPE, "2.png"
            archive.addfile(link)
        with pytest.raises(UserError, match=r"a/1.png is a link; pack the files with"):
            load(tmp_path)

    def test_class_folders_are_to_be_unpacked(self, tmp_path: Path) -> None:
        pack(tmp_path / "train.tar", {"cat/1.png": image(1), "dog/1.png": image(2)})
        with pytest.raises(UserError, match=r"cat/1.png has no label; .* unpack the tar files and give"):
            load(tmp_path)
        with pytest.raises(UserError, match=r"train.tar is a file, not a folder; .* Unpack a tar file first"):
            load(tmp_path / "train.tar", "folder")

    def test_no_tar_file(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="does not exist"):
            load(tmp_path / "no")

    def test_an_unreadable_image(self, tmp_path: Path) -> None:
        root = tmp_path / "my shards"
        path = pack(root / "s.tar", samples(range(6)) | {"0001.png": b""})
        with pytest.raises(UserError, match=f"{path}/0001.png cannot be read: .*check-data wds --data.root '{root}'"):
            load(root).train.fetch([1])
        (tmp_path / "list").write_text("s.tar/0001.png\n")
        found = load(root, skip_unreadable=tmp_path / "list")
        assert found.left_out == 1 and values(found.to_train_on) == [0, 2, 3, 4, 5]


class TestWebDataset:
    def shard(self, path: Path, values: list[int]) -> Path:
        files = samples(values) | {f"{value:04}.json": b"{}" for value in values}
        return pack(path, files)

    def test_splits_by_name(self, tmp_path: Path) -> None:
        self.shard(tmp_path / "set-train-0001.tar", [3, 4])
        self.shard(tmp_path / "set-train-0000.tar", [0, 1, 2])
        self.shard(tmp_path / "set-validation-0000.tar", [5])
        found = load(tmp_path)
        assert values(found.train) == [0, 1, 2, 3, 4] and found.train.labels.tolist() == [0, 1, 2, 0, 1]
        assert values(found.validation) == [5] and found.validation.labels.tolist() == [2] and found.test is None
        assert found.classes == ("0", "1", "2") and found.train.labels.dtype == torch.int64

    def test_splits_by_folder(self, tmp_path: Path) -> None:
        self.shard(tmp_path / "set" / "train" / "0.tar", [0, 1, 2])
        self.shard(tmp_path / "set" / "test" / "0.tar", [5])
        found = load(tmp_path / "set")
        assert values(found.train) == [0, 1, 2] and values(found.test) == [5]

    def test_splits_by_info(self, tmp_path: Path) -> None:
        self.shard(tmp_path / "x.tar", [0, 1, 2])
        self.shard(tmp_path / "y.tar", [4])
        splits = {
            "train": {"name": "train", "filenames": ["x.tar"]},
            "test": {"name": "test", "filenames": ["y.tar"]},
        }
        (tmp_path / "_info.json").write_text(json.dumps({"splits": splits}))
        found = load(tmp_path)
        assert values(found.train) == [0, 1, 2] and values(found.test) == [4]

    def test_shards_without_splits_can_be_divided(self, tmp_path: Path) -> None:
        self.shard(tmp_path / "0.tar", list(range(12)))
        found = load(tmp_path, test_fraction=0.25)
        assert (len(found.train), len(found.test)) == (9, 3)

    def test_a_shard_that_webdataset_wrote_and_reads_alike(self, tmp_path: Path) -> None:
        webdataset = pytest.importorskip("webdataset")
        with webdataset.TarWriter(str(tmp_path / "train-0.tar")) as writer:
            for i in range(6):
                writer.write({"__key__": f"sub.d/{i}", "png": image(i), "cls": i % 2})
        theirs = [
            (s["png"], int(s["cls"])) for s in webdataset.WebDataset(str(tmp_path / "train-0.tar"), shardshuffle=False)
        ]
        found = load(tmp_path)
        assert [(found.train.read(i), int(found.train.labels[i])) for i in range(6)] == theirs

    def test_bad_shards(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="no shard"):
            load(tmp_path)
        pack(tmp_path / "train.tar", {"1.png": image(1)})
        with pytest.raises(UserError, match=r"1.png has no label; add a file 1.cls"):
            load(tmp_path)
        pack(tmp_path / "train.tar", {"1.png": image(1), "1.cls": b"cat"})
        with pytest.raises(UserError, match="'cat' is not a class number"):
            load(tmp_path)
        (tmp_path / "info.json").write_text("[]")
        with pytest.raises(UserError, match=r"info.json does not list shards"):
            load(tmp_path)
        (tmp_path / "info.json").unlink()
        pack(tmp_path / "other.tar", {"1.png": image(1), "1.cls": b"1"})
        with pytest.raises(UserError, match=r"other.tar has no split"):
            load(tmp_path)

    def test_an_image_has_a_label_of_its_own_and_a_sample_one_image(self, tmp_path: Path) -> None:
        pack(tmp_path / "train.tar", {"000.jpg": image(1), "000.mask.png": image(9), "000.cls": b"0"})
        with pytest.raises(
            UserError, match=r"000\.mask\.png has no label; add a file 000\.mask\.cls next to it, or leave"
        ):
            load(tmp_path)
        for names in (("3.jpg", "3.png"), ("3.png", "3.png")):
            with tarfile.open(tmp_path / "train.tar", "w") as archive:
                for name, content in ((names[0], image(1)), (names[1], image(2)), ("3.cls", b"0")):
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
            with pytest.raises(UserError, match=f"the sample 3 has several images, {names[0]} and {names[1]}"):
                load(tmp_path)

    def test_keys_with_a_dot(self, tmp_path: Path) -> None:
        files = {"sub.d/cat.0.jpg": image(1), "sub.d/cat.0.cls": b"0"}
        pack(tmp_path / "train.tar", files | {"sub.d/cat.1.cls": b"1", "sub.d/cat.1.jpg": image(2)})
        found = load(tmp_path).train
        assert values(found) == [1, 2] and found.labels.tolist() == [0, 1]
