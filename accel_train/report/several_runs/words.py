"""How the page calls settings, figures and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accel_train.report.several_runs.compared import Compared, differing_settings
from accel_train.report.shared.names import figure_title

LONGEST = 3  # settings in the name of a group of runs
MINUS = "\u2212"


def result_title(key: str) -> str:
    """A readable name of a key of result.json: "EMA: test loss" for "ema_test_loss"."""
    if key == "best_val_accuracy":
        return "best validation accuracy"
    weights, _, name = key.rpartition("test_")
    return f"{'EMA: ' if weights == 'ema_' else ''}test {figure_title(name)}"


def setting_text(value: Any) -> str:
    """A setting's value as the command line takes it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return " ".join(map(setting_text, value)) or "none"
    return str(value)


def points(value: float) -> str:
    """A difference of two fractions in percentage points, with its sign."""
    text = f"{100 * value:+.2f}"
    return "0.00" if float(text) == 0 else text.replace("-", MINUS)


def size_in_points(value: float) -> str:
    """The same without its sign."""
    return points(abs(value)).lstrip("+")


def points_between(interval: tuple[float, float]) -> str:
    return f"{points(interval[0])} to {points(interval[1])}"


def percent_between(low: float, high: float) -> str:
    """An interval of a fraction: "72.20 to 98.10%"."""
    return f"{100 * low:.2f} to {high:.2%}"


def chance_text(p_value: float) -> str:
    """A p-value, after "p"."""
    text = "< 0.001" if p_value < 0.001 else f"= {p_value:.2g}" if p_value < 0.1 else f"= {p_value:.2f}"
    return text.replace(" ", "\u00a0")


def names_of_groups(groups: Sequence[Sequence[Compared]]) -> list[str]:
    """A name for each setting: the options in which the groups differ, or its first run if these are too many."""
    firsts = [group[0] for group in groups]
    differing = {key: values for key, values in differing_settings(firsts).items() if key != "seed"}
    if 0 < len(differing) <= LONGEST:
        each = zip(*differing.values(), strict=True)
        return [
            ", ".join(f"{key} {setting_text(value)}" for key, value in zip(differing, values, strict=True))
            for values in each
        ]
    return [f"the settings of {each.name}" for each in firsts]
