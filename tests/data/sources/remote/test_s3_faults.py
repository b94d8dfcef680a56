"""S3 (moto's server) with faults on the way: a proxy between the client and the server has them."""

from __future__ import annotations

import http.client
import importlib
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("moto.server", reason="moto[server] is not installed")
pytest.importorskip("s3fs", reason="accel-train[remote] is not installed")

from helpers import free_port
from shard_files import size_of, write_shards

from accel_train.config.url import Url
from accel_train.data.sources.remote import storage
from accel_train.data.sources.remote.storage import Storage, StorageError

NAME, ROOT = "train-000.tar", "s3://bucket/some/data"
CODES = {"403": "AccessDenied", "404": "NoSuchKey", "429": "SlowDown", "500": "InternalError", "503": "SlowDown"}


class Proxy(ThreadingHTTPServer):
    """Passes requests on to S3, but for those for which `fault` says what goes wrong."""

    daemon_threads = True

    def __init__(self, port: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.port, self.requests = int(port), list[tuple[str, str]]()
        self.fault: Callable[[str, str, int], str | None] = lambda method, path, times: None
        """"503" (a status), "reset" or "truncated"; `times`: how many such requests there were before."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""

    def do_GET(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        key = self.command, self.path.partition("?")[0]
        fault = self.server.fault(*key, self.server.requests.count(key))
        self.server.requests.append(key)
        if fault is not None and fault.isdigit():
            text = f"<Error><Code>{CODES[fault]}</Code><Message>A fault.</Message></Error>"
            body = text.encode() if self.command != "HEAD" else b""
            return self._answer(int(fault), [("Content-Type", "application/xml")], body, len(body))
        there = http.client.HTTPConnection("127.0.0.1", self.server.port)
        there.request(self.command, self.path, sent, dict(self.headers))
        answer = there.getresponse()
        body = answer.read()
        size = int(answer.headers.get("Content-Length", len(body)))
        headers = [each for each in answer.getheaders() if each[0].lower() not in ("content-length", "connection")]
        there.close()
        self._answer(answer.status, headers, body if fault is None else body[: len(body) // 2], size)
        if fault is not None:
            self.close_connection = True
        if fault == "reset":
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        return None

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 -- http.server's names

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, size: int) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("data"), train=3)


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The port of an S3 server."""
    port = free_port()
    moto = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port], stderr=subprocess.DEVNULL
    )
    yield port
    moto.kill()
    moto.wait()


@pytest.fixture
def proxy(s3: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The bucket behind it has the folder."""
    s3fs: Any = importlib.import_module("s3fs")
    server = Proxy(s3)
    monkeypatch.setattr(storage, "PAUSES", (0.01, 0.02, 0.04))
    monkeypatch.setattr(storage, "PART", 10_000)
    for name, value in (("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3}")
    s3fs.S3FileSystem.clear_instance_cache()
    client = s3fs.S3FileSystem(config_kwargs={"retries": {"max_attempts": 20}})
    if not client.exists("bucket"):
        client.mkdir("bucket")
    for path in folder.iterdir():
        client.pipe_file(f"bucket/some/data/{path.name}", path.read_bytes())
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.ci
@pytest.mark.parametrize(
    "faults", [(), ("503",), ("500", "503"), ("reset",), ("truncated",), ("429", "truncated", "reset")], ids="-".join
)
def test_a_shard_comes_whole_whatever_fails_on_the_way(
    proxy: Proxy, folder: Path, tmp_path: Path, faults: tuple[str, ...]
) -> None:
    def fault(method: str, path: str, times: int) -> str | None:
        return faults[times] if method == "GET" and path.endswith(NAME) and times < len(faults) else None

    there, copy = Storage(Url(ROOT)), tmp_path / "copy"
    copy.touch()
    shard = there.look_at(NAME)
    proxy.fault = fault
    there.download(shard, copy)
    assert copy.read_bytes() == (folder / NAME).read_bytes()
    parts = -(-size_of(folder, NAME) // 10_000)
    assert proxy.requests.count(("GET", f"/bucket/some/data/{NAME}")) == parts + len(faults)


@pytest.mark.ci
@pytest.mark.parametrize("faults", [("503",), ("500", "500"), ("reset",), ("truncated",)], ids="-".join)
def test_the_bucket_is_listed_whatever_fails_on_the_way(proxy: Proxy, folder: Path, faults: tuple[str, ...]) -> None:
    proxy.fault = lambda method, path, times: faults[times] if method == "GET" and times < len(faults) else None
    shards = Storage(Url(ROOT)).shards(below=True)
    assert shards is not None
    assert [(shard.name, shard.size) for shard in shards] == [
        (path.name, path.stat().st_size) for path in sorted(folder.glob("*.tar"))
    ]


@pytest.mark.ci
@pytest.mark.parametrize(("status", "few"), [("503", False), ("403", True), ("404", True)])
def test_what_never_comes_is_one_line_with_the_url(proxy: Proxy, tmp_path: Path, status: str, few: bool) -> None:
    there, copy = Storage(Url(ROOT)), tmp_path / "copy"
    copy.touch()
    shard = there.look_at(NAME)
    proxy.requests.clear()
    proxy.fault = lambda method, path, times: status if path.endswith(NAME) else None
    with pytest.raises(StorageError) as error:
        there.download(shard, copy)
    assert f"{ROOT}/{NAME} cannot be read" in str(error.value) and "\n" not in str(error.value)
    asked = proxy.requests.count(("GET", f"/bucket/some/data/{NAME}"))
    assert asked == (1 if few else 4)  # s3fs and botocore would each try again, too, for minutes


def test_an_object_that_is_replaced_between_two_parts_is_refused(proxy: Proxy, folder: Path, tmp_path: Path) -> None:
    there, copy = Storage(Url(ROOT)), tmp_path / "copy"
    copy.touch()
    shard, replaced = there.look_at(NAME), [False]

    def fault(method: str, path: str, times: int) -> str | None:
        if method == "GET" and path.endswith(NAME) and times == 1 and not replaced[0]:
            replaced[0] = True
            s3fs: Any = importlib.import_module("s3fs")
            direct = s3fs.S3FileSystem(endpoint_url=f"http://127.0.0.1:{proxy.port}", skip_instance_cache=True)
            direct.pipe_file(f"bucket/some/data/{NAME}", bytes(shard.size))
        return None

    proxy.fault = fault
    with pytest.raises(StorageError, match=f"{ROOT}/{NAME} is not the file any more that it was"):
        there.download(shard, copy)
    assert replaced == [True]
