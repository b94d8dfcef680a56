"""What the sieges share: rounds at random until the time is over, each of which can be repeated by its seed.

SIEGE_SECONDS (60) says how long a siege lasts, SIEGE_SEED (0) with which seed it begins. Each round has a seed of its
own, the next number, and there is at least one round. A failure does not end a siege: at its end it lists all of them,
each with the line that repeats it.
"""

from __future__ import annotations

import os
import shutil
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

SECONDS = float(os.environ.get("SIEGE_SECONDS", "60"))
FIRST_SEED = int(os.environ.get("SIEGE_SEED", "0"))
MOST_FAILURES = 30  # then something is wrong that every round meets
TIMEOUT = pytest.mark.timeout(SECONDS + 900)


class FallenError(Exception):
    """A round found something that may not happen. The message says all that is needed."""


def check(holds: object, message: str) -> None:
    if not holds:
        raise FallenError(message)


def besiege(file: str, folder: Path, play: Callable[[int, Path], str]) -> None:
    """Play rounds until the time is over. Fail at the end if one of them failed.

    `play` gets the round's seed and an empty folder, and returns what it did in a few words, or raises an error. The
    folder of a failed round is kept.
    """
    path = Path(file)
    end, failures, seed = time.monotonic() + SECONDS, list[str](), FIRST_SEED
    print(f"\n{path.stem}: {SECONDS:.0f} s from SIEGE_SEED={seed} on", flush=True)
    while True:
        place, began = folder / f"round-{seed}", time.monotonic()
        place.mkdir()
        try:
            outcome = play(seed, place)
        except Exception as error:
            reason = str(error) if isinstance(error, FallenError) else traceback.format_exc()
            again = f"SIEGE_SEED={seed} SIEGE_SECONDS=0 python -m pytest -n 0 -s -m ci {_relative(path)}"
            failures.append(f"seed {seed}: {reason}\nIts folder: {place}\nTo repeat it: {again}\n")
            outcome = f"FAILED\n{failures[-1]}"
        else:
            shutil.rmtree(place)
        print(f"seed {seed}, {time.monotonic() - began:.1f} s: {outcome}", flush=True)
        seed += 1
        if time.monotonic() >= end or len(failures) == MOST_FAILURES:
            break
    if failures:
        pytest.fail(f"{len(failures)} of {seed - FIRST_SEED} rounds failed.\n\n" + "\n".join(failures), pytrace=False)


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
