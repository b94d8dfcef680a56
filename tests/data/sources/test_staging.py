"""Copies of shards on the node: what a storage says and sends, with faults of real ones and tricks of bad ones."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
from PIL import Image

pytest.importorskip("aiohttp", reason="accel-train[remote] is not installed")

from shard_files import size_of, write_shards
from storage_server import StorageServer

from accel_train import api
from accel_train.cli import main
from accel_train.config.checks import check_root
from accel_train.config.schema import Data
from accel_train.config.url import Url, expanded
from accel_train.data.sources import staging
from accel_train.data.sources.load import load_splits
from accel_train.data.sources.splits import names_root, sample_keys
from accel_train.data.sources.staging import AbsentError, File, Storage, folder_for, kept, stage
from accel_train.errors import UserError

NAME, BRACES = "train-000.tar", "{train-{000..005},val-000}.tar"
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "data")


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StorageServer]:
    monkeypatch.setattr(staging, "PAUSES", (0.01, 0.02, 0.04))
    monkeypatch.setattr(staging, "PART", 4000)
    monkeypatch.setattr(staging, "PIECE", 1000)
    monkeypatch.setattr(staging, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(staging, "SPARE", 0)
    with StorageServer(folder) as started:
        yield started


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is a process of its own, so far as staging knows."""
    monkeypatch.setattr(staging, "_staged", {})


def data(root: object, tmp_path: Path, name: str = "wds", **options: Any) -> Data:
    where = Url(str(root)) if "://" in str(root) else Path(str(root))
    return Data(name=name, root=where, stage=tmp_path / "stage", **options)


def storage_of(server: StorageServer) -> Storage:
    return Storage(Url(f"{server.url}/{BRACES}"), "wds")


def copied(server: StorageServer, tmp_path: Path) -> bytes:
    storage = storage_of(server)
    storage.copy(storage.look_at(NAME), tmp_path / "copies" / NAME)
    return (tmp_path / "copies" / NAME).read_bytes()


def everything(data: Data) -> Any:
    """All that a training gets of the data: classes, and keys, labels and pixels of each split."""
    splits = load_splits(data, 0)
    found = {}
    for split, source in splits.sources.items():
        pixels = [image.tolist() for image in source.fetch(range(len(source)))]
        found[split] = list(sample_keys(source, names_root(data))), source.labels.tolist(), pixels
    return splits.classes, found


def leads_to(place: str) -> Any:
    return lambda method, path, times: f"{place}/moved.tar" if path == NAME else None


def gets(*faults: str) -> Any:
    """The first requests for bytes go wrong so."""
    return lambda method, path, times: faults[times] if method == "GET" and times < len(faults) else None


@pytest.mark.parametrize("divided", [{}, {"val_fraction": 0.25, "test_fraction": 0.25}])
def test_a_training_gets_the_same_from_a_url_a_slow_path_and_the_folder(
    server: StorageServer, folder: Path, tmp_path: Path, divided: dict[str, Any]
) -> None:
    braces = BRACES if not divided else "train-{000..005}.tar"
    if divided:
        (folder / "val-000.tar").unlink()
    local = everything(Data("wds", folder, **divided))
    assert everything(data(folder, tmp_path, **divided)) == local
    assert everything(data(f"{server.url}/{braces}", tmp_path, **divided)) == local
    assert server.bytes == size_of(folder)
    assert not [*(tmp_path / "stage").rglob("*.part")]


def test_a_second_start_asks_only_whether_the_files_are_the_same(
    server: StorageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = data(f"{server.url}/{BRACES}", tmp_path)
    first = load_splits(options, 0)
    assert first.train.name(0) == f"{server.url}/{NAME}/0000000.png"
    server.reset()
    load_splits(options, 0)  # in the same process
    assert server.requests == 0
    monkeypatch.setattr(staging, "_staged", {})
    assert len(load_splits(options, 0).train) == 96
    assert server.bytes == 0
    (index,) = (tmp_path / "stage").rglob(".accel-train-index-wds.safetensors")
    before = index.stat().st_mtime_ns
    monkeypatch.setattr(staging, "_staged", {})
    load_splits(options, 0)
    assert index.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "faults",
    [(), ("503",), ("reset",), ("truncated",), ("stalled",), ("429", "reset", "500")],
    ids=lambda faults: "-".join(faults) or "none",
)
def test_a_shard_comes_whole_whatever_fails_on_the_way(
    server: StorageServer, folder: Path, tmp_path: Path, faults: tuple[str, ...]
) -> None:
    server.fault = gets(*faults)
    assert copied(server, tmp_path) == (folder / NAME).read_bytes()


