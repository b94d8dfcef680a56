"""The help of train."""

from __future__ import annotations

import re

import pytest
from test_dispatch import accel_train

from accel_train.cli.dispatch import main
from accel_train.cli.help import COMMON, groups, help_texts
from accel_train.config.schema import option_types


def test_help_shows_every_option_in_groups_with_the_commonest_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    shown = re.findall(r"^  --(\S+)", text, re.MULTILINE)
    assert tuple(shown[: len(COMMON)]) == COMMON
    assert set(shown) == set(option_types()) <= set(help_texts())
    assert re.findall(r"^(\w+):$", text, re.MULTILINE) == [*groups()]
    assert next(iter(groups())) == "common"


def test_help_shows_one_group(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help", "optim"], ["digits", "--help", "optim"]):
        assert main(["train", *words]) == 0
        text = capsys.readouterr().out
        assert set(re.findall(r"^  --(\S+)", text, re.MULTILINE)) == {k for k in option_types() if "optim." in k}
        assert "(default: 0.1)" in text
    for key, group in (("optim.lr", "optim"), ("optim.weight_decay", "optim"), ("epochs", "common")):
        assert main(["train", "--help", key]) == 0
        out = capsys.readouterr().out
        assert f"--{key.replace('_', '-')} " in out
        assert f"\n{group}:\n" in out
        assert out.count("  --") == 1
    assert main(["train", "--help", "optm"]) == 2
    assert "unknown group or option. Did you mean 'optim'? The groups: common, " in capsys.readouterr().err


@pytest.mark.parametrize("width", [40, 60, 120])
def test_help_fits_the_terminal(width: int) -> None:
    out = accel_train("train", "--help", COLUMNS=str(width))[1]
    long = [line for line in out.splitlines() if len(line) > width and not line.startswith(("usage:", "  --"))]
    assert all(len(line.split()) == 1 for line in long), long  # one word alone, which stays whole
