"""Copies of shards on this node: from a URL or a slow path into --data.stage, once a node and before the training.

    DIR/shards-1a2b3c4d/manifest.json               of the newest complete copy, for nodes without a network
    DIR/shards-1a2b3c4d/5e6f7a8b/train-000.tar      the folder is named after the manifest: names, sizes, versions
    DIR/shards-1a2b3c4d/5e6f7a8b/.val-000.tar.part  goes on after a kill

A file lock lets one process of a node copy at a time, whichever run it belongs to. fsspec and huggingface_hub do the
transport. The storage is not trusted: names stay in the folder, and a body ends at the size that was announced.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import io
import ipaddress
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import urljoin, urlsplit

from accelerate import Accelerator
from filelock import FileLock, Timeout
from rich.console import Console
from rich.filesize import decimal
from rich.progress import Progress

from accel_train.config.schema import Data
from accel_train.config.url import check_protocol, expanded, folder_of, is_url
from accel_train.data.sources.webdataset import LISTS, listed_shards
from accel_train.errors import LOGGER, UserError, counted, is_terminal, needing, reason_of, writing
from accel_train.files import atomic_write, fsync, open_to_write, read_json_object, sha256
from accel_train.launch.agreement import once_a_node
from accel_train.launch.environment import in_job
from accel_train.launch.process import is_first_process

SUFFIXES = {"wds": ".tar", "hfds/parquet": ".parquet"}
"""--data.name of what can be staged -> how the names of its files end."""
COPIES, QUESTIONS = 8, 64  # files that are copied, and small requests that are made, at a time
PART = 32 << 20  # bytes after which a copy is flushed to the disk: it goes on there after a kill
PIECE, BLOCK = 1 << 20, 8 << 20  # bytes that are written at a time; that are asked for at a time, but of web servers
SPARE = 1 << 30  # bytes of the disk that are left to others
STALL_SECONDS = 30.0  # without a byte from a web server, until it is asked again
PAUSES: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds between two tries: a minute in all, unless a PIECE comes."""
ABSENT = (401, 403, 404, 410)  # statuses
VERSIONS = ("ETag", "etag", "blob_id", "md5Hash", "LastModified", "Last-Modified", "mtime")  # of fsspec's file systems
MANIFEST, SUMS = "manifest.json", "SHA256SUMS"  # `accel-train shards` writes the second
JOB_FOLDERS = ("SLURM_TMPDIR", "NODE_TMPDIR", "TMPDIR")  # a job's own folder on the disk of its node
T = TypeVar("T")
_staged: dict[tuple[object, ...], Path] = {}  # the complete copies that this process has seen


class AbsentError(UserError):
    """There is no such file, or this user may not read it."""


@dataclass(frozen=True)
class File:
    """A file on the storage: its name in the folder, its bytes, a text that is another one for another content, and
    the SHA-256 ("": not known). Raises UserError for a name that leads out of the folder."""

    name: str
    size: int
    version: str = ""
    sha256: str = ""

    def __post_init__(self) -> None:
        if {"", ".", ".."} & {*self.name.split("/")} or not {*"\\\0"}.isdisjoint(self.name):
            raise UserError(f"the storage names a file {self.name!r}, which would not be in the folder of the copy.")


Manifest = tuple[File, ...]
"""All files of a copy."""


def digest_of(manifest: Manifest) -> str:
    """Another text for other files: the name of their folder."""
    return hashlib.sha256(json.dumps([asdict(file) for file in manifest]).encode()).hexdigest()[:12]


def missing(manifest: Manifest, folder: Path) -> list[File]:
    """The files that the folder lacks."""
    return [file for file in manifest if _bytes_in(folder / file.name) != file.size]