def test_a_server_without_ranges_sends_all_of_it_again(server: StorageServer, folder: Path, tmp_path: Path) -> None:
    server.ranges, server.fault = False, gets("reset")
    assert copied(server, tmp_path) == (folder / NAME).read_bytes()


@pytest.mark.parametrize(("status", "requests"), [("404", 1), ("403", 1), ("503", 4)])
def test_what_is_not_there_is_one_line_with_the_url(
    server: StorageServer, tmp_path: Path, status: str, requests: int
) -> None:
    storage = storage_of(server)
    file = storage.look_at(NAME)
    server.reset()
    server.fault = lambda *_: status
    with pytest.raises(UserError, match=f"{server.url}/{NAME} cannot be read .*") as error:
        storage.copy(file, tmp_path / NAME)
    assert "\n" not in str(error.value) and not (tmp_path / NAME).exists()
    assert isinstance(error.value, AbsentError) == (requests == 1)
    assert server.requests == requests


def test_content_that_changes_while_it_is_copied_is_refused(
    server: StorageServer, folder: Path, tmp_path: Path
) -> None:
    file = storage_of(server).look_at(NAME)
    (folder / NAME).write_bytes(bytes(reversed((folder / NAME).read_bytes())))
    with pytest.raises(UserError, match="is not the file that it was when it was looked at first"):
        storage_of(server).copy(file, tmp_path / NAME)
    assert not [*tmp_path.glob(f"*{NAME}*")]


def test_the_checksums_beside_the_shards_are_compared(server: StorageServer, folder: Path, tmp_path: Path) -> None:
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.tar"))}
    (folder / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()))
    options = data(f"{server.url}/{BRACES}", tmp_path)
    assert len(load_splits(options, 0).train) == 96
    (folder / "SHA256SUMS").write_text("".join(f"{'0' * 64} *{name}\n" for name in sums))
    with pytest.raises(UserError, match=f"is not the file that it was .*{'0' * 64}"):
        stage(options)


@pytest.mark.parametrize("fault", ["endless", "longer"])
def test_a_body_that_is_longer_than_announced_ends_the_transfer(
    server: StorageServer, folder: Path, tmp_path: Path, fault: str
) -> None:
    storage = storage_of(server)
    file = storage.look_at(NAME)
    if fault == "endless":
        server.fault = gets(*["endless"] * 9)
    else:
        file = File(NAME, file.size - 5000, file.version)
    with pytest.raises(UserError, match=r"has sent more than the [\d,]+ bytes that were announced"):
        storage.copy(file, tmp_path / NAME)
    assert not (tmp_path / NAME).exists()
    assert size_of(tmp_path, f".{NAME}.part") <= file.size


def test_what_is_compressed_is_not_unpacked(server: StorageServer, tmp_path: Path) -> None:
    options = storage_of(server)._web_options()["client_kwargs"]
    assert options["auto_decompress"] is False and options["headers"] == {"Accept-Encoding": "identity"}


