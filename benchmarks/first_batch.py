"""Count the requests that follow one another until the first batch of shards on a storage: web server, S3, the hub.

    python benchmarks/first_batch.py                  # needs accel-train[remote], and moto[server] for S3
    python benchmarks/first_batch.py --log            # with each request: when it began and ended

Each request takes 2 seconds, so that what waits for what shows on any machine: requests at the same time count once.
Shards are tiny, with their index beside them. All requests go through a proxy that delays them and writes down when
each began and ended. "Sequential" is the largest number of them that followed one another, from the start of the
program to its first batch. "Later" is how much later that batch came than from the same shards on this disk, in such
requests.

* cold: the cache is empty. warm: it has all shards, in another process.
* `--orders full`: a batch has images of all shards, and 8 are fetched at a time, so that it waits for more of them.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).resolve().parent.parent / "tests"
LATENCY = 2.0
GOAL = 3
TRAIN, VALIDATION, PER_SHARD, BATCH = 20, 4, 16, 8
STORAGES = ("disk", "http", "http-braces", "s3", "hub")


class Request(NamedTuple):
    """A request, and when it began and ended, as time.time()."""

    what: str
    began: float
    ended: float


class DelayingProxy(ThreadingHTTPServer):
    """Passes each request on to the server on another port, `latency` seconds later."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int, latency: float) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.target, self.latency = port, latency
        self.requests: list[Request] = []
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: DelayingProxy

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""

    def do_GET(self) -> None:
        began = time.time()
        time.sleep(self.server.latency)
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        there = http.client.HTTPConnection("127.0.0.1", self.server.target)
        there.request(self.command, self.path, sent or None, dict(self.headers))
        answer = there.getresponse()
        body = answer.read()
        self.server.requests.append(Request(f"{self.command} {self.path}"[:100], began, time.time()))
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(body))
        if length is not None:
            self.send_header("Content-Length", length)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)
        there.close()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.do_GET()


def sequential(requests: list[Request], until: float) -> int:
    """The largest number of requests that followed one another and ended before `until`."""
    count, free = 0, 0.0
    for each in sorted(requests, key=lambda each: each.ended):
        if each.began >= free and each.ended <= until:
            count, free = count + 1, each.ended
    return count


def first_batch(root: str, order: str, cache: Path) -> tuple[float, float]:
    """When the input of a training was asked for, and when its first batch was there, as time.time()."""
    from accel_train.launch.environment import prepare_environment

    launch = prepare_environment()
    import torch

    from accel_train.config.schema import Augment, Config, Data, Model
    from accel_train.config.url import Url
    from accel_train.data.loading import create_input
    from accel_train.data.order.plan import create_plan
    from accel_train.data.sources.load import load_splits
    from accel_train.data.worker_processes import WORKERS, WorkerContext
    from accel_train.launch.accelerator import create_accelerator

    process = WorkerContext(WORKERS).Process(target=time.sleep, args=(0,))
    process.start()  # when it has ended, those that load images start at once
    process.join()
    for package in ("aiohttp", "fsspec", "s3fs", "aiobotocore.session", "huggingface_hub", "filelock"):
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    where: Any = Url(root) if "://" in root else Path(root)
    data: Any = {"name": "wds", "root": where, "cache_dir": cache, "order": order, "workers": 2}
    data |= {"open_shards": 4, "canonical_nodes": 1}
    config = Config(batch_size=BATCH, data=Data(**data), augment=Augment(flip=0.5), model=Model(image_size=12))
    accelerator = create_accelerator(launch)
    began = time.time()
    splits = load_splits(config.data, 0)
    plan = create_plan(config, len(splits.train), 1, 1, 1)
    made = create_input(config, accelerator, splits, 12, torch.channels_last, plan)
    made["sampler"].seek(0)
    next(iter(made["training"].batches))
    return began, time.time()


@contextlib.contextmanager
def served(storage: str, folder: Path) -> Iterator[tuple[str, int, dict[str, str]]]:
    """Serve the folder; yield the URL of the shards with {} for the proxy's address, the server's port, and what the
    environment must have."""
    sys.path.append(str(TESTS))
    if storage == "s3":
        port = importlib.import_module("helpers").free_port()
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        moto = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            s3fs: Any = importlib.import_module("s3fs")
            os.environ.update(keys)
            retries = {"retries": {"max_attempts": 20}}
            client = s3fs.S3FileSystem(endpoint_url=f"http://127.0.0.1:{port}", config_kwargs=retries)
            client.mkdir("bucket")
            client.put(str(folder), "bucket/data", recursive=True)
            yield "s3://bucket/data", int(port), keys | {"AWS_ENDPOINT_URL": "{}"}
        finally:
            moto.kill()
            moto.wait()
    elif storage == "hub":
        sys.path.append(str(TESTS / "data" / "sources" / "remote"))
        hub = importlib.import_module("test_hf").Hub(folder)
        threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield "hf://datasets/somebody/shards", hub.server_address[1], {"HF_ENDPOINT": "{}", "HF_HUB_DISABLE_XET": "1"}
        hub.shutdown()
    else:
        with importlib.import_module("storage_server").StorageServer(folder) as server:
            braces = f"/{{train-{{000..{TRAIN - 1:03}}},val-{{000..{VALIDATION - 1:03}}}}}.tar"
            yield "{}" + braces * (storage == "http-braces"), server.server_address[1], {}


