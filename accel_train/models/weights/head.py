"""The last layer of a new run's model: which rows of the weights that it begins from are loaded."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from accel_train.errors import UserError
from accel_train.models.weights.hub import Weights


def with_head(
    state: dict[str, Tensor], head: dict[str, Tensor], weights: Weights, classes: Sequence[str], *, remaps: bool
) -> tuple[dict[str, Tensor], str]:
    """The state with the rows of the last layer in the order of `classes`, or without it; and words for that.

    `head`: the new last layer. `remaps`: if the classes of the `weights` are others, the rows of those that both have
    are loaded into the new last layer. Raises UserError if nobody knows them then.
    """
    theirs = weights.classes
    if remaps and theirs is None:
        raise UserError(
            f"--model.remap-classes: {weights.shown} does not name its classes; give a run, or leave it out."
        )
    rows = list(range(len(classes)))
    rest = {name: value for name, value in state.items() if name not in head}
    found = {name: state[name] for name in head if name in state}
    if not head:  # it is not known which one it is, and all weights fit
        return rest, "last layer loaded with the body"
    if len(found) < len(head):
        return rest, "new last layer: the file has none"
    count = next(iter(found.values())).shape[0] if found else 0
    if theirs is not None and len(theirs) == count:
        if sorted(theirs) != sorted(classes) or len(set(theirs)) < len(theirs):
            mine, of_theirs = _in_both(theirs, classes) if remaps else ([], [])
            if not mine or any(value.shape[1:] != head[name].shape[1:] for name, value in found.items()):
                return rest, f"new last layer: {_difference(theirs, classes)}"
            for name, value in found.items():
                rest[name] = head[name].clone()
                rest[name][mine] = value[of_theirs].to(rest[name].dtype)
            rows_text = f"{len(mine)} of its {len(classes)} rows"
            return rest, f"last layer: {rows_text} loaded, those of classes with the same name"
        rows = [theirs.index(name) for name in classes]
        text = "last layer loaded: the same classes" + ", in another order" * (list(theirs) != list(classes))
    elif count != len(classes):
        return rest, f"new last layer: {count} classes there, {len(classes)} here"
    else:
        text = f"last layer loaded: as many classes ({count}), which the file does not name"
    if any(value.shape != head[name].shape for name, value in found.items()):
        return rest, "new last layer: that of the file has another shape"
    return rest | {name: value[rows] for name, value in found.items()}, text


def _in_both(theirs: Sequence[str], ours: Sequence[str]) -> tuple[list[int], list[int]]:
    """The rows of the classes that are in both, here and there. Capital letters do not matter, as in ultralytics'
    cls_remap."""
    place = {name.strip().casefold(): row for row, name in enumerate(theirs)}
    place |= {name: row for row, name in enumerate(theirs)}
    rows = [(row, place.get(name, place.get(name.strip().casefold(), -1))) for row, name in enumerate(ours)]
    found = [pair for pair in rows if pair[1] >= 0]
    return [here for here, _ in found], [there for _, there in found]


def _difference(theirs: Sequence[str], ours: Sequence[str]) -> str:
    if len(theirs) != len(ours):
        return f"{len(theirs)} classes there, {len(ours)} here"
    return f"other classes ({next(name for name in theirs if name not in ours)!r} is not here)"