@pytest.mark.parametrize("name", ["../train-000.tar", "a/../../train-000.tar", "/etc/train-000.tar", "a//b.tar", "."])
def test_names_that_a_server_sends_stay_in_the_folder(
    server: StorageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with pytest.raises(UserError, match=r"which would not be in the folder of the copy"):
        File(name, 1)
    # Listed by a bucket, in a list beside the shards, and in a manifest that somebody has written.
    storage = Storage(tmp_path / "data", "wds")
    monkeypatch.setattr(storage, "client", _Listing(str(tmp_path / "data"), name))
    with pytest.raises(UserError):
        storage.manifest()
    (server.folder / "_info.json").write_text(json.dumps({"splits": {"train": {"filenames": [name]}}}))
    with pytest.raises(UserError):
        stage(data(server.url, tmp_path))
    place = folder_for(data(server.url, tmp_path))
    place.mkdir(parents=True, exist_ok=True)
    (place / "manifest.json").write_text(json.dumps({"files": [{"name": name, "size": 1}]}))
    assert not kept(place)


class _Listing:
    """A file system that lists one name, and has no other file."""

    def __init__(self, folder: str, name: str) -> None:
        self.folder, self.name = folder, name

    def _strip_protocol(self, path: str) -> str:
        return path

    def find(self, path: str, **_: Any) -> dict[str, Any]:
        return {f"{self.folder}/{self.name}": {"size": 1}}

    def info(self, path: str) -> Any:
        raise FileNotFoundError(path)


def test_a_redirect_leads_to_no_other_address_of_this_network(
    server: StorageServer, folder: Path, tmp_path: Path
) -> None:
    (folder / "moved.tar").write_bytes((folder / NAME).read_bytes())
    server.fault = lambda method, path, times: f"{server.url}/moved.tar" if path == NAME else None
    assert copied(server, tmp_path) == (folder / NAME).read_bytes()  # the same server, which the user has named
    with StorageServer(folder) as other:
        for place in (other.url, other.url.replace("127.0.0.1", "localhost"), "http://169.254.169.254", "http://[::1]"):
            server.fault = leads_to(place)
            with pytest.raises(UserError, match=r"leads to .*, which is an address of this network"):
                copied(server, tmp_path)
        assert other.requests == 0


def test_a_disk_without_room_refuses_in_one_line(
    server: StorageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**6, 10**6 - 200_000, 200_000))
    with pytest.raises(UserError, match=r"--data\.stage: .* has 200\.0 kB free, and http://.* needs 28\d\.\d kB"):
        stage(data(f"{server.url}/{BRACES}", tmp_path))
    assert server.bytes == 0


def test_a_disk_that_fills_up_meanwhile_is_no_fault_of_the_storage(
    server: StorageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"--data\.stage: .*\.tar cannot be written \(No space left on device\)"):
        stage(data(f"{server.url}/{BRACES}", tmp_path))


@pytest.mark.parametrize("url", ["ftp://a/b", "reference://a", "zip://b.tar::https://a/b.zip", "https://a/b::s3://c"])
def test_other_protocols_and_chains_are_refused(url: str, tmp_path: Path) -> None:
    for ask in (lambda: stage(data(url, tmp_path)), lambda: check_root(Data("wds", Url(url)))):
        with pytest.raises(UserError, match=r"expected a URL of http, https, s3, gs, hf, without '::'"):
            ask()


@pytest.mark.parametrize("name", ["folder", "csv", "digits", "mnist", "wds/pets", "hfds/pets"])
def test_only_shards_are_copied(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"only --data\.name wds, hfds/parquet are copied .* found {name}"):
        load_splits(data("https://host/data", tmp_path, name), 0)


def test_where_copies_are_kept_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = Data("wds", Url("s3://bucket/shards"))
    for name in ("SLURM_JOB_ID", "PBS_JOBID", *staging.JOB_FOLDERS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert folder_for(url).parent == tmp_path / "home" / ".cache" / "accel_train" / "staged"
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    with pytest.raises(UserError, match=r"--data\.stage: this job has no local directory .* is in your home: name"):
        folder_for(url)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "home" / "tmp"))
    with pytest.raises(UserError, match=r"--data\.stage: this job has no local directory"):
        folder_for(url)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "job"))
    assert folder_for(url).parent == tmp_path / "job" / f"accel_train-{os.getuid()}"
    folder_for(url).parent.chmod(0o777)
    with pytest.raises(UserError, match=r"cannot be written \(others can write in it\)"):
        folder_for(url)
    assert folder_for(data("s3://bucket/shards", tmp_path)).parent == tmp_path / "stage"


