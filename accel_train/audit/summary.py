"""What `accel-train check-data` prints of an audit."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from accel_train.audit.audit import AuditResult, size_figures
from accel_train.audit.findings import Finding, count_text
from accel_train.errors import first_of

SHOWN = 10  # unreadable images that are printed with their reason
GROUPS_SHOWN = 2  # of other findings
IMAGES_SHOWN = 3  # of a group
CLASSES_SHOWN = 10


def lines(result: AuditResult) -> Iterator[tuple[str, bool]]:
    """Yield the lines, and whether each may be wrapped: a command must not be."""
    yield from ((text, True) for text in _facts(result))
    for mistake in result.mistakes:
        yield f"error: {mistake}", True
    for note in result.notes:
        yield f"warning: {note}", True
    for decide, title in ((True, "To decide:"), (False, "Worth a look:")):
        some = [finding for finding in result.findings if finding.decide == decide]
        if some:
            yield title, True
        for finding in some:
            yield f"- {finding.title}. {finding.advice}", True
            yield from ((f"    {text}", True) for text in _examples(result, finding))
    if not result.findings and not result.mistakes:
        yield "Nothing was found that you must decide on, or look at.", True
    yield from _unreadable(result)
    yield f"audit: {result.folder / 'audit.json'}", False


def _facts(result: AuditResult) -> Iterator[str]:
    images = result.images
    counts = ", ".join(f"{len(source):,} {split}" for split, source in images.sources.items())
    yield f"{count_text(len(images))} ({counts}) of {count_text(len(images.classes), 'class')}"
    if result.reused:
        seen = "are as an earlier audit has seen them, and were"
        if result.reused == 1:
            seen = "is as an earlier audit has seen it, and was"
        yield f"{result.reused:,} of them {seen} not read again."
    if len(images.classes) <= CLASSES_SHOWN:
        width = max(map(len, images.classes), default=0)
        for number, name in enumerate(images.classes):
            each = ", ".join(f"{counts[number]:,} {split}" for split, counts in images.counts.items())
            yield f"  {name:<{width}}  {each}"
    figures = size_figures(result.records)
    if figures:
        height, width = figures["height"], figures["width"]
        if height[0] == height[2] and width[0] == width[2]:
            sizes = f"all {width[0]}x{height[0]} pixels"
        else:
            sizes = f"width {width[0]} to {width[2]} pixels (median {width[1]}), height {height[0]} to {height[2]}"
            sizes += f" (median {height[1]})"
        values = "" if "values" not in figures else "; values {:g} to {:g}".format(*figures["values"])
        yield f"sizes: {sizes}{values}"


def _examples(result: AuditResult, finding: Finding) -> Iterator[str]:
    """The first images of a finding, one line each, or one a group."""
    if finding.kind == "missing":
        yield first_of(finding.names, SHOWN)
    images, groups, most = result.images, finding.groups, GROUPS_SHOWN
    if finding.kind == "unreadable":
        groups, most = sorted(groups, key=lambda group: images.name(group[0])), SHOWN
    alone = bool(groups) and all(len(group) == 1 for group in groups)
    if alone and finding.kind != "unreadable":
        shown = [images.name(id) for (id,) in groups[:IMAGES_SHOWN]]
        yield ", ".join(shown) + _more(len(groups))
        return
    for group in groups[:most]:
        if alone:
            yield f"{images.name(group[0])}: {finding.notes[group[0]]}"
        else:
            shown = [f"{images.name(id)} ({images.split(id)}, {images.label(id)})" for id in group[:IMAGES_SHOWN]]
            yield (" ~ " if finding.kind.startswith("similar") else " = ").join(shown) + _more(len(group))
    if len(groups) > most:
        yield f"… and {len(groups) - most:,} more{' groups' * (not alone)}."


def _more(count: int) -> str:
    """How many of `count` images are not shown."""
    return f" and {count - IMAGES_SHOWN:,} more" if count > IMAGES_SHOWN else ""


def _unreadable(result: AuditResult) -> Iterator[tuple[str, bool]]:
    total, bad = len(result.images), len(result.unreadable)
    if not bad:
        yield f"All {total:,} images can be read." if total > 1 else "The image can be read.", True
    elif result.unreadable_list is not None:
        some = f"{bad:,} of {count_text(total)} cannot be read"
        yield f"{some}; {result.unreadable_list} is the list. To leave {'it' if bad == 1 else 'them'} out:", True
        options = f"--data.name {shlex.quote(result.name)} --data.root {shlex.quote(str(result.root))}"
        options += f" --data.skip-unreadable {shlex.quote(str(result.unreadable_list))}"
        yield f"  accel-train train RECIPE {options}", False
