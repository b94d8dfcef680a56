"""A folder on a storage: which shards it has, and their bytes, with patience. Only here is fsspec used.

What fails for a moment (a reset, a time-out, an error of the server, a body that ends early) is tried again, with
growing pauses; what fails for ever (no such file, no permission, another content than before) is not.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from accel_train.config.url import folder_of
from accel_train.data.sources.remote import answers
from accel_train.data.sources.remote.braces import expanded
from accel_train.errors import LOGGER, UserError, reason_of

PART = 32 << 20
"""Bytes of one request: what a reset makes to be sent again, and what is in memory."""
PART_SECONDS, STALL_SECONDS, CONNECT_SECONDS = 300.0, 30.0, 20.0
"""After which a request has failed: all of it, a pause in its body, and the time until it is connected."""
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds between two tries: about a minute in all, so that other processes do not wait for ever."""
PARALLEL = 64  # small requests at a time: each is a wait, and no work
PACKAGES = {"s3": "s3fs", "http": "aiohttp", "https": "aiohttp", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub"}
PASSING = (408, 425, 429)  # statuses below 500 of what may go well later

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """A file on the storage."""

    name: str
    """Relative to the folder; "" if the URL is that of one file."""
    size: int
    """In bytes."""
    version: str = ""
    """Another text for another content: the ETag, or the time of the last change; "": the storage says neither."""
    sha256: str = ""
    """Of its bytes, where the storage knows it (the hub); else ""."""

    @property
    def state(self) -> str:
        return f"{self.size} {self.version}"


class StorageError(UserError):
    """The storage does not give what a run needs, for now or for ever. Only the process that asked knows it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, every_process=False)


class Storage:
    """The folder, or the files, that a URL names."""

    def __init__(self, root: Path, suffix: str = ".tar") -> None:
        """`suffix`: of the shards' names. Nothing is asked yet. Raises UserError if the URL's braces are wrong."""
        text, self.suffix = str(root), suffix
        self.names: tuple[str, ...] | None = None
        """The files that the URL names; None: those that the storage lists."""
        self.folder = text
        if "{" in text:
            self.folder = str(folder_of(root))
            self.names = expanded(text.removeprefix(f"{self.folder}/"), suffix)
        elif text.lower().endswith(suffix):
            self.names = ("",)
        self.scheme = text.partition("://")[0].lower()
        self._client: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    def url(self, name: str) -> str:
        return f"{self.folder}/{name}" if name else self.folder

    @property
    def client(self) -> Any:
        """fsspec's file system. Raises UserError if a package is missing."""
        if self._client is None:
            try:
                import fsspec

                self._client = fsspec.url_to_fs(self.folder, **self._options())[0]
                if self.scheme == "s3":
                    self._client.retries = 1  # s3fs's own
            except ImportError as error:
                package = PACKAGES.get(self.scheme, "fsspec")
                raise UserError(
                    f"{self.folder}: {self.scheme}:// needs a package that is not installed ({reason_of(error)}): "
                    f"pip install 'accel-train[remote]'{f' {package}' * (package not in ('s3fs', 'aiohttp'))}."
                ) from error
            except ValueError as error:
                raise UserError(
                    f"{self.folder}: {self.scheme}:// is unknown to fsspec ({reason_of(error)})."
                ) from error
        return self._client

    def _options(self) -> dict[str, Any]:
        if self.scheme in ("http", "https"):
            import aiohttp

            limits = {"total": PART_SECONDS, "sock_connect": CONNECT_SECONDS, "sock_read": STALL_SECONDS}
            # trust_env: ~/.netrc and the proxies of the environment. A compressed body has another length.
            own = {"timeout": aiohttp.ClientTimeout(**limits), "trust_env": True}
            return {"client_kwargs": {**own, "headers": {"Accept-Encoding": "identity"}}, "use_listings_cache": False}
        if self.scheme == "s3":
            limits = {"connect_timeout": CONNECT_SECONDS, "read_timeout": STALL_SECONDS}
            # Only `_patiently` tries again. These would do so before each of its tries: many minutes in all.
            return {"config_kwargs": {**limits, "retries": {"max_attempts": 0}}, "use_listings_cache": False}
        return {}

    def shards(self, *, below: bool) -> list[Shard] | None:
        """The shards, in the order of their names; `below`: also those in folders inside the folder. None: this
        storage cannot be listed. Raises UserError."""
        if self.names is not None:
            return self.look_up(self.names)
        if self.scheme in ("http", "https"):
            return None
        path = self.client._strip_protocol(self.folder).rstrip("/")
        depth = None if below else 1
        found: dict[str, Any] = self._patiently(
            self.folder, lambda: self.client.find(path, maxdepth=depth, detail=True)
        )
        named = {place.removeprefix(f"{path}/"): about for place, about in found.items()}
        seen = sorted(name for name in named if not name.rpartition("/")[2].startswith("."))
        return [_shard(name, named[name]) for name in seen if name.endswith(self.suffix)]

    def look_up(self, names: Sequence[str]) -> list[Shard]:
        """These files, as they are now. Raises UserError if one is not there."""
        with ThreadPoolExecutor(PARALLEL, thread_name_prefix="storage") as pool:
            return list(pool.map(self.look_at, names))

    def look_at(self, name: str) -> Shard:
        """Raises StorageError."""
        return _shard(name, self._patiently(self.url(name), lambda: self._info(self.url(name))))

    def _info(self, url: str) -> Any:
        about = self.client.info(url)
        if about.get("size") is None:
            raise OSError("the server does not say its size")
        return about

    def read(self, name: str) -> tuple[bytes, str] | None:
        """All of a file that fits into memory, and its version ("": not said); None if there is none. Raises
        StorageError."""
        try:
            return self._patiently(self.url(name), lambda: answers.get(self.client, self.scheme, self.url(name)))
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError | PermissionError):  # 403: S3 without the right to list
                return None
            raise

    def download(self, shard: Shard, file: Path) -> None:
        """Write the shard into an existing file. Raises StorageError if it is not there, or has changed, also while it
        was read; OSError if the file cannot be written."""
        url, digest, versions = self.url(shard.name), hashlib.sha256(), set[str]()
        with file.open("r+b") as copy:
            start = 0
            while start < shard.size:
                part, version = self._patiently(url, lambda start=start: self._part(url, shard, start))  # type: ignore[misc]
                copy.write(part)
                versions.add(version)
                if shard.sha256:
                    digest.update(part)
                start += len(part)
        # Its checksum, or the version in every answer, says that these are the bytes. Else the storage is asked again.
        if not (digest.hexdigest() == shard.sha256 if shard.sha256 else versions == {shard.version} != {""}):
            self.check_unchanged(shard, versions, differs=bool(shard.sha256))

    def check_unchanged(self, shard: Shard, versions: Iterable[str] = (), *, differs: bool = False) -> None:
        """Raise StorageError if the shard is another one now, by what the storage says, or by the `versions` that came
        with its bytes, or because its checksum `differs`."""
        url, now = self.url(shard.name), self.look_at(shard.name)
        now = replace(now, version=next((each for each in versions if each not in ("", shard.version)), now.version))
        if now.state != shard.state or differs:
            raise StorageError(
                f"{url} is not the file any more that it was when the run looked at it first ({shard.size:,} bytes, "
                f"{shard.version or 'no ETag'}; now {now.size:,}, {now.version or 'no ETag'}): start again when the "
                "data is complete; the index is then made anew."
            )

    def sample(self, shard: Shard, most: int) -> int:
        """Read the first `most` bytes of a shard, and return how many came. Raises StorageError."""
        url, wanted = self.url(shard.name), min(most, shard.size)
        return len(self._patiently(url, lambda: answers.get(self.client, self.scheme, url, 0, wanted))[0])

    def _part(self, url: str, shard: Shard, start: int) -> tuple[bytes, str]:
        wanted = min(PART, shard.size - start)
        part, version = answers.get(self.client, self.scheme, url, start, start + wanted)
        if len(part) != wanted and not (len(part) == shard.size and start == 0):  # without ranges all of it comes
            raise OSError(f"{len(part):,} bytes came in place of {wanted:,}")
        return part, version

    def _patiently(self, url: str, ask: Callable[[], T]) -> T:
        """What `ask` returns, asked again after an error that may pass. Raises StorageError."""
        began = time.monotonic()
        for tries, pause in enumerate((*PAUSES, None), 1):
            try:
                return ask()
            except UserError:
                raise
            except Exception as error:
                if pause is None or _is_final(error):
                    after = f" after {tries} tries in {time.monotonic() - began:.0f} s" if tries > 1 else ""
                    raise StorageError(f"{url} cannot be read{after}: {_reason(error)}.") from error
                LOGGER.debug(f"{url}: {_reason(error)}; trying again in {pause:g} s")
                time.sleep(pause * random.uniform(0.75, 1.25))  # so that not all processes ask at the same time
        raise AssertionError


