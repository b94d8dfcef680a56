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

from accel_train.cli.dispatch import COMMANDS, main
from accel_train.cli.evaluate import SIZES
from accel_train.cli.help import COMMON, groups, help_texts
from accel_train.config.option_types import option_types
from accel_train.config.recipe import recipe_names


def test_help_shows_every_option_in_groups_with_the_commonest_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    shown = re.findall(r"^  --(\S+)", text, re.MULTILINE)
    assert tuple(shown[: len(COMMON)]) == COMMON
    assert set(shown) == set(option_types()) <= set(help_texts())
    assert [line for line in text.splitlines() if line in groups()] == [*groups()]
    assert next(iter(groups())) == "common"


def test_help_shows_the_values_of_the_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("epochs: 3")
    for words, default in (["--help"], "(default: 1)"), ([str(recipe), "-h"], "(default: 3)"):
        assert main(["train", *words]) == 0
        text = capsys.readouterr().out
        assert text.startswith("usage: accel-train train [RECIPE]")
        epochs = text[text.index("--epochs NUMBER") :]
        assert default in epochs[: epochs.index("--batch-size")]
    assert "--recipe" not in text


def test_help_shows_one_group(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help", "optim"], ["digits", "--help", "optim"]):
        assert main(["train", *words]) == 0
        text = capsys.readouterr().out
        assert set(re.findall(r"^  --(\S+)", text, re.MULTILINE)) == {k for k in option_types() if "optim." in k}
        assert ("(default: 0.05)" in text) == (words[0] == "digits")
    for key, group in (("optim.lr", "optim"), ("optim.weight_decay", "optim"), ("epochs", "common")):
        assert main(["train", "--help", key]) == 0
        out = capsys.readouterr().out
        assert f"--{key.replace('_', '-')} " in out
        assert f"\n{group}\n" in out
        assert out.count("  --") == 1
    assert main(["train", "--help", "optm"]) == 2
    assert "unknown group or option. Did you mean 'optim'? The groups: common, " in capsys.readouterr().err


@pytest.mark.parametrize("width", [40, 60, 120])
def test_help_fits_the_terminal(width: int) -> None:
    out = accel_train("train", "--help", COLUMNS=str(width))[1]
    long = [line for line in out.splitlines() if len(line) > width]
    assert all(len(line.split()) == 1 or "|" in line for line in long), long  # one word alone, which stays whole


def offered(script: str, *words: str) -> set[str]:
    """Return what bash offers for the last word."""
    program = f"{script}\nCOMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _accel_train\n"
    done = subprocess.run(["bash", "-c", program + 'printf "%s\\n" "${COMPREPLY[@]}"'], capture_output=True, text=True)
    assert done.stderr == ""
    return set(done.stdout.split())


def test_tab_in_bash() -> None:
    code, out, err = accel_train("completion", "bash", program=("-c", PROGRAM))
    script, _, last = out.rstrip().rpartition("\n")
    assert (code, err, json.loads(last)) == (0, "", [0, []])  # without torch
    assert offered(script, "accel-train", "") == set(COMMANDS)
    assert offered(script, "accel-train", "tra") == {"train", "track"}
    assert offered(script, "accel-train", "train", "") == set(recipe_names())
    assert offered(script, "accel-train", "doctor", "dig") == {"digits"}
    rates = {"--optim.lr", "--optim.layer-decay"}
    assert offered(script, "accel-train", "doctor", "digits", "--optim.l") == rates
    assert offered(script, "accel-train", "train", "digits", "--optim.l") == rates
    assert offered(script, "accel-train", "train", "digits", "--optim.clip-mode", "") == {"norm", "value", "agc"}
    assert offered(script, "accel-train", "train", "digits", "--bitwise", "t") == {"true"}
    assert offered(script, "accel-train", "train", "--help", "") == set(groups())
    assert offered(script, "accel-train", "evaluate", "RUN", "--split", "") == {"test", "val", "train"}
    assert offered(script, "accel-train", "evaluate", "RUN", "--data.roo") == {"--data.root"}
    assert offered(script, "accel-train", "check-data", "folder", "--roo") == {"--root"}
    for command in ("check-data", "shards"):
        assert "--name" not in offered(script, "accel-train", command, "folder", "--")  # a word, of their base class
    for command in ("preview", "find-lr"):
        assert offered(script, "accel-train", command, "dig") == {"digits"}
        assert offered(script, "accel-train", command, "digits", "--optim.clip-m") == {"--optim.clip-mode"}
    sizes = {f"--{key}" for key in SIZES}
    assert {word for word in offered(script, "accel-train", "predict", "RUN", "--") if "." in word} == sizes
    assert sizes < offered(script, "accel-train", "evaluate", "RUN", "--")
    assert offered(script, "accel-train", "completion", "") == {"bash", "zsh"}
    assert offered(script, "accel-train", "train", "digits", "--data.root", "") == set()  # then bash offers files


def test_zsh_accepts_the_script() -> None:
    code, out, _ = accel_train("completion", "zsh")
    assert code == 0
    assert "optim.clip-mode" in out
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    line = "source /dev/stdin && (( $+functions[_accel_train] ))"
    subprocess.run(["zsh", "-c", line], input=out, text=True, check=True, env=os.environ | {"TERM": "dumb"})


def test_completion_needs_a_shell() -> None:
    code, _, err = accel_train("completion", "csh")
    assert (code, err) == (
        2,
        "accel-train: error: accel-train completion: expected one of bash, zsh, found 'csh'.\n",
    )
    assert "~/.bashrc" in accel_train("completion", "--help")[1]
