"""The work of `accel-train check-data`: look at every image of a data set once, and say what was found."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from accel_train.audit.findings import Finding, all_findings
from accel_train.audit.images import Images
from accel_train.audit.kept import Kept
from accel_train.audit.look import RECORD, Records, Unreadable, look, name_hash
from accel_train.config.schema import Data
from accel_train.data.sources.divide import divide
from accel_train.data.sources.files.encoded import EncodedImages, depth_notes
from accel_train.data.sources.load import read_splits
from accel_train.data.sources.splits import Splits, names_root, unwrap_subset
from accel_train.data.sources.unreadable_list import check_own_list, default_list, real, write_list
from accel_train.data.tools.pool import Job, ProgressDisplay, in_processes, jobs_of
from accel_train.errors import UserError, writing
from accel_train.files import atomic_write, check_writable
from accel_train.launch.process import available_cores
from accel_train.untrusted import read_json_object
from accel_train.user_code.reference import OBJECT, short_name


@dataclass(frozen=True)
class AuditResult:
    """What an audit has found, and where it is written."""

    name: str
    """--data.name of the data."""
    root: Path
    images: Images = field(repr=False)
    findings: tuple[Finding, ...]
    """First what must be decided on."""
    mistakes: tuple[str, ...]
    """Why the data cannot be trained on as it is."""
    notes: tuple[str, ...]
    """Warnings about how the data is read."""
    unreadable: tuple[Unreadable, ...] = field(repr=False)
    records: Records = field(repr=False)
    reused: int
    """Images that were not looked at again: an earlier audit has, and they have not changed."""
    folder: Path
    """Of audit.json and the page."""
    unreadable_list: Path | None
    """The list for --data.skip-unreadable; None: the images are no files."""

    @property
    def to_decide(self) -> bool:
        """Whether there is anything that a user must decide on: what --strict ends with exit code 1 for."""
        return bool(self.mistakes) or any(finding.decide for finding in self.findings)

    @property
    def stops_training(self) -> bool:
        """Whether a training on this data would end with an error."""
        return bool(self.mistakes or self.unreadable)

    def finding(self, kind: str) -> Finding | None:
        """What was found of this kind."""
        return next((each for each in self.findings if each.kind == kind), None)

    def as_dict(self) -> dict[str, Any]:
        """What audit.json has."""
        return {
            "data": {"name": self.name, "root": real(self.root)},
            "images": len(self.images),
            "classes": self.images.classes,
            "counts": self.images.counts,
            "mistakes": self.mistakes,
            "notes": self.notes,
            "findings": [self._finding(each) for each in self.findings],
            **size_figures(self.records),
        }

    def _finding(self, finding: Finding) -> dict[str, Any]:
        image, notes = self.images, finding.notes
        return {
            "kind": finding.kind,
            "decide": finding.decide,
            "title": finding.title,
            "advice": finding.advice,
            "names": finding.names,
            "groups": [
                [
                    {"name": image.name(id), "split": image.split(id), "label": image.label(id)}
                    | ({"note": notes[id]} if id in notes else {})
                    for id in group
                ]
                for group in finding.groups
            ],
        }


def check_data(
    data: Data,
    *,
    output: Path | None = None,
    folder: Path | None = None,
    processes: int | None = None,
    shows_progress: bool = False,
) -> AuditResult:
    """Look at all images of `data`, in `processes` processes (default: all cores), and write what was found.

    `output`: the list of unreadable images; default: unreadable-NAME.txt. `folder`: of audit.json, and of what was
    looked at, so that the next audit looks at new and changed images alone; default: audit-NAME beside the list. List
    and audit.json are written whole or not at all, and never over those of another data set. Raises UserError.
    """
    whole = replace(data, skip_unreadable=None, val_fraction=0.0, test_fraction=0.0, train_limit=None, test_limit=None)
    whole = replace(whole, verify=True)  # all images are read, so that to compare them with their index costs little
    output = output or default_list(data)
    folder = folder or output.with_name(f"audit-{output.stem.removeprefix('unreadable-')}")
    splits, mistakes = _splits(whole)
    named = {"train": splits.to_train_on, "val": splits.validation, "test": splits.test}
    sources = {split: source for split, source in named.items() if source is not None and len(source)}
    images = Images(sources, splits.classes, names_root(data))
    listed = output if isinstance(unwrap_subset(splits.train)[0], EncodedImages) else None
    if listed is not None:
        check_writable("--output", listed)
        check_own_list(listed, whole, splits.sources.values())
    _check_folder(folder, data)
    with writing("--folder", folder, "another folder"):
        folder.mkdir(parents=True, exist_ok=True)
    records, unreadable, reused = _look_at_all(images, whole, folder, processes, shows_progress=shows_progress)
    result = AuditResult(
        data.name,
        data.root,
        images,
        tuple(all_findings(splits, images, records, unreadable)),
        mistakes,
        (*splits.notes, *depth_notes(splits.train)),
        tuple(unreadable),
        records,
        reused,
        folder,
        listed,
    )
    if listed is not None:
        with writing("--output", listed):
            write_list(listed, whole, splits.sources.values(), (images.name(each.id) for each in unreadable))
    with writing("--folder", folder, "another folder"):
        atomic_write(folder / "audit.json", json.dumps(result.as_dict(), indent=1) + "\n")
    return result


def size_figures(records: Records) -> dict[str, Any]:
    """Smallest, median and largest height, width and values of the readable images; {} if there is none."""
    readable = records[records["readable"] == 1]
    if not len(readable):
        return {}
    values = readable[~np.isnan(readable["low"])]
    return {
        side: [int(number) for number in np.percentile(readable[side], (0, 50, 100), method="nearest")]
        for side in ("height", "width")
    } | ({"values": [float(values["low"].min()), float(values["high"].max())]} if len(values) else {})


def _splits(data: Data) -> tuple[Splits, tuple[str, ...]]:
    """The whole data set, and why it cannot be trained on."""
    splits = read_splits(data)
    if not len(splits.train):
        divide(splits, data, seed=0)  # raises the error
    mistakes = [splits.mistake] * bool(splits.mistake)
    try:
        splits = divide(splits, data, seed=0)
    except UserError as error:  # an audit tells all that is wrong
        mistakes += error.messages
    return splits, tuple(mistakes)


def _look_at_all(
    images: Images, data: Data, folder: Path, processes: int | None, *, shows_progress: bool
) -> tuple[Records, list[Unreadable], int]:
    """The records of all images, those that are unreadable, and how many records are of an earlier audit."""
    sources = list(images.sources.values())
    records = np.zeros(len(images), RECORD)
    unreadable: list[Unreadable] = []
    reused = 0
    with writing("--folder", folder, "another folder"):
        kept = Kept(folder / "looked-at.bin")
    options = f"{data.range} {data.max_pixels} {data.channels} "

    def of_job(job: Job) -> tuple[Any, ...]:
        number, first, last = job
        name, root = sources[number].name, f"{images.root}/"
        names = [name_hash(name(id).removeprefix(root)) for id in range(first, last)]
        hashes = np.array(names, dtype=np.uint64)
        return hashes, kept.of(hashes)

    jobs = jobs_of(sources)
    with contextlib.closing(kept), ProgressDisplay("decod", len(images), quiet=not shows_progress) as shown:
        looked = in_processes(look, sources, jobs, processes or available_cores(), options, of_job=of_job)
        for (number, first, last), (found, bad, again) in zip(jobs, looked, strict=True):
            start = int(images.starts[number])
            records[start + first : start + last] = found
            unreadable += [replace(each, id=start + each.id) for each in bad]
            kept.append(found)
            reused += again
            shown.advance(last - first, len(unreadable))
    kept.replace(records)
    return records, unreadable, reused


def _check_folder(folder: Path, data: Data) -> None:
    """Raise UserError if the folder has the audit of other data."""
    about: Mapping[str, Any] = read_json_object(folder / "audit.json").get("data") or {}
    here = {"name": data.name, "root": real(data.root)}
    objects = OBJECT in data.name and OBJECT in str(about.get("name"))  # their names have a fingerprint
    if about and about != here and not objects:
        raise UserError(
            f"{folder} has the audit of {about.get('name')} {about.get('root')}, not of "
            f"{short_name('data.name', data.name)} {data.root}: give another --folder, or delete it."
        )
