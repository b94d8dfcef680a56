"""The page of an audit: its findings with pictures, in one file that needs no network."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from accel_train.audit.audit import AuditResult, size_figures
from accel_train.audit.findings import Finding
from accel_train.data.transforms.resizing import resized_to_short_side
from accel_train.errors import UserError, writing
from accel_train.files import atomic_write
from accel_train.report.shared.images import data_uri
from accel_train.report.shared.render import check_library, render

GROUPS_SHOWN = 12  # of a finding
IMAGES_SHOWN = 6  # of a group
ROWS_SHOWN = 100  # of a table: audit.json has all
NAMED = 3  # of classes, in the title
SHORT_SIDE = 160  # pixels of a picture


def write_page(result: AuditResult) -> Path:
    """Write audit.html into the audit's folder; return its path. Raises UserError."""
    check_library()
    path = result.folder / "audit.html"
    with writing("--folder", path, "another folder"):
        atomic_write(path, page_of(result))
    return path


def page_of(result: AuditResult) -> str:
    """The page, as HTML."""
    images = result.images
    figures = size_figures(result.records)
    decide = sum(finding.decide for finding in result.findings) + len(result.mistakes)
    headline = [
        ("images", f"{len(images):,}"),
        ("classes", f"{len(images.classes):,}"),
        ("to decide", f"{decide:,}"),
        ("worth a look", f"{sum(not finding.decide for finding in result.findings):,}"),
    ]
    facts = [("data", f"{result.name} {result.root}")]
    for side in ("width", "height"):
        if side in figures:
            smallest, median, largest = figures[side]
            facts.append((side, f"{smallest:,} to {largest:,} pixels, median {median:,}"))
    if "values" in figures:
        facts.append(("values of the pixels", "{:g} to {:g}".format(*figures["values"])))
    if result.unreadable_list is not None:
        facts.append(("list of unreadable images", str(result.unreadable_list)))
    counts = [(name, [each[number] for each in images.counts.values()]) for number, name in enumerate(images.classes)]
    return render(
        "audit/audit.html",
        title=f"Audit of {images.root.resolve().name if result.unreadable_list else result.name}",
        headline=headline,
        mistakes=result.mistakes,
        notes=result.notes,
        facts=facts,
        findings=[_section(result, finding) for finding in result.findings],
        splits=list(images.counts),
        counts=counts,
    )


def _section(result: AuditResult, finding: Finding) -> dict[str, Any]:
    """What the template shows of a finding: groups of pictures, pictures, or a table."""
    singles = all(len(group) == 1 for group in finding.groups)
    section: dict[str, Any] = {"finding": finding, "pictures": [], "groups": [], "rows": [], "more": 0}
    if finding.notes:
        section["rows"] = [(result.images.name(id), finding.notes[id]) for (id,) in finding.groups[:ROWS_SHOWN]]
        section["more"] = len(finding.groups) - len(section["rows"])
    elif len(finding.names) > NAMED or finding.kind == "missing":
        section["rows"] = [(name, "") for name in finding.names[:ROWS_SHOWN]]
        section["more"] = len(finding.names) - len(section["rows"])
    elif singles and finding.groups:
        section["pictures"] = [_picture(result, id) for (id,) in finding.groups[: GROUPS_SHOWN * 2]]
        section["more"] = len(finding.groups) - len(section["pictures"])
    else:
        section["groups"] = [
            ([_picture(result, id) for id in group[:IMAGES_SHOWN]], max(0, len(group) - IMAGES_SHOWN))
            for group in finding.groups[:GROUPS_SHOWN]
        ]
        section["more"] = len(finding.groups) - len(section["groups"])
    return section


def _picture(result: AuditResult, id: int) -> dict[str, Any]:
    """What the template shows of an image. Its `uri` is "" if it cannot be read."""
    split, source, number = result.images.place(id)
    record = result.records[id]
    uri = ""
    with contextlib.suppress(UserError):  # it has been removed since
        uri = uri_of(torch.as_tensor(source.fetch([number])[0]))
    return {
        "name": result.images.name(id),
        "split": split,
        "label": result.images.label(id),
        "uri": uri,
        "size": f"{int(record['width'])}x{int(record['height'])}",
    }


def uri_of(pixels: torch.Tensor) -> str:
    """An image, uint8 or float32 [C, H, W], as a small picture in a data: URI."""
    if pixels.dtype != torch.uint8:  # a user's own images may have any range
        finite = pixels.float().nan_to_num(0.0, 0.0, 0.0)
        pixels = (255 * (finite - finite.min()) / (finite.max() - finite.min()).clamp(min=1e-12)).round()
        pixels = pixels.to(torch.uint8)
    pixels = pixels if len(pixels) in (1, 3) else pixels[:1]
    height, width = pixels.shape[1:]
    longest = 4 * SHORT_SIDE
    if max(height, width) > longest:  # a panorama
        scale = longest / max(height, width)
        size = max(1, round(height * scale)), max(1, round(width * scale))
        pixels = torch.nn.functional.interpolate(pixels[None], size, mode="bilinear", antialias=True)[0]
    if min(pixels.shape[1:]) > SHORT_SIDE:
        pixels = resized_to_short_side(pixels, SHORT_SIDE)
    return data_uri(pixels)
