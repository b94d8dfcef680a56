"""A real nginx on the loopback, with a configuration and a folder of its own.

with NginxServer(folder, place) as server:
    train(f"{server.url}/shards")
    server.requests()
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

from helpers import free_port

CONFIGURATION = """
daemon off; master_process off; pid {place}/pid; error_log {place}/error.log;
events {{ worker_connections 256; }}
http {{
    log_format short '$request_method $uri $status $body_bytes_sent $sent_http_content_encoding';
    access_log {place}/access.log short;
    client_body_temp_path {place}/body; proxy_temp_path {place}/proxy; fastcgi_temp_path {place}/fastcgi;
    uwsgi_temp_path {place}/uwsgi; scgi_temp_path {place}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location /shards/ {{ alias {folder}/; }}
        location /no-ranges/ {{ alias {folder}/; max_ranges 0; }}
        location /gzip/ {{ alias {folder}/; gzip on; gzip_types *; gzip_min_length 1; }}
    }}
}}
"""


def missing() -> str:
    """Why there is no nginx here; "" if there is one."""
    lacks = [name for name in ("nginx", "setpriv") if shutil.which(name) is None]
    return f"{' and '.join(lacks)} not installed" if lacks else ""


class NginxServer:
    """Serves a folder below three paths: /shards/, /no-ranges/ (which ignores Range), /gzip/ (which compresses)."""

    def __init__(self, folder: Path, place: Path) -> None:
        """`place`: a new folder for nginx's own files."""
        self.folder, self.place, self.port = folder, place, free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> NginxServer:
        self.place.mkdir()
        configuration = self.place / "nginx.conf"
        configuration.write_text(CONFIGURATION.format(place=self.place, folder=self.folder, port=self.port))
        # It ends with this process, even if that is killed.
        words = ["setpriv", "--pdeathsig", "KILL", "nginx", "-c", str(configuration), "-e", f"{self.place}/error.log"]
        self._process = subprocess.Popen(words)
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", int(self.port)), timeout=1).close()
                return self
            except OSError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.__exit__()
                    raise RuntimeError((self.place / "error.log").read_text()) from error
                time.sleep(0.02)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def requests(self) -> list[tuple[str, str, int, int, str]]:
        """Method, path, status, bytes of the body and encoding ("-": none) of each request until now."""
        lines = (self.place / "access.log").read_text().splitlines()
        words = [line.split() for line in lines]
        return [(method, path, int(status), int(size), encoding) for method, path, status, size, encoding in words]
