"""What `accel-train check-data` prints of an audit."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import chain

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
    most = SHOWN if finding.kind == "unreadable" else GROUPS_SHOWN
    groups = finding.groups
    if finding.kind == "unreadable":
        groups = sorted(groups, key=lambda group: result.images.name(group[0]))
    alone = bool(groups) and all(len(group) == 1 for group in groups)
    if alone and finding.kind != "unreadable":
        yield first_of([result.images.name(id) for id in chain(*groups[: IMAGES_SHOWN + 1])][:IMAGES_SHOWN]) + (
            f" and {len(groups) - IMAGES_SHOWN:,} more" if len(groups) > IMAGES_SHOWN else ""
        )
        return
    for group in groups[:most]:
        if alone:
            yield f"{result.images.name(group[0])}: {finding.notes[group[0]]}"
        else:
            shown = [_described(result, id) for id in group[:IMAGES_SHOWN]]
            rest = len(group) - IMAGES_SHOWN
            yield (" ~ " if finding.kind.startswith("similar") else " = ").join(shown) + (
                f" and {rest:,} more" if rest > 0 else ""
            )
    if len(groups) > most:
        yield f"… and {len(groups) - most:,} more{' groups' * (not alone)}."


def _described(result: AuditResult, id: int) -> str:
    images = result.images
    return f"{images.name(id)} ({images.split(id)}, {images.label(id)})"


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