def _shard(name: str, about: dict[str, Any]) -> Shard:
    """From what fsspec's file systems say of a file, each with its own words."""
    lfs = about.get("lfs") or {}
    checksum = lfs.get("sha256", "") if isinstance(lfs, dict) else getattr(lfs, "sha256", "")
    return Shard(name, int(about["size"]), answers.version_of(about), checksum or "")


def _is_final(error: BaseException) -> bool:
    """Whether to ask again would be in vain."""
    status = _status(error)
    if status is not None:
        return 400 <= status < 500 and status not in PASSING
    if cause := _of_head(error):
        return _is_final(cause)
    return isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotImplementedError) or (
        type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "RepositoryNotFoundError")
    )


def _of_head(error: BaseException) -> BaseException | None:
    """Why a HEAD has failed: fsspec says of all failures that there is no such file."""
    if isinstance(error, FileNotFoundError) and type(error.__cause__).__module__.startswith(("aiohttp", "asyncio")):
        return error.__cause__
    return None


def _status(error: BaseException) -> int | None:
    """HTTP's, of what aiohttp (`status`) or the hub's client (`response`) has raised."""
    status = getattr(error, "status", getattr(getattr(error, "response", None), "status_code", None))
    return status if isinstance(status, int) else None


def _reason(error: BaseException) -> str:
    error = _of_head(error) or error
    status = _status(error)
    if status is not None:
        return f"the server answers {status} {reason_of(error, 60) if not hasattr(error, 'message') else error.message}"
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, TimeoutError):
        return f"time-out: nothing came for {STALL_SECONDS:.0f} s, or not all of it in {PART_SECONDS:.0f} s"
    return reason_of(error, 200)