def _bytes_in(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0


class Storage:
    """The files that a URL or a slow path names. Its methods raise UserError."""

    def __init__(self, root: Path, kind: str) -> None:
        """`kind`: as in SUFFIXES."""
        self.kind, self.suffix = kind, SUFFIXES[kind]
        self.scheme = check_protocol(root) if is_url(root) else "file"
        text = str(root) if is_url(root) else str(root.absolute())
        self.folder = str(folder_of(root)) if is_url(root) else text
        if self.folder == text and text.lower().endswith(self.suffix) and not root.is_dir():
            self.folder = text.rpartition("/")[0]
        is_folder = self.folder == text
        self.names = () if is_folder else expanded(text.removeprefix(f"{self.folder}/"), self.suffix)
        """Those that are named; (): those in the folder."""
        self.is_web = self.scheme in ("http", "https")
        self.pauses = PAUSES
        self.stopping, self.copied = threading.Event(), dict[str, int]()  # bytes of each file that are here
        packages = "pip install 'accel-train[remote]', and gcsfs for gs://, huggingface_hub for hf://"
        with needing(f"{self.folder}: {self.scheme}:// needs a package that is not installed: {packages}."):
            import fsspec

            options = self._web_options() if self.is_web else {}
            self.client: Any = fsspec.filesystem(self.scheme, **options, skip_instance_cache=True)

    def _web_options(self) -> dict[str, Any]:
        import aiohttp

        redirects = aiohttp.TraceConfig()
        redirects.on_request_redirect.append(_check_redirect)
        timeout = aiohttp.ClientTimeout(sock_connect=STALL_SECONDS, sock_read=STALL_SECONDS)
        own = {"timeout": timeout, "trace_configs": [redirects], "headers": {"Accept-Encoding": "identity"}}
        # trust_env: ~/.netrc and the proxies of the environment. What is compressed could unpack to any size.
        return {"client_kwargs": {**own, "trust_env": True, "auto_decompress": False}}

    def manifest(self) -> Manifest:
        """What is there now."""
        if names := self.names or self._listed():
            with ThreadPoolExecutor(QUESTIONS) as pool:
                files = [*pool.map(self.look_at, names)]
        else:
            files = self._patiently(self.folder, self._found)
        if not files:
            raise UserError(f"--data.root {self.folder}: there is no file *{self.suffix} (or no such folder).")
        sums = {name: digest for digest, name in re.findall(r"^(\w{64}) [ *](.+)$", self._text(SUMS), re.M)}
        return tuple(replace(file, sha256=file.sha256 or sums.get(file.name, "")) for file in files)

    def _listed(self) -> tuple[str, ...]:
        """The list beside the shards, and those that it names; () if a bucket has none."""
        for name in LISTS if self.kind == "wds" else ():
            if text := self._text(name):
                shards = chain(*listed_shards(Path(name), text.encode())[0].values())
                return tuple(dict.fromkeys((name, *shards)))
        if self.is_web:
            raise UserError(
                f"--data.root {self.folder}: a web server does not list its files, and there is no {LISTS[0]} that "
                f"does: name them, {self.folder}/train-{{0000..0127}}{self.suffix}."
            )
        return ()

    def _text(self, name: str) -> str:
        """The content of a small file, which is smaller than a PART; "" if there is none."""
        content, url = io.BytesIO(), f"{self.folder}/{name}"
        with contextlib.suppress(AbsentError):
            if (file := self.look_at(name)).size >= PART:
                raise UserError(f"{url} has {file.size:,} bytes, more than such a file can have.")
            self._patiently(url, lambda: self._read(file, content), content.tell)
        return content.getvalue().decode(errors="replace")

    def _found(self) -> list[File]:
        path = self.client._strip_protocol(self.folder).rstrip("/")
        found = self.client.find(path, detail=True)
        files = [_file(place.removeprefix(f"{path}/"), about) for place, about in sorted(found.items())]
        return [each for each in files if each.name.lower().endswith(self.suffix) and "/." not in f"/{each.name}"]

    def look_at(self, name: str) -> File:
        """The file as it is now."""
        url = f"{self.folder}/{name}"
        return self._patiently(url, lambda: _file(name, self.client.info(url)))

    def copy(self, file: File, target: Path) -> None:
        """Write the file, which gets its name when all of it is there and verified. Raises OSError, too."""
        part, url = _part_of(target), f"{self.folder}/{file.name}"
        target.parent.mkdir(parents=True, exist_ok=True)
        open_to_write(part, "ab").close()
        with open_to_write(part, "r+b") as copy:
            copy.seek(max(0, min(copy.seek(0, os.SEEK_END), file.size) - 1) // PART * PART)
            self._patiently(url, lambda: self._read(file, copy), copy.tell)
            copy.truncate()
        fsync(part)
        if not (sha256(part) == file.sha256 if file.sha256 else self.look_at(file.name) == file):
            part.unlink()
            raise UserError(
                f"{url} is not the file that it was when it was looked at first ({file.size:,} bytes, "
                f"{file.sha256 or file.version or 'no ETag'}): start again when the data is complete."
            )
        settled = time.time() - 60  # no index is kept of files that may be changing
        os.utime(part, (settled, settled))
        part.replace(target)

    def _read(self, file: File, copy: IO[bytes]) -> None:
        """Append the rest of the file. Raises what the client raises; then the same call goes on."""
        start, url = copy.tell(), f"{self.folder}/{file.name}"
        stream = {"block_size": 0, "size": file.size, "headers": {"Range": f"bytes={start}-"}}
        with self.client.open(url, "rb", **(stream if self.is_web else {"block_size": BLOCK})) as source:
            if not self.is_web:
                source.seek(start)
            elif source.r.status != 206:  # a server without ranges sends all of it
                start = copy.seek(0)
            while piece := source.read(PIECE):
                if self.stopping.is_set():
                    raise UserError(f"{url}: the copying has ended.")
                if start + len(piece) > file.size:
                    raise UserError(f"{url} has sent more than the {file.size:,} bytes that were announced.")
                start += len(piece)
                with writing("--data.stage", Path(file.name), "a folder on a larger disk"):
                    copy.write(piece)
                    if start % PART < len(piece):
                        copy.flush()
                        os.fsync(copy.fileno())
                self.copied[file.name] = start
        if start < file.size:
            raise OSError(f"the answer ended after {start:,} of {file.size:,} bytes")

    def _patiently(self, url: str, ask: Callable[[], T], position: Callable[[], int] = lambda: 0) -> T:
        """What `ask` returns, asked again after an error that may pass. `position`: how far it has come."""
        failures = 0
        while True:
            before = position()
            try:
                return ask()
            except Exception as error:
                # fsspec says of all that a web server does not say in the answer to a HEAD that there is no such file.
                cause = (isinstance(error, FileNotFoundError) and self.is_web and error.__cause__) or error
                if isinstance(cause, UserError):
                    raise cause from error
                absent = isinstance(cause, FileNotFoundError | PermissionError) or getattr(cause, "status", 0) in ABSENT
                failures = 1 if position() >= before + PIECE else failures + 1
                if absent or failures > len(self.pauses):
                    reason = "there is no such file, or it is not yours to read" if absent else reason_of(cause, 200)
                    kind = AbsentError if absent else UserError
                    raise kind(f"{url} cannot be read ({reason}).") from error
                self.stopping.wait(self.pauses[failures - 1])


def _file(name: str, about: Mapping[str, Any]) -> File:
    """From what fsspec's file systems say of a file, each with its own words."""
    if about.get("size") is None:
        raise OSError("the server does not say its size")
    lfs = about.get("lfs") or {}
    digest = lfs.get("sha256") if isinstance(lfs, Mapping) else getattr(lfs, "sha256", None)
    version = next((about[key] for key in VERSIONS if about.get(key)), "")
    return File(name, int(about["size"]), str(version).strip('"'), digest or "")


def _part_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")


async def _check_redirect(_session: Any, _context: Any, step: Any) -> None:
    """Raise UserError if a server leads elsewhere to an address that is not public: any service of this network."""
    target = urlsplit(urljoin(str(step.url), step.response.headers.get("Location", "")))
    with contextlib.suppress(OSError):  # a name that only a proxy knows
        found = await asyncio.get_running_loop().getaddrinfo(target.hostname or "", None)
        public = all(ipaddress.ip_address(str(place[0]).partition("%")[0]).is_global for *_, place in found)
        if not public and target.netloc != step.url.authority:
            where = f"{step.url} leads to {target.netloc}, which is an address of this network"
            raise UserError(f"{where}: give its own URL if you mean it.")


def folder_for(data: Data) -> Path:
    """The folder of all copies of this data on this node. Raises UserError if the data cannot be copied, or has to have
    --data.stage."""
    if data.name not in SUFFIXES:
        raise UserError(
            f"--data.root {data.root}: only --data.name {', '.join(SUFFIXES)} are copied to the node "
            f"(--data.stage), found {data.name}: write the images as shards first (accel-train shards)."
        )
    url = str(data.root if is_url(data.root) else data.root.absolute())
    key = hashlib.sha256(f"{data.name} {url}".encode(errors="surrogateescape")).hexdigest()[:8]
    name = re.sub(r"[^\w.-]+", "-", url.rpartition("://")[2])[-40:].lstrip("-.") + f"-{key}"
    if data.stage is not None:
        return data.stage.absolute() / name
    home, job = Path("~").expanduser(), [os.environ[name] for name in JOB_FOLDERS if in_job() and os.environ.get(name)]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "accel_train" / "staged"
    if job:
        folder = Path(job[0]) / f"accel_train-{os.getuid()}"
    if in_job() and folder.resolve().is_relative_to(home.resolve()):
        raise UserError(
            f"--data.stage: this job has no local directory ({', '.join(JOB_FOLDERS)}), and {folder} is in your home: "
            "name a folder on a disk of the node, or one that check-data --data.stage has filled."
        )
    with writing("--data.stage", folder, "a folder on a disk of this node"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
            raise PermissionError(errno.EPERM, "others can write in it")
    return folder / name


def kept(folder: Path) -> Manifest:
    """The files of the newest complete copy; () if there is none."""
    with contextlib.suppress(KeyError, TypeError, UserError):  # of another version, or damaged
        manifest = tuple(File(**each) for each in read_json_object(folder / MANIFEST)["files"])
        return () if missing(manifest, folder / digest_of(manifest)) else manifest
    return ()


def staged(data: Data, *, download: bool = True) -> Path:
    """The folder with this node's copy of the data's files, which is made if it is not there. Raises UserError, also if
    `download` is False and there is none."""
    key = data.root, data.stage, data.name
    if key not in _staged:
        _staged[key] = folder_for(data) / stage(data, download=download)
    return _staged[key]


def stage_on_all_nodes(data: Data, accelerator: Accelerator, stopped: Callable[[], str]) -> None:
    """Let one process of each node stage the data while the others wait, and compare what they have. `stopped`: returns
    why this process is to end, or "". Raises UserError."""
    digest = once_a_node(accelerator, "staging the data", partial(stage, data), stopped)
    _staged[data.root, data.stage, data.name] = folder_for(data) / digest


def stage(data: Data, tick: Callable[[str], None] = lambda digest: None, *, download: bool = True) -> str:
    """Copy what this node lacks; return the digest of the manifest. `tick` is called with it each second."""
    folder = folder_for(data)
    before = kept(folder)
    if not download:
        if not before:
            raise UserError(
                f"{data.root} is not copied to {folder} yet; a training does that, or accel-train check-data."
            )
        return digest_of(before)
    try:
        storage = Storage(data.root, data.name)
        # The clients of buckets and of the hub try again themselves, and know at once if there are no credentials.
        storage.pauses = PAUSES if storage.is_web and not before else ()
        manifest, storage.pauses = storage.manifest(), PAUSES
    except UserError as error:
        if not before:
            raise
        if is_first_process():
            LOGGER.info(f"{error} So the copy in {folder} is used, which is complete.")
        manifest = before
    digest = digest_of(manifest)
    with writing("--data.stage", folder, "a folder on a disk of this node"):
        (folder / digest).mkdir(parents=True, exist_ok=True)
        is_complete = manifest == before
        while not is_complete:
            tick(digest)
            with contextlib.suppress(Timeout), FileLock(folder / ".lock", timeout=1.0):
                if absent := missing(manifest, folder / digest):  # else another run has copied them meanwhile
                    _fill(folder / digest, storage, absent, lambda: tick(digest))
                atomic_write(folder / MANIFEST, json.dumps({"files": [asdict(file) for file in manifest]}))
                is_complete = True
    return digest


def _fill(folder: Path, storage: Storage, absent: list[File], tick: Callable[[], None]) -> None:
    """Copy these files, several at a time. Raises UserError and OSError."""
    total, free = sum(file.size for file in absent), shutil.disk_usage(folder).free
    rest = total - sum(_bytes_in(_part_of(folder / file.name)) for file in absent)
    if rest + SPARE > free:
        raise UserError(
            f"--data.stage: {folder} has {decimal(free)} free, and {storage.folder} needs {decimal(rest)}: name a "
            "folder on a larger disk, or keep the shards on the cluster's file system (docs/large_data.md)."
        )
    if is_first_process():
        LOGGER.info(f"{storage.folder}: copying {counted(len(absent), 'file')} ({decimal(total)}) to {folder}.")
    shows = is_first_process() and is_terminal(sys.stderr)
    with Progress(console=Console(stderr=True), disable=not shows) as bar, ThreadPoolExecutor(COPIES) as pool:
        task = bar.add_task("staging", total=total)
        waiting: set[Future[None]] = {pool.submit(storage.copy, file, folder / file.name) for file in absent}
        try:
            while waiting:
                done, waiting = wait(waiting, 1.0, FIRST_EXCEPTION)
                for each in done:
                    each.result()
                bar.update(task, completed=sum(storage.copied.values()))
                tick()
        except BaseException:
            storage.stopping.set()
            pool.shutdown(cancel_futures=True)
            raise
