"""What a run has come to, in sentences: only what its records say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from accel_train.errors import first_of
from accel_train.tools.figures import images_of_classes, interval_of
from accel_train.tools.report.curves import best_of
from accel_train.tools.report.records import SPLITS, Row, RunRecords, figure_title

IMBALANCE = 10  # the largest class has so many times the training images of the smallest


@dataclass(frozen=True)
class Sentence:
    text: str
    kind: str = "plain"
    """"lead": what the page is for; "doubt": the same, but bad news; "plain"; or "warning": somebody should look."""


def words_of(run: RunRecords, evaluation: Row) -> list[Sentence]:
    """The sentences on top of the page, in their order. `evaluation`: what evaluation-SPLIT.json holds, or {}."""
    split, record, subject = shown_record(run, evaluation)
    return [*_figures(run, split, record, subject), *_ending(run), *_course(run), *_data(run, split, record)]


def shown_record(run: RunRecords, evaluation: Row) -> tuple[str, Row, str]:
    """The split, the figures that the words are about, and whose they are.

    Of the evaluation, else of result.json, else the last evaluation during training; the EMA's if there are any. ""
    and {} if there are none.
    """
    for weights, subject in (("ema", "The EMA"), ("model", "The model")):
        if weights in evaluation:
            return evaluation["split"], evaluation[weights], subject
    metric = run.main_figure
    if run.result.get("test_images") and f"test_{metric}" in run.result:
        record: Row = {metric: run.result[f"test_{metric}"], "count": run.result["test_images"]}
        record |= {name: run.result[name] for name in ("confusion", "class_images") if name in run.result}
        return "test", record, "The model"
    split, rows = run.held_out
    if not rows:
        return "", {}, ""
    subject = "The EMA" if rows[-1].get("weights") == "ema" else "The model"
    return split, rows[-1], f"After epoch {rows[-1]['epoch']} {subject[0].lower()}{subject[1:]}"


def _figures(run: RunRecords, split: str, record: Row, subject: str) -> Iterator[Sentence]:
    """How good the model is, and whether that is better than chance."""
    if not record:
        yield Sentence("Nothing says how good the model is on images that it was not trained on.", "doubt")
        return
    name, count = SPLITS[split], record.get("count") or 0
    metric = run.main_figure
    if record.get(metric) is None:
        yield Sentence(f"{subject}'s output is NaN or infinite for {name} images, so there are no figures.", "doubt")
        return
    counts = images_of_classes(record)
    if run.info.multi_label:
        yield Sentence(
            f"{subject} has a mean average precision of {record[metric]:.1%} on {_images(count, name)}.", "lead"
        )
        present = [images / count for images in counts if images] if count else []
        if present:
            yield Sentence(f"To rank the images at random would give about {sum(present) / len(present):.1%}.", "lead")
        return
    low, high = interval_of(record) or (0.0, 1.0)
    yield Sentence(
        f"{subject} is right on {record[metric]:.1%} of {_images(count, name)} "
        f"(95% interval: {100 * low:.1f} to {high:.1%}).",
        "lead",
    )
    yield from _against_chance(run.info.classes, counts, name, low, high)
    confusion = record.get("confusion")
    said = [label for label in range(len(counts)) if any(row[label] for row in confusion)] if confusion else []
    if len(said) == 1 and sum(count > 0 for count in counts) > 1:
        yield Sentence(f"It names one class, {run.info.classes[said[0]]}, for all {_images(count, name)}.", "doubt")


def _against_chance(
    classes: Sequence[str], counts: Sequence[int], name: str, low: float, high: float
) -> Iterator[Sentence]:
    """Whether an accuracy between `low` and `high` is better than to name the largest class for every image.

    `counts`: the images of each class; [] if they are not known.
    """
    total = sum(counts)
    if not total:
        return
    share, largest = max(counts) / total, classes[max(range(len(counts)), key=counts.__getitem__)]
    if share == 1:
        yield Sentence(f"All {name} images are of one class, {largest}, so this says little.", "doubt")
        return
    baseline = f"to say {largest}, the most frequent class, for every image, which is right on {share:.1%}"
    if counts.count(max(counts)) == sum(count > 0 for count in counts):
        baseline = f"to say one class for every image, which is right on {share:.1%}"
    if low > share:
        yield Sentence(f"This is better than {baseline}.", "lead")
    elif high < share:
        yield Sentence(f"This is worse than {baseline}.", "doubt")
    else:
        yield Sentence(f"This is not clearly better than {baseline}.", "doubt")


def _ending(run: RunRecords) -> Iterator[Sentence]:
    """How far the run has come, if not to its end, and what was not finite."""
    planned, result, status = run.config.epochs, run.result, run.status
    if not result:
        state = {"training": "still trains", "interrupted": "was interrupted", "failed": "has failed"}
        state["stale"] = "died or was killed"
        did = state.get(str(status.get("state")), "has not finished")
        where = f" in epoch {status['epoch']} of {planned}" if "epoch" in status else ""
        yield Sentence(f"The run {did}{where}: what follows is what it has so far.", "warning")
    elif (by := result.get("stopped_by", "epochs")) != "epochs":
        why = {"patience": "the validation split did not improve any more (--stop.patience-epochs)",
               "hours": "its time was over (--stop.hours)"}  # fmt: skip
        done = f"It was stopped after {result.get('epochs', '?')} of {planned} epochs"
        yield Sentence(f"{done}, because {why.get(by, by)}.", "warning" if by == "hours" else "plain")
    skipped = result.get("left_out_updates") or status.get("left_out_updates") or 0
    if skipped:
        yield Sentence(f"{_many(skipped, 'update')} skipped because the loss or a gradient was not finite.", "warning")
    rewinds = sum(kind == "rewind" for kind, _ in run.events)
    if rewinds:
        times = "once" if rewinds == 1 else f"{rewinds} times"
        yield Sentence(f"The run went back to a checkpoint {times} because the loss was not finite.", "warning")
    rows = [*run.evaluations("train", "model"), *run.held_out[1]]
    broken = sorted({row["epoch"] for row in rows if "loss" in row and row["loss"] is None})
    if broken:
        epochs = f"epoch{'s' * (len(broken) > 1)} {first_of([*map(str, broken)], 5)}"
        yield Sentence(f"The loss was NaN or infinite in {epochs}.", "warning")


def _course(run: RunRecords) -> Iterator[Sentence]:
    """The best epoch, or why nothing says which it was."""
    split, rows = run.held_out
    epochs = len({row["epoch"] for row in run.evaluations("train", "model")})
    best = best_of(run)
    if best is not None and len(rows) > 1:
        metric = figure_title(best.metric)
        text = f"The best epoch by the validation {metric} was {best.epoch} of {rows[-1]['epoch']} ({best.shown})"
        last = f"; the last one has {best.shown_last}" if best.epoch != rows[-1]["epoch"] else ", the last one"
        yield Sentence(f"{text}{last}.")
    if split != "val" and epochs > 1:
        yield Sentence("There is no validation split (--data.val-fraction), so nothing says which epoch was the best.")


def _data(run: RunRecords, split: str, record: Row) -> Iterator[Sentence]:
    """What is unusual in the data: images left out, files not used, classes without images, classes of unequal size."""
    left_out, unused = run.data.get("unreadable") or 0, run.data.get("unused")
    if left_out:
        yield Sentence(f"{_many(left_out, 'unreadable image')} left out (--data.skip-unreadable).", "warning")
    if unused:
        yield Sentence(f"Not used, but in the folder of the data: {unused}.", "warning")
    counts = {name: run.data[name]["class_images"] for name in SPLITS if name in run.data}
    if split and split not in counts and (evaluated := images_of_classes(record)):
        counts[split] = evaluated  # of other data than the run's
    for name, images in counts.items():
        empty = [each for each, count in zip(run.info.classes, images, strict=True) if not count]
        if empty:
            some = f"{len(empty)} of {len(images)} classes {'has' if len(empty) == 1 else 'have'}"
            yield Sentence(f"{some} no {SPLITS[name]} image: {first_of(empty, 10)}.", "warning")
    present = [count for count in counts.get("train", []) if count]
    if present and max(present) >= IMBALANCE * min(present):
        most = f"from {min(present):,} to {max(present):,}"
        yield Sentence(f"The classes differ much in their number of training images: {most}.", "warning")


def _images(count: int, name: str) -> str:
    return f"{count:,} {name} image{'s' * (count != 1)}"


def _many(count: int, name: str) -> str:
    return f"{count:,} {name} was" if count == 1 else f"{count:,} {name}s were"