class Found(NamedTuple):
    """What a start took."""

    seconds: float
    requests: list[Request]
    until: float


def start(root: str, order: str, cache: Path, environment: dict[str, str], proxy: DelayingProxy | None) -> Found:
    """Start a process that makes the first batch."""
    command = [sys.executable, "-W", "ignore", __file__, "--one", root, order, str(cache)]
    if proxy is not None:
        proxy.requests.clear()
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True)
    began, until = json.loads(done.stdout.splitlines()[-1])
    requests = sorted(proxy.requests if proxy is not None else [], key=lambda each: each.began)
    return Found(until - began, [each for each in requests if each.began < until], until)


def measure(storage: str, folder: Path, latency: float, order: str, work: Path) -> dict[str, Found]:
    """A cold and a warm start."""
    cache = work / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    if storage == "disk":
        return {"cold": start(str(folder), order, cache, {}, None)}
    found = {}
    with served(storage, folder) as (url, port, environment):
        proxy = DelayingProxy(port, latency)
        environment = {name: value.replace("{}", proxy.url) for name, value in environment.items()}
        root = url.replace("{}", proxy.url, 1) if url.startswith("{}") else url
        for name in ("cold", "warm"):
            found[name] = start(root, order, cache, environment, proxy)
            if name == "cold":  # the thread that fetches ahead ended with that program
                copies = {path.name.partition("-")[2] for path in cache.rglob("*.tar")}
                if len(copies) < TRAIN + VALIDATION:
                    subprocess.run(
                        [sys.executable, "-W", "ignore", __file__, "--fetch", root, str(cache)],
                        env=os.environ | environment, check=True,
                    )  # fmt: skip
        proxy.shutdown()
    return found


def fetch_all(root: str, cache: Path) -> None:
    """Copy all shards into the cache."""
    from concurrent.futures import ThreadPoolExecutor

    from accel_train.config.schema import Data
    from accel_train.config.url import Url
    from accel_train.data.sources.load import load_splits

    copies: Any = load_splits(Data(name="wds", root=Url(root), cache_dir=cache), 0).train
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(copies.cache.fetch, copies.cache.shards))


def rows_of(storages: Sequence[str], orders: Sequence[str], latency: float, *, log: bool = False) -> list[list[str]]:
    """Measure; return the rows of the table."""
    sys.path.append(str(TESTS))
    from accel_train.config.schema import Data
    from accel_train.data.tools.index import make_index

    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "shards"
        importlib.import_module("shard_files").write_shards(folder, train=TRAIN, val=VALIDATION, per_shard=PER_SHARD)
        for path in [folder, *folder.iterdir()]:
            os.utime(path, (time.time() - 60,) * 2)
        make_index(Data(name="wds", root=folder))
        for order in orders:
            local = measure("disk", folder, 0.0, order, Path(place))["cold"]
            for storage in storages:
                for name, found in measure(storage, folder, latency, order, Path(place)).items():
                    later = (found.seconds - local.seconds) / latency
                    rows.append([
                        storage, order, name, str(sequential(found.requests, found.until)),
                        f"{len(found.requests)}", f"{later:.1f}", f"{found.seconds:.1f} s", f"{local.seconds:.1f} s",
                    ])  # fmt: skip
                    for each in found.requests if log else ():
                        began, ended = (at - found.until + found.seconds for at in each[1:])
                        print(f"  {began:6.2f} {ended:6.2f} {each.what}")
                    print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    return rows


def goal(rows: Sequence[Sequence[str]]) -> tuple[str, bool]:
    """What is meant to be reached, and whether it is."""
    most = max(int(row[3]) for row in rows)
    text = f"{most} requests one after the other until the first batch (at most {GOAL})"
    return text, most <= GOAL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storages", nargs="+", choices=STORAGES[1:], default=STORAGES[1:])
    parser.add_argument("--orders", nargs="+", choices=("shards", "full"), default=("shards",))
    parser.add_argument("--latency", type=float, default=LATENCY, help="seconds of a request")
    parser.add_argument("--log", action="store_true", help="print each request")
    options = parser.parse_args()
    from accel_train.cli.table import print_table

    rows = rows_of(options.storages, options.orders, options.latency, log=options.log)
    print_table(["storage", "order", "start", "sequential", "requests", "later", "seconds", "from this disk"], rows)
    text, is_reached = goal(rows)
    print(f"{text}: {'yes' if is_reached else 'NO'}")
    return 0 if is_reached else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(first_batch(sys.argv[2], sys.argv[3], Path(sys.argv[4]))))
    elif sys.argv[1:2] == ["--fetch"]:
        fetch_all(sys.argv[2], Path(sys.argv[3]))
    else:
        sys.exit(main())
