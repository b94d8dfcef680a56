"""A server that answers as Hugging Face's hub does where its client asks, for the data set somebody/shards."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

COMMIT = "0123456789" * 4


class Hub(ThreadingHTTPServer):
    """The data set somebody/shards, with the files of a folder."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.folder = folder
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def hub_of(folder: Path) -> Iterator[Hub]:
    """Runs until the block ends. A process asks it that has HF_ENDPOINT=hub.url in its environment."""
    server = Hub(folder)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""

    def about(self, path: Path) -> dict[str, Any]:
        name = path.relative_to(self.server.folder).as_posix()
        if path.is_dir():
            return {"type": "directory", "path": name, "size": 0, "oid": hashlib.sha256(name.encode()).hexdigest()[:40]}
        content = path.read_bytes()
        sha, size = hashlib.sha256(content).hexdigest(), len(content)
        lfs = {"oid": sha, "size": size, "pointerSize": 130}
        return {"type": "file", "path": name, "size": size, "oid": sha[:40], "lfs": lfs}

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        path = self.path.partition("?")[0]
        file = re.match(r"/datasets/somebody/shards/resolve/[^/]+/(.*)", path)
        tree = re.match(r"/api/datasets/somebody/shards/tree/[^/]+/?(.*)", path)
        if file is not None and (self.server.folder / file[1]).is_file():
            content = (self.server.folder / file[1]).read_bytes()
            first, last = re.findall(r"\d+", self.headers.get("Range", f"bytes=0-{len(content) - 1}"))
            self.answer(content[int(first) : int(last) + 1], 206)
        elif tree is not None and (self.server.folder / tree[1]).is_dir():
            below = (self.server.folder / tree[1]).rglob("*") if "recursive=true" in self.path.lower() else None
            files = sorted(below or (self.server.folder / tree[1]).iterdir())
            self.answer(json.dumps([self.about(each) for each in files]).encode())
        elif self.path.startswith("/api/datasets/somebody/shards"):
            self.answer(json.dumps({"id": "somebody/shards", "sha": COMMIT, "siblings": []}).encode())
        else:
            self.answer(b"{}", 404)

    def do_POST(self) -> None:
        self.server.asked.append(self.path)
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        found = [path for path in self.server.folder.rglob("*") if path.is_file() and path.name in asked]
        self.answer(json.dumps([self.about(path) for path in found]).encode())

    def answer(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(content)
