"""Why an image cannot be read: what its first and its last bytes say."""

from __future__ import annotations

import io
import re
import warnings

from accel_train.errors import UserError

KINDS = {
    "missing": "missing",
    "closed": "cannot be opened",
    "empty": "empty",
    "truncated": "truncated",
    "format": "in a format that is not read here",
    "no image": "not an image",
    "refused": "whole, but not usable as they are",
    "damaged": "damaged",
    "data set": "not given by the data set",
}
"""Kind -> "3 images are …"."""

BRANDS = {
    **dict.fromkeys((b"avif", b"avis"), ("AVIF", "pillow 11.3 or newer, or pillow-avif-plugin")),
    **dict.fromkeys((b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"), ("HEIC", "pillow-heif")),
}
"""The brand of an ISO media file -> the format, and the package that reads it."""
JPEG_XL = (b"\xff\x0a", b"\x00\x00\x00\x0cJXL \r\n\x87\n")
NO_IMAGES = (
    (re.compile(rb"\s*(<!doctype html|<html|<head)", re.IGNORECASE), "a web page: the download has failed"),
    (re.compile(rb"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)?<svg", re.IGNORECASE | re.DOTALL), "an SVG drawing"),
    (re.compile(rb"%PDF-"), "a PDF"),
    (re.compile(rb"PK\x03\x04"), "a ZIP archive"),
    (re.compile(rb"\x1f\x8b"), "a gzip file"),
    (re.compile(rb"version https://git-lfs"), "a pointer of Git LFS: fetch the file with git lfs pull"),
)
"""The first bytes of files that are no images, and what they are."""
ENDS = ((b"\xff\xd8", b"\xff\xd9"), (b"\x89PNG", b"IEND"), (b"GIF8", b";"))
"""The first bytes of a format, and what stands near the end of a whole file."""
NEAR = 1 << 16  # bytes: cameras and editors append some


def kind_of(error: UserError, data: bytes | None) -> tuple[str, str, str]:
    """Return the kind (of KINDS) of an image that has raised `error`, why it cannot be read, and the package that
    reads it, or "". `data`: the bytes of the file; None: they cannot be read, or it is no file."""
    cause = error.__cause__
    why = str(cause or error)
    if data is None:
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if isinstance(cause, FileNotFoundError):
            return "missing", why, ""
        return ("data set" if cause is None else "closed"), why, ""
    if not data:
        return "empty", why, ""
    opens, decodes = _tries(data)
    if decodes:
        return "refused", why, ""
    if (known := format_of(data)) is not None and not opens:
        return "format", f"it is {known[0]}", known[1]
    if is_truncated(data):
        return "truncated", why if opens else "it ends before its header does", ""
    if opens:
        return "damaged", why, ""
    what = next((what for start, what in NO_IMAGES if start.match(data[:1024])), "")
    return "no image", f"it is {what}" if what else why, ""


def format_of(data: bytes) -> tuple[str, str] | None:
    """The format of an image that Pillow may not read, and the package that reads it."""
    if data.startswith(JPEG_XL):
        return "JPEG XL", "pillow-jxl-plugin"
    if data[4:8] != b"ftyp":
        return None
    size = int.from_bytes(data[:4], "big")
    brands = [data[8:12], *(data[at : at + 4] for at in range(16, min(size, 256), 4))]
    found = [BRANDS[brand] for brand in brands if brand in BRANDS]
    return next((each for each in found if each[0] == "AVIF"), found[0] if found else None)  # AVIF may be mif1, too


def is_truncated(data: bytes) -> bool:
    """Whether the end of the file is missing."""
    for start, end in ENDS:
        if data.startswith(start):
            return end not in data[max(len(start), len(data) - NEAR) :]
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return int.from_bytes(data[4:8], "little") + 8 > len(data)
    if data[:2] == b"BM":
        return int.from_bytes(data[2:6], "little") > len(data)
    return False


def _tries(data: bytes) -> tuple[bool, bool]:
    """Whether Pillow opens the image, and whether it decodes it. A huge one is not decoded: it was refused."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = Image.open(io.BytesIO(data))
        except Exception:  # its readers raise nearly anything
            return False, False
        if image.format == "EPS" or image.width * image.height > 1 << 27:
            return True, True
        try:
            image.load()
        except Exception:
            return True, False
    return True, True
