"""Measure training input from storage that is far away: files, tar files and shards, and other programs' loaders.

    python benchmarks/storage.py --photos photos.tar                  # or a folder with a folder for each class
    python benchmarks/storage.py --photos photos.tar --mount          # a folder on a slow file system
    pip install --target DIR mosaicml-streaming …; python benchmarks/storage.py --photos photos.tar --streaming DIR

The same photographs as files in a folder, as WebDataset shards (`accel-train shards`) and as MosaicML's shards; on this
disk, and on a storage whose requests take 5 and 20 ms and share 50 MB/s. Folder and tar files are read as from a
network file system, with that delay in each read of an image; shards come from a web server on the loopback (MosaicML
Streaming, which has no HTTP, copies files with the same delay). Each line is a program of its own, with two workers,
that decodes and crops the images, and sleeps for each batch as long as the model would compute. It has an empty cache
at its start, and goes through two epochs.

`--mount` measures files and tar files alone, on a file system that is as slow as that and is mounted by FUSE
(tests/slow_mount.py), as a network file system is: the kernel reads ahead, and keeps what was read. Opening a file
takes as long as a request, too.

* images/s: of the first epoch, from its second batch on. "of local": of the same loader's on this disk.
* first batch: seconds after the loader began to be made. The imports are done, also those of our workers. Shards by URL
  are copied to this disk first.
* requests, data: of the first epoch, and bytes in multiples of the data. In brackets the requests of the second epoch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from accel_train.launch.environment import prepare_environment

LAUNCH = prepare_environment()  # before torch is imported, which reads some of it

import document  # noqa: E402
import torch  # noqa: E402
from slow_storage import SlowStorage, slowed  # noqa: E402

from accel_train.cli.table import print_table  # noqa: E402
from accel_train.config.schema import Augment, Config, Data, Model  # noqa: E402
from accel_train.config.url import Url  # noqa: E402
from accel_train.data.loading import create_input  # noqa: E402
from accel_train.data.order.plan import create_plan  # noqa: E402
from accel_train.data.sources.load import load_splits  # noqa: E402
from accel_train.data.sources.splits import unwrap_subset  # noqa: E402
from accel_train.data.tools.shards import write_shards  # noqa: E402
from accel_train.data.worker_processes import WORKERS as WORKER_MODULE  # noqa: E402
from accel_train.data.worker_processes import WorkerContext  # noqa: E402
from accel_train.launch.accelerator import create_accelerator  # noqa: E402

TESTS = Path(__file__).resolve().parent.parent / "tests"
BANDWIDTH = 50e6  # bytes a second
LATENCIES = (0.0, 0.005, 0.020)  # seconds; 0: this disk
BATCH, SIZE, WORKERS, EPOCHS = 64, 160, 2, 2
SHARD_BYTES = 1_000_000
OPEN_SHARDS = 4
LOCAL = "file:"  # the storage's URL where there is no server

Epochs = Iterator[Iterator[int]]
"""Of each epoch, the number of images of each batch."""


class Found(NamedTuple):
    """What a program has measured."""

    first_batch: float
    rates: list[float]
    """Images a second of each epoch, from its second batch on."""
    requests: list[int]
    bytes: list[int]
    """Of each epoch."""


def accel_train(name: str, order: str, root: str, cache: Path, storage: SlowStorage | None) -> Epochs:
    """Our input; `storage`: where data in a folder is."""
    data: Any = {"name": name, "order": order, "open_shards": OPEN_SHARDS, "canonical_nodes": 1, "workers": WORKERS}
    data |= {"root": Url(root), "stage": cache} if "://" in root else {"root": Path(root)}
    augment = Augment(crop="resized", flip=0.5)
    config = Config(batch_size=BATCH, epochs=EPOCHS, data=Data(**data), augment=augment, model=Model(image_size=SIZE))
    accelerator = create_accelerator(LAUNCH)
    splits = load_splits(config.data, 0)
    if storage is not None:
        slowed(splits.train, storage)
    plan = create_plan(config, len(splits.train), 1, 1, 1)
    made = create_input(config, accelerator, splits, SIZE, torch.channels_last, plan)
    for epoch in range(EPOCHS):
        made["sampler"].seek(epoch)
        yield (int(batch["weights"].sum()) for batch in made["training"].batches)


def others_transform() -> Any:
    """The same crop and flip, to uint8, as torchvision does them."""
    from torchvision.transforms import v2

    crop = v2.RandomResizedCrop(SIZE, antialias=True)
    return v2.Compose([v2.PILToTensor(), crop, v2.RandomHorizontalFlip()])


def webdataset(root: str, cache: Path, storage: SlowStorage | None) -> Epochs:
    """WebDataset as its documentation has it, with a cache and a buffer of 1,000 samples."""
    wds: Any = importlib.import_module("webdataset")
    transform = others_transform()
    cache.mkdir()
    urls = sorted(json.loads((cache.parent / "shards.json").read_text()))
    pipeline = wds.WebDataset(
        [f"{root}/{name}" for name in urls], shardshuffle=len(urls), cache_dir=str(cache) if "://" in root else None
    )
    pipeline = pipeline.shuffle(1000).decode("pilrgb").to_tuple("jpg", "cls").map_tuple(transform, int).batched(BATCH)
    loader = wds.WebLoader(pipeline, batch_size=None, num_workers=WORKERS, persistent_workers=True)
    for _ in range(EPOCHS):
        yield (len(images) for images, _ in loader)


def streaming(root: str, cache: Path, storage: SlowStorage | None) -> Epochs:
    """MosaicML Streaming with its defaults."""
    import io

    from PIL import Image

    package: Any = importlib.import_module("streaming")
    download: Any = importlib.import_module("streaming.base.storage.download")
    transform = others_transform()

    class Photographs(package.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: int) -> Any:
            sample = super().__getitem__(at)
            return transform(Image.open(io.BytesIO(sample["jpg"])).convert("RGB")), sample["cls"]

    if storage is not None:  # the workers are forked, and so do it as well
        copy = download.LocalDownloader._download_file_impl

        def slowly(self: Any, remote: str, local: str, timeout: float) -> None:
            storage.request(Path(remote).stat().st_size)
            copy(self, remote, local, timeout)

        download.LocalDownloader._download_file_impl = slowly
    places = {"local": root} if storage is None else {"remote": root, "local": str(cache)}
    dataset = Photographs(**places, shuffle=True, batch_size=BATCH)
    loader: Any = torch.utils.data.DataLoader(dataset, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True)
    for _ in range(EPOCHS):
        yield (len(images) for images, _ in loader)


class Layout(NamedTuple):
    """A line of the table."""

    title: str
    make: Callable[[str, Path, SlowStorage | None], Epochs]
    folder: str
    served: bool
    """Whether a web server has it where the storage is slow."""


def ours(name: str, order: str) -> Callable[[str, Path, SlowStorage | None], Epochs]:
    return lambda root, cache, storage: accel_train(name, order, root, cache, storage)


LAYOUTS = (
    Layout("files in a folder", ours("folder", "full"), "files", False),
    Layout("tar files, `data.order full`", ours("wds", "full"), "shards", False),
    Layout("tar files, `data.order shards`", ours("wds", "shards"), "shards", False),
    Layout("shards by URL, copied first", ours("wds", "full"), "shards", True),
    Layout("WebDataset", webdataset, "shards", True),
    Layout("MosaicML Streaming", streaming, "mosaic", False),
)
STAGED = 3  # the layout that is copied first; 1 is the same on this disk


def measure(layout: Layout, root: str, latency: float, seconds: float, work: Path, counted_outside: bool) -> Found:
    """Go through the epochs, in this process. `seconds`: of the model for a batch; `counted_outside`: the storage is
    slow by itself, and whoever started this process counts its requests."""
    cache = work / "cache"
    process = WorkerContext(WORKER_MODULE).Process(target=time.sleep, args=(0,))
    process.start()  # when it has ended, those that load images start at once
    process.join()
    storage = SlowStorage(work / "state", latency, BANDWIDTH) if latency and not counted_outside else None
    began = time.perf_counter()
    first_batch, rates, requests, sizes = 0.0, list[float](), [0], [0]
    for batches in layout.make(root, cache, storage):
        images, since = 0, 0.0
        for count in batches:
            now = time.perf_counter()
            first_batch = first_batch or now - began
            if since:
                images += count
            time.sleep(seconds)
            since = since or time.perf_counter()
        rates.append(images / (time.perf_counter() - since))
        counted = storage.counts() if storage is not None else (0, 0)
        if counted_outside:
            print("epoch", flush=True)
            counted = tuple(json.loads(sys.stdin.readline()))
        requests.append(counted[0])
        sizes.append(counted[1])
    of_epochs = [[after - before for before, after in itertools.pairwise(totals)] for totals in (requests, sizes)]
    return Found(first_batch, rates, *of_epochs)


def in_a_process(layout: Layout, data: Path, latency: float, options: argparse.Namespace, work: Path) -> Found:
    """Measure in a new process, with an empty cache."""
    sys.path.append(str(TESTS))
    storage_server: Any = importlib.import_module("storage_server")
    slow_mount: Any = importlib.import_module("slow_mount")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    (work / "shards.json").write_text(json.dumps([path.name for path in sorted((data / "shards").glob("*.tar"))]))
    with contextlib.ExitStack() as stack:
        root, counts = str(data / layout.folder), None
        if latency and options.mount:
            (work / "mount").mkdir()
            mount = slow_mount.SlowMount(data / layout.folder, work / "mount", latency=latency, bandwidth=BANDWIDTH)
            counts = stack.enter_context(mount).counts
            root = str(mount.place)
        elif latency and layout.served:
            server = stack.enter_context(
                storage_server.StorageServer(data / layout.folder, latency=latency, bandwidth=BANDWIDTH)
            )
            root, counts = server.url, lambda: (server.requests, server.bytes)
        words = ["--one", LAYOUTS.index(layout), root, latency, options.model, work, int(counts is not None)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), options.streaming])),
        }
        command = [sys.executable, "-W", "ignore", __file__, *map(str, words)]
        child = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        )
        assert child.stdin is not None and child.stdout is not None
        for line in child.stdout:
            if line == "epoch\n" and counts is not None:
                print(json.dumps(counts()), file=child.stdin, flush=True)
            elif line.startswith("found "):
                return Found(*json.loads(line.removeprefix("found ")))
    raise SystemExit(f"{layout.title}: the program has failed; see above.")


def prepare(photos: Path, images: int, data: Path) -> int:
    """Write the photographs in all layouts; return the bytes of the shards."""
    options = Data(name="folder" if photos.is_dir() else "tar", root=photos, train_limit=images)
    train = load_splits(options, 0).train
    held, ids = unwrap_subset(train)
    contents = [(held.read(int(id)), int(label)) for id, label in zip(ids, train.labels, strict=True)]  # type: ignore
    for number, (content, label) in enumerate(contents):
        path = data / "files" / str(label) / f"{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    write_shards(Data(name="folder", root=data / "files"), data / "shards", shard_size=f"{SHARD_BYTES}B", processes=1)
    load_splits(Data(name="folder", root=data / "files"), 0)  # makes its index
    with contextlib.suppress(ImportError):
        package: Any = importlib.import_module("streaming")
        columns = {"jpg": "bytes", "cls": "int"}
        with package.MDSWriter(out=str(data / "mosaic"), columns=columns, size_limit=SHARD_BYTES) as writer:
            for content, label in contents:
                writer.write({"jpg": content, "cls": label})
    return sum(path.stat().st_size for path in (data / "shards").glob("*.tar"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, required=True, help="a tar file or folder of JPEGs in class folders")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--model", type=float, default=0.4, help="seconds of the model for a batch of 64 images")
    parser.add_argument("--streaming", help="folder in which MosaicML Streaming is installed")
    parser.add_argument("--mount", action="store_true", help="read folders from a slow file system instead (FUSE)")
    parser.add_argument("--write", action="store_true", help="write the table into docs/benchmarks.md")
    options = parser.parse_args()
    if options.streaming:
        sys.path.append(options.streaming)
    found: dict[tuple[int, float], Found] = {}
    with tempfile.TemporaryDirectory() as place:
        data = Path(place) / "data"
        size = prepare(options.photos, options.images, data)
        layouts = [layout for layout in LAYOUTS if (data / layout.folder).exists()]
        layouts = layouts[:STAGED] if options.mount else layouts
        for latency in LATENCIES:
            for number, layout in enumerate(layouts):
                if latency or not (layout.served and layout.title.startswith("shards")):
                    print(f"{layout.title}, {1000 * latency:g} ms …", file=sys.stderr)
                    found[number, latency] = in_a_process(layout, data, latency, options, Path(place) / "work")
    found[STAGED, 0.0] = found[1, 0.0]  # by the same loader
    rows = [
        row(layouts[number].title, latency, each, found[number, 0.0], size)
        for (number, latency), each in sorted(found.items(), key=lambda item: (item[0][1], item[0][0]))
        if latency or number != STAGED
    ]
    head = [
        "requests take",
        "layout",
        "images/s",
        "of local",
        "first batch",
        "requests (2nd epoch)",
        "data",
        "images/s, 2nd epoch",
    ]
    print_table(head, rows)
    if options.write:
        document.PACKAGES = (*document.PACKAGES, "webdataset", "mosaicml-streaming")
        how = f"--images {options.images} --model {options.model:g}{' --mount' * options.mount}"
        known = document.circumstances(f"python benchmarks/storage.py --photos photos.tar {how}")
        part = "\n".join([*document.table(head, rows), "", document.caption(known)])
        document.write("storage-mount" if options.mount else "storage", part, {})
    return 0


def row(title: str, latency: float, each: Found, local: Found, size: int) -> list[str]:
    return [
        f"{1000 * latency:g} ms" if latency else "this disk", title, f"{each.rates[0]:.0f}",
        f"{each.rates[0] / local.rates[0]:.2f}", f"{each.first_batch:.2f} s",
        f"{each.requests[0]:,} ({each.requests[1]:,})" if latency else "",
        f"{each.bytes[0] / size:.2f}" if latency else "", f"{each.rates[1]:.0f}",
    ]  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        number, place, delay, model, folder, outside = sys.argv[2:]
        result = measure(LAYOUTS[int(number)], place, float(delay), float(model), Path(folder), outside == "1")
        print("found", json.dumps(result), flush=True)
    else:
        sys.exit(main())
