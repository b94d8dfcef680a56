"""What the curves of a run say: its best epoch, where overfitting began, whether it still improved at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from accel_train.config.schema import best_metric
from accel_train.records.metrics import LOWER_IS_BETTER
from accel_train.report.shared.records import Row, RunRecords

FEWEST = 5  # evaluations in a trend: fewer may be in order by chance
LEVEL = 0.01  # the largest probability that values in random order look like a trend
LEAST_RISE = 0.02  # of the lowest validation loss: a smaller rise harms nobody
LEAST_FALL = 0.03  # of the loss, in the last fifth of the run: a smaller fall is not worth more epochs


@dataclass(frozen=True)
class Best:
    """The best evaluation of the validation split."""

    epoch: int
    metric: str
    shown: str
    """The value of the metric, as text."""
    shown_last: str
    """That of the last evaluation."""


def held_out(run: RunRecords) -> tuple[str, list[Row]]:
    """The split that was evaluated during training, "val" or "test", and its evaluations, one an epoch, of the EMA if
    there is one; "" and [] if there is none. The trainer decides by the same weights."""
    for split in ("val", "test"):
        rows = run.evaluations(split, "ema") or run.evaluations(split, "model")
        if rows:
            return split, [*{row["epoch"]: row for row in rows}.values()]
    return "", []


def best_of(run: RunRecords) -> Best | None:
    """The best evaluation of the validation split, as the trainer decides: the first of equal ones, and only with a
    finite loss. None without a validation split, or if it is not known whether the metric should be low or high."""
    split, rows = held_out(run)
    metric = best_metric(run.config, multi_label=run.info.multi_label)
    known = {figure.name: figure for figure in run.figures}
    if split != "val" or metric not in known:
        return None
    usable = [row for row in rows if row.get(metric) is not None and row.get("loss") is not None]
    if known[metric].chosen and metric not in LOWER_IS_BETTER:  # only the run itself knows which values are better
        usable = [row for row in usable if row.get("update") == run.result.get("best_update")]
    if not usable:
        return None
    choose = min if metric in LOWER_IS_BETTER else max
    best = choose(usable, key=lambda row: float(row[metric]))  # the first one of equal ones
    last = rows[-1].get(metric)
    show = known[metric].show
    return Best(best["epoch"], metric, show(best[metric]), "NaN" if last is None else show(last))


def overfits_from(run: RunRecords) -> int | None:
    """The epoch with the lowest validation loss if from there on the validation loss rises and the training loss
    falls; else None.

    It rises if the values after the lowest one, FEWEST or more, grow with the epochs in more pairs than LEVEL of all
    random orders would have (Kendall's tau, one-sided), and the mean of the last three is more than LEAST_RISE above
    the lowest. So neither noise around a constant nor a single bad epoch is called overfitting.
    """
    split, rows = held_out(run)
    losses = _losses(rows)
    if split != "val" or len(losses) < FEWEST + 1:
        return None
    start = min(range(len(losses)), key=lambda index: losses[index][1])
    (epoch, lowest), after = losses[start], [loss for _, loss in losses[start + 1 :]]
    trained = [loss for when, loss in _losses(run.evaluations("train", "model")) if when >= epoch]
    rises = _trend(after) and sum(after[-3:]) / 3 > lowest * (1 + LEAST_RISE)
    falls = len(trained) > 1 and trained[-1] < trained[0]
    return epoch if rises and falls else None


def still_improves(run: RunRecords) -> float | None:
    """By how much the loss fell in the last fifth of the evaluations, as a fraction, if it still falls; else None.

    It falls if the last third of the values, FEWEST or more, shrink with the epochs as `overfits_from` says of growing
    ones, and the mean of the last fifth, two or more, is at least LEAST_FALL below the mean of as many before.
    """
    _, rows = held_out(run)
    losses = [loss for _, loss in _losses(rows)]
    if len(losses) < FEWEST:
        return None
    newest = losses[-max(FEWEST, len(losses) // 3) :]
    few = max(2, len(losses) // 5)
    now, before = sum(losses[-few:]) / few, sum(losses[-2 * few : -few]) / few
    fall = 1 - now / before if before > 0 else 0.0
    return fall if _trend([-loss for loss in newest]) and fall >= LEAST_FALL else None


def _losses(rows: Sequence[Row]) -> list[tuple[int, float]]:
    """(epoch, loss) of the evaluations that have a finite loss."""
    found = [(row["epoch"], row.get("loss")) for row in rows]
    return [(epoch, float(loss)) for epoch, loss in found if loss is not None and math.isfinite(loss)]


def _trend(values: Sequence[float]) -> bool:
    """Whether the values grow in their order, more than LEVEL of random orders do."""
    from scipy.stats import kendalltau

    if len(values) < FEWEST or len(set(values)) == 1:
        return False
    found = kendalltau(range(len(values)), values, alternative="greater")
    return bool(found.pvalue < LEVEL)
