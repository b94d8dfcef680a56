"""Names of shards as the shell writes them, in braces."""

from __future__ import annotations

import itertools
import re

from accel_train.errors import UserError, first_of

MOST_SHARDS = 1_000_000


def expanded(pattern: str, suffix: str = ".tar") -> tuple[str, ...]:
    """The names that "train-{000..127}.tar" or "{train/{0..3},val/0}.tar" means, in the order of bash. Raises
    UserError."""
    names = _expanded(pattern)
    if wrong := [name for name in names if not name.endswith(suffix)]:
        raise UserError(f"--data.root: {first_of(wrong, 1)} is no shard: their names end with {suffix}.")
    return tuple(dict.fromkeys(names))


def _expanded(pattern: str) -> list[str]:
    before, brace, rest = pattern.partition("{")
    depth, cuts = 1 if brace else 0, [-1]  # cuts: the commas of this brace, and its end
    for at, letter in enumerate(rest):
        depth += (letter == "{") - (letter == "}")
        if depth == 0 or (depth == 1 and letter == ","):
            cuts.append(at)
        if depth == 0:
            break
    if depth or "}" in before:
        raise UserError(f"--data.root: the braces of {pattern} do not belong together.")
    if not brace:
        return [pattern]
    inside, ends = rest[: cuts[-1]], _expanded(rest[cuts[-1] + 1 :])
    if (span := re.fullmatch(r"(\d+)\.\.(\d+)", inside)) is not None:
        first, last = int(span[1]), int(span[2])
        if not first <= last < first + MOST_SHARDS:
            raise UserError(f"--data.root: {{{inside}}} names no shards, or more than {MOST_SHARDS:,}.")
        words = [str(number).zfill(len(span[1])) for number in range(first, last + 1)]
    elif len(cuts) > 2:
        words = [word for start, end in itertools.pairwise(cuts) for word in _expanded(rest[start + 1 : end])]
    else:
        raise UserError(
            f"--data.root: {{{inside}}} is neither a range such as {{000..127}} nor a list such as {{a,b}}."
        )
    if len(words) * len(ends) > MOST_SHARDS:
        raise UserError(f"--data.root: {pattern} names more than {MOST_SHARDS:,} shards.")
    return [before + word + end for word in words for end in ends]
