"""URLs as values of options that are paths: data on a storage, s3://bucket/prefix."""

from __future__ import annotations

import itertools
import re
from pathlib import Path, PosixPath
from urllib.parse import urlsplit

from accel_train.errors import UserError, first_of

PROTOCOLS = ("http", "https", "s3", "gs", "hf")
MOST_SHARDS = 1_000_000


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


def check_protocol(url: Path) -> str:
    """Return the protocol of data that is copied to the node. Raises UserError for those of fsspec that may run code,
    or read other places than this one."""
    scheme = str(url).partition("://")[0]
    if scheme not in PROTOCOLS or "::" in str(url):
        raise UserError(f"--data.root {url}: expected a URL of {', '.join(PROTOCOLS)}, without '::'.")
    return scheme


def expanded(pattern: str, suffix: str) -> tuple[str, ...]:
    """The names that "train-{000..127}.tar" or "{train/{0..3},val/0}.tar" means, in the order of bash. Raises
    UserError."""
    names = _expanded(pattern)
    if wrong := [name for name in names if not name.lower().endswith(suffix)]:
        raise UserError(f"--data.root: {first_of(wrong, 1)} is no shard: their names end with {suffix}.")
    return tuple(dict.fromkeys(names))


def _expanded(pattern: str) -> list[str]:
    before, brace, rest = pattern.partition("{")
    depth, cuts = 1 if brace else 0, [-1]  # cuts: the commas of this brace, and its end
    for at, letter in enumerate(rest):
        depth += (letter == "{") - (letter == "}")
        if depth == 0 or (depth == 1 and letter == ","):
            cuts.append(at)
        if depth == 0:
            break
    if depth or "}" in before:
        raise UserError(f"--data.root: the braces of {pattern} do not belong together.")
    if not brace:
        return [pattern]
    inside, ends = rest[: cuts[-1]], _expanded(rest[cuts[-1] + 1 :])
    if (span := re.fullmatch(r"(\d+)\.\.(\d+)", inside)) is not None:
        first, last = int(span[1]), int(span[2])
        if not first <= last < first + MOST_SHARDS:
            raise UserError(f"--data.root: {{{inside}}} names no shards, or more than {MOST_SHARDS:,}.")
        words = [str(number).zfill(len(span[1])) for number in range(first, last + 1)]
    elif len(cuts) > 2:
        words = [word for start, end in itertools.pairwise(cuts) for word in _expanded(rest[start + 1 : end])]
    else:
        raise UserError(
            f"--data.root: {{{inside}}} is neither a range such as {{000..127}} nor a list such as {{a,b}}."
        )
    if len(words) * len(ends) > MOST_SHARDS:
        raise UserError(f"--data.root: {pattern} names more than {MOST_SHARDS:,} shards.")
    return [before + word + end for word in words for end in ends]
