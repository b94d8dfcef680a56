"""A web server for shards on the loopback that counts what it sends, and fails or is slow as it is told.

    with StorageServer(folder) as server:
        train(f"{server.url}/train-{{000..003}}.tar")
        server.requests, server.bytes

It can be slow: `bandwidth` in bytes a second over all connections.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

BLOCK = 1 << 16


class StorageServer(ThreadingHTTPServer):
    """Serves the files of a folder, with ranges and ETags, on a port of its own until the block ends."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path, *, bandwidth: float | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.bandwidth = folder, bandwidth
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.log: list[tuple[str, str, int]] = []
        """(GET or HEAD, the path, the bytes that were sent of the body) of each request."""
        self.starts: dict[str, list[int]] = {}
        """By path: the first byte of each answer to a GET."""
        self.fault: Callable[[str, str, int], str | None] = lambda method, path, times: None
        """What goes wrong in a request, or None: "503" (a status), "reset", "truncated", "stalled", "endless" (a body
        without end), or the URL to which it leads. `times`: how many requests of this method and path there were
        before."""
        self.ranges = True
        """Whether it sends a part of a file if asked for one."""
        self._lock, self._free_at = threading.Lock(), 0.0
        self._times: dict[tuple[str, str], int] = {}

    def __enter__(self) -> StorageServer:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.shutdown()
        self.server_close()

    @property
    def requests(self) -> int:
        return len(self.log)

    @property
    def bytes(self) -> int:
        return sum(sent for _, _, sent in self.log)

    def reset(self) -> None:
        """Count from 0."""
        self.log.clear()
        self.starts.clear()
        self._times.clear()

    def count(self, method: str, path: str) -> int:
        """How many such requests there were before."""
        with self._lock:
            times = self._times.get((method, path), 0)
            self._times[method, path] = times + 1
        return times

    def wait_for_turn(self, size: int) -> None:
        """Sleep until `size` more bytes may be sent."""
        if self.bandwidth is not None:
            with self._lock:
                now = time.monotonic()
                self._free_at = max(now, self._free_at) + size / self.bandwidth
                wait = self._free_at - now
            time.sleep(wait)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StorageServer

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        server, path = self.server, self.path.partition("?")[0].lstrip("/")
        fault = server.fault(self.command, path, server.count(self.command, path))
        if fault is not None and fault.isdigit():
            return self._end(path, int(fault))
        if fault is not None and "://" in fault:
            return self._end(path, 302, Location=fault)
        if fault == "endless" and with_body:
            return self._send_without_end(path)
        try:
            content = (server.folder / path).read_bytes()
        except OSError:
            return self._end(path, 404)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if server.ranges else None
        first, last = 0, len(content) - 1
        if wanted is not None:
            first, last = int(wanted[1]), min(int(wanted[2] or last), last)
        body = content[first : last + 1]
        if with_body:
            server.starts.setdefault(path, []).append(first)
        self.send_response(200 if wanted is None else 206)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.md5(content).hexdigest()}"')
        if wanted is not None:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        if not with_body:
            server.log.append((self.command, path, 0))  # before the client hears of it, and counts
        self.end_headers()
        if with_body:
            self._send(path, body, fault)
        return None

    def _send(self, path: str, body: bytes, fault: str | None) -> None:
        if fault in ("reset", "truncated", "stalled"):
            body = body[: len(body) // 2]
        sent = 0
        with contextlib.suppress(OSError):  # the client has left
            for start in range(0, len(body), BLOCK):
                block = body[start : start + BLOCK]
                self.server.wait_for_turn(len(block))
                self.wfile.write(block)
                sent += len(block)
        self.server.log.append((self.command, path, sent))
        if fault == "stalled":
            time.sleep(5)
        if fault == "reset":  # with RST, not with FIN
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if fault in ("reset", "truncated", "stalled"):
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.close() if fault == "reset" else self.connection.shutdown(socket.SHUT_RDWR)

    def _send_without_end(self, path: str) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.server.log.append((self.command, path, 0))
        with contextlib.suppress(OSError):  # until the client leaves
            while True:
                self.wfile.write(b"%x\r\n%s\r\n" % (BLOCK, bytes(BLOCK)))

    def _end(self, path: str, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.server.log.append((self.command, path, 0))
        self.end_headers()
