"""Each option that docs/peers.md calls "has" is converted, and becomes what verdicts.txt says."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_train.convert.command_line import read_command
from accel_train.convert.peers import PEERS
from accel_train.convert.recipe import convert
from accel_train.convert.translation import Translation

BASE = {
    "timm": "torchrun --nproc_per_node=2 timm/train.py",
    "torchvision": "torchrun --nproc_per_node=2 references/classification/train.py",
    "ultralytics": "yolo classify train",
}
NOT_TRIED = {"timm": {"config"}, "torchvision": {"test-only"}, "ultralytics": {"cfg"}}
"""Files and commands that train nothing: see test_command_line.py."""


def read_trials() -> dict[tuple[str, str], tuple[str, str]]:
    """(peer, option) -> (words of a command, what they become). The file says how it is written."""
    trials: dict[tuple[str, str], tuple[str, str]] = {}
    peer = ""
    for line in (Path(__file__).parent / "verdicts.txt").read_text().splitlines():
        if line.startswith("# "):
            peer = line[2:]
        elif line and not line.startswith("//"):
            option, words, becomes = line.split(" | ")
            trials[peer, option] = (words, becomes)
    return trials


TRIALS = read_trials()


def becomes(base: Translation, changed: Translation) -> str:
    """What the recipe has that it would not have without the words; what it no longer has, with a minus."""
    before = {key: setting.value for key, setting in base.settings.items()}
    after = {key: setting.value for key, setting in changed.settings.items()}
    parts = [f"{key}={value}" for key, value in after.items() if before.get(key) != value]
    parts += [f"-{key}" for key in before.keys() - after.keys()]
    parts += [word for word in changed.launch if word not in base.launch]
    parts += [f"processes={changed.processes}"] * (changed.processes != base.processes)
    parts += ["left out"] * (changed.left_out != base.left_out)
    parts += ["told"] * (not {*changed.differs} <= {*base.differs})
    parts += [f"LOST {name}" for name in changed.lost.keys() - base.lost.keys()]
    return ", ".join(sorted(parts)) or "nothing"


@pytest.mark.parametrize("peer", PEERS)
def test_each_option_that_is_here_has_a_trial(peer: str) -> None:
    has = {name for name, option in PEERS[peer].options.items() if option.verdict == "has"}
    assert {option for of, option in TRIALS if of == peer} == has - NOT_TRIED[peer]


@pytest.mark.parametrize("peer", PEERS)
def test_an_option_becomes_what_its_verdict_promises(peer: str) -> None:
    base = convert(read_command(BASE[peer], peer, None))
    for (of, option), (words, expected) in TRIALS.items():
        if of == peer:
            changed = convert(read_command(f"{BASE[peer]} {words}", peer, None))
            assert (option, becomes(base, changed)) == (option, expected)
