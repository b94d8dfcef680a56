"""URLs as values of options that are paths: data on a storage, s3://bucket/prefix."""

from __future__ import annotations

from pathlib import Path, PosixPath
from urllib.parse import urlsplit

from accel_train.errors import UserError


class Url(PosixPath):
    """A URL in the place of a path. As text it keeps its two slashes, which Path makes one; it is no file."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)


def is_url(path: Path) -> bool:
    return "://" in str(path)


def folder_of(url: Path) -> Path:
    """The folder of the files that a URL with braces names, s3://bucket/{train/{0..7},val/0}.tar; else the URL."""
    before, brace, _ = str(url).partition("{")
    return Url(before.rpartition("/")[0]) if brace else url


def url_of(text: str) -> Url:
    """The URL that a user has written. Raises UserError for a local file's, and if it may have something secret in it.

    The URL is kept in the run's files and said in its messages: what is secret in it would be, too.
    """
    scheme, _, rest = text.partition("://")
    secret = ""
    if "@" in urlsplit(text).netloc:
        secret = "a user name or password"
    elif "?" in rest or "#" in rest:
        secret = "a query, which may be a signature"
    if secret:
        raise UserError(
            f"{scheme}://…: the URL has {secret}, and would be kept in the run's files; leave it out, and give "
            "credentials where the storage's own client looks for them (~/.aws, ~/.netrc, `hf auth login`)."
        )
    if scheme.lower() == "file":
        raise UserError(f"{text}: a folder of this machine is given as a path: {rest.removeprefix('localhost')}.")
    return Url(f"{scheme.lower()}://{rest}")
