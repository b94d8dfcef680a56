"""`accel-train export --push-to-hub` with a server that answers as the hub does: nothing reaches a network."""

from __future__ import annotations

import base64
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from accel_train import cli


class Hub(BaseHTTPRequestHandler):
    """A hub that keeps what is pushed to it."""

    files: dict[str, bytes]
    created: list[Any]
    writable: bool

    def do_GET(self) -> None:
        known = self.headers.get("Authorization") == "Bearer hf_secret"
        if self.path.startswith("/api/whoami"):
            self.answer(200 if known else 401, {"name": "me", "type": "user"})
        else:
            self.answer(404, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        address = f"http://127.0.0.1:{self.server.server_address[1]}/org/net"  # type: ignore[index]
        if self.path == "/api/repos/create":
            self.created.append(json.loads(body))
            self.answer(200 if self.writable else 403, {"url": address, "name": "org/net", "id": "1"})
        elif self.path == "/api/models/org/net/preupload/main":
            names = [file["path"] for file in json.loads(body)["files"]]
            self.answer(
                200, {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
            )
        elif self.path == "/api/models/org/net/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer(200, {"commitUrl": f"{address}/commit/1", "commitOid": "1" * 40, "success": True})
        else:
            self.answer(200, {})

    def answer(self, status: int, values: dict[str, Any]) -> None:
        content = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    Hub.files, Hub.created, Hub.writable = {}, [], True
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def hub(server: ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is the server. huggingface_hub has read its variables when it was imported, except for the token's."""
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")


@pytest.fixture
def run(digits_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(digits_run, tmp_path / "run"))


def pushed(run: Path) -> int:
    return cli.main(["export", str(run), "--format", "pt2", "--push-to-hub", "org/net"])


@pytest.mark.ci
def test_all_files_arrive(run: Path, server: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert pushed(run) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"pushed: http://127.0.0.1:{server.server_port}/org/net"
    assert [(repository["organization"], repository["name"]) for repository in Hub.created] == [("org", "net")]
    assert Hub.files == {path.name: path.read_bytes() for path in (run / "export-pt2").iterdir()}

    # Who may not write there has the export, and is told how to push it later.
    Hub.writable = False
    assert pushed(run) == 1
    assert (run / "export-pt2" / "model.pt2").is_file()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("accel-train: error: --push-to-hub: your token may not write there")
    assert f"hf upload org/net {run / 'export-pt2'}" in line


@pytest.mark.parametrize("token", ["", "hf_other"])
def test_a_stranger_is_refused(
    token: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    assert refused(run, capsys).startswith("the hub does not know who you are; log in with: hf auth login")


def test_without_a_network(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # refuses at once
    assert refused(run, capsys).startswith("the hub cannot be used (")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refused(run, capsys) == "the hub is not used, because HF_HUB_OFFLINE is set."


def refused(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a push is told that is refused before the work."""
    assert pushed(run) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert not (run / "export-pt2").exists()
    assert Hub.created == []
    before, told, reason = line.partition("accel-train: error: --push-to-hub: ")
    assert told and not before
    return reason
