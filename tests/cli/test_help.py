"""The help of train, and what Tab offers."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from test_dispatch import PROGRAM, accel_train

from accel_train.cli import COMMANDS, main
from accel_train.cli.help import COMMON, groups, help_texts
from accel_train.config.recipe import recipe_names
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


def offered(script: str, *words: str) -> set[str]:
    """Return what bash offers for the last of the words after accel-train."""
    line = shlex.join(["accel-train", *words])
    program = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}; _shtab_accel_train\n"
    done = subprocess.run(["bash", "-c", program + 'printf "%s\\n" "${COMPREPLY[@]}"'], capture_output=True, text=True)
    assert done.stderr == ""
    return set(done.stdout.split())


def test_tab_in_bash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = accel_train("completion", "bash", program=("-c", PROGRAM))
    script, _, last = out.rstrip().rpartition("\n")
    assert (code, err, json.loads(last)) == (0, "", [0, []])  # without torch
    (tmp_path / "mine.yaml").touch()
    monkeypatch.chdir(tmp_path)
    for words, expected in (
        ([""], {*COMMANDS}),
        (["tra"], {"train", "track"}),
        (["train", ""], {*recipe_names(), "mine.yaml"}),
        (["find-lr", "dig"], {"digits"}),
        (["train", "digits", "--optim.l"], {"--optim.lr", "--optim.layer-decay"}),
        (["doctor", "digits", "--augment.scale", "0.1", "1", "--optim.l"], {"--optim.lr", "--optim.layer-decay"}),
        (["train", "digits", "--augment.erase-mode", ""], {"const", "rand", "pixel"}),
        (["train", "digits", "--bitwise", "t"], {"true"}),
        (["train", "digits", "--data.root", ""], {"mine.yaml"}),
        (["train", "--help", ""], {*groups()}),
        (["evaluate", "RUN", "--split", ""], {"test", "val", "train"}),
        (["evaluate", "RUN", "--data.roo"], {"--data.root"}),
        (["evaluate", "RUN", "--optim"], set[str]()),
        (["evaluate", "RUN", "--model"], {"--model.eval-image-size"}),
        (["check-data", "folder", "--data.roo"], {"--data.root"}),
        (["shards", "folder", "--na"], set[str]()),  # a word
        (["completion", ""], {"bash", "zsh"}),
    ):
        assert offered(script, *words) == expected, words


def test_zsh_accepts_the_script() -> None:
    code, out, _ = accel_train("completion", "zsh")
    assert code == 0
    assert "augment.erase-mode" in out
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    line = "source /dev/stdin && (( $+functions[_shtab_accel_train] ))"
    subprocess.run(["zsh", "-c", line], input=out, text=True, check=True, env=os.environ | {"TERM": "dumb"})
