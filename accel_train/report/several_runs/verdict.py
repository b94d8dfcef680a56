"""The sentences on top: what can be told from these runs, and what cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from accel_train.errors import first_of
from accel_train.report.several_runs.compared import Compared, groups_of
from accel_train.report.several_runs.differences import FEW, Difference
from accel_train.report.several_runs.statistics import spread
from accel_train.report.several_runs.words import chance_text, percent_between, points, points_between, size_in_points
from accel_train.report.shared.names import figure_title
from accel_train.report.shared.records import state_of

SEEDS = (
    "Another seed may turn this round. To judge the settings, train each of them with several seeds, better five than "
    "two (accel-train submit RECIPE --seeds 0-4 queues them), and give all these runs to the report."
)


@dataclass(frozen=True)
class Verdict:
    """What the page says first."""

    answer: str
    """One sentence."""
    sure: bool
    """Whether there is a difference that is more than noise."""
    details: list[str] = field(default_factory=list)


def verdict_of(runs: Sequence[Compared], of_settings: Sequence[Difference], of_runs: Sequence[Difference]) -> Verdict:
    """What can be told: of the settings if two of them have several runs, else of the trained models."""
    groups = groups_of(runs)
    settings = [each for each in of_settings if each.p_value is not None]
    models = [each for each in of_runs if each.p_value is not None]
    if settings:
        found = _of_settings(settings, runs[0].split)
    elif len(groups) == 1:
        found = _of_one_setting(runs, models)
    elif models:
        found = _of_models(models, runs[0].split, seeds=any(len(group) > 1 for group in groups))
    else:
        found = _none([*of_settings, *of_runs])
    return Verdict(found.answer, found.sure, found.details + _cautions(runs, groups, of_settings))


def _of_settings(known: Sequence[Difference], split: str) -> Verdict:
    condition = (
        "This compares the means of the runs of each setting by Welch's t-test. It assumes that runs are independent "
        "and their results about normally distributed, which a few seeds cannot show. It holds for this data and these "
        "test images."
    )
    if len(known) == 1:
        each = known[0]
        seeds = f"{each.counts[0]} and {each.counts[1]} runs"
        if each.is_more_than_noise:
            return Verdict(f"{_better(each, split)}: more than the noise of seeds ({seeds}).", True, [condition])
        return Verdict(f"{_unclear(each, split)} The noise of seeds may explain it ({seeds}).", False, [condition])
    return _of_many(known, split, "settings", condition)


def _of_models(known: Sequence[Difference], split: str, *, seeds: bool) -> Verdict:
    """`seeds`: whether a setting has several runs, although no two settings can be compared by theirs."""
    scope = (
        "This is about these trained models, by McNemar's test on the images that only one of two models has right. "
        f"Whether the settings are better cannot be told from {'these runs' if seeds else 'one run each'}. {SEEDS}"
    )
    if len(known) > 1:
        return _of_many(known, split, "models", scope)
    each = known[0]
    if each.is_more_than_noise:
        answer = f"As trained here, {_better(each, split)}, on the same {each.images:,} images."
        return Verdict(answer, True, [scope])
    counts = f"{each.counts[0]:,} images only the first has right, {each.counts[1]:,} only the second."
    return Verdict(f"{_unclear(each, split)} Of {each.images:,} images, {counts}", False, [scope])


def _of_many(known: Sequence[Difference], split: str, what: str, scope: str) -> Verdict:
    sure = sorted((each for each in known if each.is_more_than_noise), key=lambda each: -abs(each.value or 0))
    holm = f"The p-values are adjusted for {len(known)} comparisons (Holm)."
    if len(known) > 2 and len({each.first for each in known}) == 1:
        what = f"{what}, each against {known[0].first},"
    if not sure:
        answer = f"It cannot be told from these runs what is best: no difference between {what} is more than noise."
        return Verdict(answer, False, [holm, scope])
    answer = f"{len(sure)} of {len(known)} differences between {what} are more than noise. "
    answer += f"The largest: {_better(sure[0], split)}."
    return Verdict(answer, True, [holm, scope])


def _of_one_setting(runs: Sequence[Compared], models: Sequence[Difference]) -> Verdict:
    scores = [each.score for each in runs if each.score is not None]
    seeds = {each.run.config.seed for each in runs}
    what = "These runs differ in their seed alone" if len(seeds) > 1 else "These runs have the same settings"
    if not scores:
        return Verdict(f"{what}, and none has a figure to compare.", False)
    mean, deviation, low, high = spread(scores)
    title = f"{runs[0].split} {figure_title(runs[0].main)}"
    answer = f"{what}: there is one setting, and no other to compare it with. Its {title} is {mean:.2%}"
    if deviation is None or low is None or high is None:
        return Verdict(f"{answer}, of one run.", False)
    if deviation == 0:
        return Verdict(f"{answer} in each of {len(scores)} runs: they show no noise to judge by.", False)
    details = ["What differs between two of them is the noise that a comparison with another setting has to exceed."]
    if any(each.is_more_than_noise for each in models):
        details.append(
            "McNemar's test finds two of the models different. It judges trained models: no setting is better for it."
        )
    answer += f" in the mean of {len(scores)} runs (95% interval {percent_between(low, high)}), standard deviation"
    return Verdict(f"{answer} {size_in_points(deviation)} points.", False, details)


def _none(found: Sequence[Difference]) -> Verdict:
    problems = [*dict.fromkeys(each.problem for each in found if each.problem)]
    reason = first_of(problems, 2) if problems else "they have no figures"
    return Verdict(f"It cannot be told from these runs which is better: {reason}.", False)


def _better(each: Difference, split: str) -> str:
    """ "B is better than A by 1.20 points of test accuracy (95% interval …)"."""
    value, interval = each.value or 0.0, each.interval or (0.0, 0.0)
    better, worse = (each.second, each.first) if value > 0 else (each.first, each.second)
    bounds = interval if value > 0 else (-interval[1], -interval[0])
    unit = f"points of {split} {figure_title(each.figure)}"
    return (
        f"{better} is better than {worse} by {size_in_points(value)} {unit} (95% interval {points_between(bounds)}, "
        f"p\u00a0{chance_text(each.adjusted_p_value or 0.0)})"
    )


def _unclear(each: Difference, split: str) -> str:
    assert each.value is not None and each.interval is not None and each.adjusted_p_value is not None
    more = "as much" if not points(each.value).strip("0.") else "more" if each.value > 0 else "less"
    size = "" if more == "as much" else f"{size_in_points(each.value)} points "
    return (
        f"It cannot be told from these runs whether {each.second} or {each.first} is better: {each.second} has {size}"
        f"{more} {split} {figure_title(each.figure)} (95% interval of the difference {points_between(each.interval)}, "
        f"p\u00a0{chance_text(each.adjusted_p_value)})."
    )


def _cautions(
    runs: Sequence[Compared], groups: Sequence[Sequence[Compared]], of_settings: Sequence[Difference]
) -> list[str]:
    """What limits any answer."""
    found = []
    running = [f"{each.name} ({state_of(each.run)})" for each in runs if not each.is_finished]
    if running:
        found.append(f"Not finished, and judged by what there is so far: {first_of(running, 5)}.")
    by_ema = [each.name for each in runs if each.has_ema]
    if by_ema and len(by_ema) < len(runs):
        found.append(f"Judged by the weights of the EMA: {first_of(by_ema, 5)}; the others have none.")
    if any(each.run.info.multi_label for each in runs):
        found.append(
            "Images have several labels: image by image, a model is right if it has all labels of the image right."
        )
    if len(groups) > FEW:
        found.append(
            "The best of many runs by their test images has had luck, too: it looks better than it is. Choose by the "
            "validation split, and test what is chosen."
        )
    alone = [group[0].name for group in groups if len(group) == 1]
    if of_settings and alone:
        found.append(f"One run alone says nothing of its setting: {first_of(alone, 5)}.")
    problems: dict[str, list[str]] = {}
    for each in of_settings:
        if each.problem:
            problems.setdefault(each.problem, []).append(f"{each.first} and {each.second}")
    found += [f"{first_of(pairs, 1)}: {problem}." for problem, pairs in problems.items()]
    return found