def test_a_node_without_a_network_uses_a_complete_copy(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "PAUSES", ())
    caplog.set_level("INFO")
    with StorageServer(folder) as server:
        options = data(f"{server.url}/{BRACES}", tmp_path)
        there = everything(options)
    monkeypatch.setattr(staging, "_staged", {})
    assert everything(options) == there
    assert "So the copy in" in caplog.text
    (copy,) = (tmp_path / "stage").rglob(NAME)
    copy.unlink()
    monkeypatch.setattr(staging, "_staged", {})
    with pytest.raises(UserError, match="cannot be read"):
        load_splits(options, 0)
    with pytest.raises(UserError, match=r"is not copied to .* yet"):
        load_splits(options, 0, download=False)


def test_shards_that_are_replaced_get_a_folder_of_their_own(
    server: StorageServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = data(f"{server.url}/{BRACES}", tmp_path)
    first = load_splits(options, 0).train
    pixels = first.fetch([0])[0].tolist()
    shutil.copy(folder / "train-001.tar", folder / NAME)
    monkeypatch.setattr(staging, "_staged", {})
    second = load_splits(options, 0).train
    assert second.fetch([0])[0].tolist() != pixels == first.fetch([0])[0].tolist()  # a run goes on with what it has


def test_a_list_names_the_shards_of_a_web_server_and_their_classes(
    server: StorageServer, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"a web server does not list its files.*train-\{0000\.\.0127\}\.tar"):
        stage(data(server.url, tmp_path))
    names = [path.name for path in sorted(folder.glob("*.tar"))]
    info = {"splits": {"train": {"filenames": names[:-1]}, "val": {"filenames": names[-1:]}}, "classes": ["cat", "dog"]}
    (folder / "_info.json").write_text(json.dumps(info))
    assert everything(data(server.url, tmp_path)) == everything(Data("wds", folder))
    few = load_splits(data(f"{server.url}/train-{{000..001}}.tar", tmp_path), 0)  # what is named is not looked up
    assert few.classes == ("0", "1") and len(few.train) == 32


def write_parquet(folder: Path) -> Path:
    """Write data/train-00000-of-00006.parquet, … and data/validation-…, as the hub keeps images; return the folder."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    (folder / "data").mkdir(parents=True)
    for split, count in (("train", 6), ("validation", 1)):
        for number in range(count):
            pixels = np.random.default_rng(number).integers(0, 256, (16, 12, 12, 3), dtype=np.uint8)
            rows = {"image": list(map(Image.fromarray, pixels)), "label": [0, 1] * 8}
            part = datasets.Dataset.from_dict(rows, features)
            part.to_parquet(folder / "data" / f"{split}-{number:05d}-of-{count:05d}.parquet", batch_size=5)
    return folder


@pytest.mark.ci
def test_parquet_files_of_a_folder_and_of_a_url(server: StorageServer, tmp_path: Path) -> None:
    folder = write_parquet(tmp_path / "hub")
    assert load_splits(Data("hfds/parquet", folder), 0).classes == ("cat", "dog")
    local, there = (everything(Data("hfds/parquet", folder, stage=stage)) for stage in (None, tmp_path / "stage"))
    assert there == local and len(local[1]["train"][1]) == 96
    server.folder = folder / "data"
    braces = "{train-{00000..00005}-of-00006,validation-00000-of-00001}.parquet"
    assert everything(data(f"{server.url}/{braces}", tmp_path, "hfds/parquet")) == local
    with pytest.raises(UserError, match="name the folder of the Parquet files"):
        check_root(Data("hfds/parquet", tmp_path / "nowhere"))


def staging_process(options: Data, **constants: float) -> helpers.Captured:
    """A process that stages the data, and prints the manifest's digest."""
    code = (
        "from pathlib import Path; from accel_train.config.schema import Data; from accel_train.config.url import Url; "
    )
    code += "from accel_train.data.sources import staging; "
    code += "; ".join(f"staging.{name} = {value}" for name, value in {"SPARE": 0, **constants}.items())
    code += f"; print(staging.stage(Data('wds', Url('{options.root}'), stage=Path('{options.stage}'))))"
    return helpers.Captured(["-c", code], helpers.environment())


@pytest.mark.ci
def test_what_has_come_is_not_sent_again_after_a_kill_or_a_lost_connection(tmp_path: Path) -> None:
    folder, part = write_shards(tmp_path / "data", side=128), 100_000
    with StorageServer(folder, bandwidth=1e6) as server:
        options = data(f"{server.url}/{BRACES}", tmp_path)
        for _ in range(2):
            process, before = staging_process(options, PART=part), size_of(tmp_path / "stage", "**/*.part")
            deadline = time.monotonic() + 60
            while size_of(tmp_path / "stage", "**/*.part") < before + 500_000 and time.monotonic() < deadline:
                time.sleep(0.02)
            process.popen.send_signal(signal.SIGKILL)
            process.communicate()
        there = {path.name: path.stat().st_size for path in (tmp_path / "stage").rglob(f"*{NAME[-4:]}*")}
        assert sum(there.values()) >= 1_000_000
        server.bandwidth = None
        server.reset()
        server.fault = lambda method, path, times: "truncated" if (method, times) == ("GET", 0) else None
        _, stderr = (last := staging_process(options, PART=part)).communicate()
        assert last.returncode == 0, stderr
        assert everything(options) == everything(Data("wds", folder))
        shards = {path.name: path.stat().st_size for path in folder.glob(f"*{NAME[-4:]}")}
        assert {*server.starts} == {name for name, size in shards.items() if there.get(name) != size}
        for name, starts in server.starts.items():
            # After a kill from the last flush on, after a lost connection not from before that.
            flushed = max(0, there.get(f".{name}.part", 0) - 1) // part * part
            assert starts[0] == flushed and min(starts) == flushed, (name, starts)


@pytest.mark.ci
def test_two_processes_copy_once(server: StorageServer, folder: Path, tmp_path: Path) -> None:
    server.bandwidth = 400_000.0
    both = [staging_process(data(f"{server.url}/{BRACES}", tmp_path)) for _ in range(2)]
    texts = [process.communicate() for process in both]
    digests = {stdout.splitlines()[-1] for stdout, _ in texts}
    assert len(digests) == 1 and len(digests.pop()) == 12, texts
    assert server.bytes == size_of(folder)


@pytest.mark.ci
def test_check_data_copies_and_shards_are_written_from_the_copy(
    server: StorageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"{server.url}/{BRACES}"
    assert main(["check-data", "wds", "--data.root", url, "--data.stage", "stage", "--processes", "1"]) == 0
    said = capsys.readouterr().out
    assert "copying 7 files (286.7 kB) to" in said and "All 112 images can be read." in said
    (listed,) = Path().glob("unreadable-*.txt")
    assert listed.read_text() == f"# accel-train check-data: wds {url}\n" and "{" not in listed.name
    assert [*Path("stage").rglob(".accel-train-index-wds.safetensors")]
    server.reset()
    assert main(["shards", "wds", "out", "--data.root", url, "--data.stage", "stage", "--processes", "1"]) == 0
    assert server.bytes == 0 and len(load_splits(Data("wds", Path("out")), 0).train) == 96
    assert api.check_data({"name": "wds", "root": "out", "stage": "copies"}, processes=1).images.sources


def test_braces_are_expanded_as_by_the_shell() -> None:
    assert expanded("a-{08..10}.tar", ".tar") == ("a-08.tar", "a-09.tar", "a-10.tar")
    assert expanded("{t-{0..1},v}.tar", ".tar") == ("t-0.tar", "t-1.tar", "v.tar")
    assert expanded("{t/{0..1},v}-{a,}.tar", ".tar") == (
        "t/0-a.tar", "t/0-.tar", "t/1-a.tar", "t/1-.tar", "v-a.tar", "v-.tar"
    )  # fmt: skip
    assert expanded("one.tar", ".tar") == ("one.tar",)
    many = "{3..1}.tar", "{0..9999999}.tar", "{0..9999}{0..9999}.tar"
    for wrong in (*many, "{a}.tar", "a}.tar", "}{a,b}.tar", "{a,b.tar", "a-{0..1}.zip"):
        with pytest.raises(UserError, match=r"--data\.root"):
            expanded(wrong, ".tar")
    named = Storage(Url("http://host/shards/{train/{0..1},val/0}.tar"), "wds")
    assert (named.folder, named.names) == ("http://host/shards", ("train/0.tar", "train/1.tar", "val/0.tar"))
