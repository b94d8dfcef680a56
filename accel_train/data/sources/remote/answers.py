"""Bytes of a file on a storage, and in the same answer which version of the file they are: no request of its own has to
ask before, or afterwards. Web servers and S3 say it with the bytes; fsspec's own calls keep it for themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VERSIONS = ("ETag", "etag", "blob_id", "md5Hash", "content_md5", "LastModified", "Last-Modified", "mtime")
"""What tells one content of a file from another, in the words of fsspec's file systems."""


def version_of(about: Mapping[str, Any]) -> str:
    """Another text for another content, from what a storage says of a file; "": it says nothing that would tell."""
    return str(next((about[key] for key in VERSIONS if about.get(key)), "")).strip('"')


def get(client: Any, scheme: str, url: str, start: int | None = None, end: int | None = None) -> tuple[bytes, str]:
    """The bytes from `start` to `end` (None: all), in one request, and `version_of` what the answer says; "" if this
    storage does not say it with the bytes. `client`: fsspec's file system. Raises what the client raises."""
    ask = {"http": _from_web_server, "https": _from_web_server, "s3": _from_bucket}.get(scheme)
    if ask is not None:
        from fsspec.asyn import sync

        wanted = {} if end is None else {"Range": f"bytes={start or 0}-{end - 1}"}
        content, version = sync(client.loop, ask, client, url, wanted)
        return content, version
    options = {} if end is None or getattr(client, "async_impl", False) else {"cache_type": "none"}
    return bytes(client.cat_file(url, start=start, end=end, **options)), ""


async def _from_web_server(client: Any, url: str, wanted: dict[str, str]) -> tuple[bytes, str]:
    session = await client.set_session()
    async with session.get(client.encode_url(url), headers=wanted) as answer:
        content = await answer.read()
        client._raise_not_found_for_status(answer, url)
        return content, version_of(answer.headers)


async def _from_bucket(client: Any, url: str, wanted: dict[str, str]) -> tuple[bytes, str]:
    bucket, key, _ = client.split_path(url)
    answer = await client._call_s3("get_object", Bucket=bucket, Key=key, **wanted)
    try:
        return await answer["Body"].read(), version_of(answer)
    finally:
        answer["Body"].close()
