"""The console script in its own processes: help, exit codes, and errors of one line from one process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_train import __version__

RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
# Runs the command line in this process, then says which heavy packages it has imported.
PROGRAM = """
import json, sys
from accel_train.cli import main
code = main(sys.argv[1:])
heavy = [name for name in ("torch", "torchvision", "timm", "accelerate", "numpy") if name in sys.modules]
print(json.dumps([code, heavy]))
"""

NO_ROOT = "--data.root {run}/no does not exist; name the folder that holds train/ or the class folders."


def accel_train(
    *words: str, program: tuple[str, ...] = ("-m", "accel_train"), **variables: str
) -> tuple[int, str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in RANKS} | variables
    done = subprocess.run([sys.executable, *program, *words], capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--help"], ["train", "--help"], ["evaluate", "--help"], ["predict", "-h"], ["recipes", "--help"],
        ["check-data", "--help"], ["completion", "--help"], ["after-job", "--help"], ["submit", "--help"],
        ["shards", "--help"],
    ],
)  # fmt: skip
def test_help_exits_0_and_does_not_import_torch(words: list[str]) -> None:
    code, out, err = accel_train(*words, program=("-c", PROGRAM))
    assert (code, err) == (0, "")
    *text, last = out.splitlines()
    assert json.loads(last) == [0, []]
    assert text[0].startswith("usage: accel-train" if "recipes" not in words or len(words) > 1 else "recipe ")


def test_help_lists_each_command_with_a_line() -> None:
    out = accel_train("--help")[1]
    for command in ("train", "evaluate", "predict", "recipes", "check-data"):
        assert sum(line.split()[:1] == [command] for line in out.splitlines()) == 1
    assert accel_train()[:2] == (2, out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "unknown command 'trian'. Did you mean 'train'? See accel-train --help."),
        (["train"],
         "no recipe: accel-train train RECIPE [--key value …]; `accel-train recipes` lists the recipes. Without a "
         "recipe, give --model.name and --data.name (and --data.root)."),
        (["evaluate"], "accel-train evaluate: RUN is missing; accel-train evaluate RUN [--key value …]"),
        (["evaluate", "{run}", "other"], "'other': neither an option nor the value of one; "
         "options are written --key value, and a switch is true or false."),
        (["evaluate", "{run}", "--split"], "--split: expected one of test, val, train, found no value (command line)."),
        (["evaluate", "{run}", "--data.rot=3"],
         "--data.rot: unknown option (command line). Did you mean 'data.root'?"),
        (["evaluate", "no/run"],
         "no/run: not a run, because there is no such folder; give the folder that training wrote (runs/RECIPE/…)."),
        (["completion", "csh"], "SHELL: expected one of bash, zsh, found 'csh'."),
        (["after-job", "x"], "CODE: expected a whole number, found 'x'."),
        (["predict", "{run}", "a.png"], "a.png: no such image or folder."),
        (["predict", "{run}", "{run}", "--top-k=0"],
         "--top-k: expected a number greater than 0, found '0' (command line)."),
        (["predict", "{run}", "{run}", "--output", "a.txt"],
         "--output: expected a name that ends in .csv, found 'a.txt' (command line)."),
        *[([*words, "folder", "--data.root", "{run}/no"], NO_ROOT) for words in
          (["train", "digits", "--data.name"], ["find-lr", "digits", "--data.name"], ["check-data"])],
        (["bench", "digits", "--data.name", "folder", "--data.root", "{run}/no"],
         f"{NO_ROOT} Or measure on synthetic images: --data.name synthetic."),
        (["train", "digits", "--data.root", "x"], "--data.root x: --data.name is digits, which come with the package "
         "and are not read from there. For your own data give its kind, too: --data.name folder."),
        (["train", "digits", "--data.name", "csv", "--data.root", "no.csv"],
         "--data.root no.csv does not exist; name a CSV file."),
        (["recipes", "no_such_one"], "unknown recipe 'no_such_one'. `accel-train recipes` lists the recipes; "
         "to use a file of your own, give its path, which ends in .yaml."),
    ],
)  # fmt: skip
def test_an_error_is_one_line_without_torch(words: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("epochs: 1")
    (tmp_path / "config.yaml").write_text("epochs: 1")
    names = {"{recipe}": str(tmp_path / "r.yaml"), "{run}": str(tmp_path)}
    words = [names.get(word, word.replace("{run}", str(tmp_path))) for word in words]
    code, out, err = accel_train(*words, program=("-c", PROGRAM))
    assert err == f"accel-train: error: {message.replace('{run}', str(tmp_path))}\n"
    assert (code, json.loads(out)) == (0, [2, []])


def test_several_mistakes_are_one_line_each_and_told_by_one_process(tmp_path: Path) -> None:
    words = ["train", "digits", "--epoch", "3", "--optim.lr", "fast\nest", "--seed", "-1"]
    code, out, err = accel_train(*words, program=("-c", PROGRAM))
    assert (code, json.loads(out)) == (0, [2, []])
    assert err.splitlines() == [
        "accel-train: error: --epoch: unknown option (command line). Did you mean 'epochs'?",
        r"accel-train: error: --optim.lr: expected a number, found 'fast\nest' (command line).",
        "accel-train: error: --seed: expected a number that is not negative, found '-1' (command line).",
    ]
    assert accel_train(*words, RANK="1") == (2, "", "")


def test_the_exit_code_is_2_however_it_is_started() -> None:
    script = str(Path(sys.executable).with_name("accel-train"))
    done = subprocess.run([script, "trian"], capture_output=True, text=True)
    assert accel_train("trian") == (done.returncode, done.stdout, done.stderr) and done.returncode == 2


@pytest.mark.ci
def test_traceback_is_shown_on_request_only() -> None:
    for words in (["train", "no_such"], ["evaluate", "no_such"]):
        code, _, err = accel_train(*words, "--traceback")
        assert code == 2
        assert err.startswith("Traceback")
        assert err.splitlines()[-1].startswith("accel-train: error: ")
        assert "Traceback" not in accel_train(*words)[2]


@pytest.mark.parametrize(
    ("variables", "speaks"),
    [
        ({"RANK": "0"}, True),
        ({"RANK": "1"}, False),
        ({"SLURM_PROCID": "3"}, False),
        ({"OMPI_COMM_WORLD_RANK": "1"}, False),
        ({"RANK": "1", "SLURM_PROCID": "0"}, False),  # a launcher in the first Slurm task
    ],
)
def test_one_process_speaks_and_all_fail(variables: dict[str, Any], speaks: bool) -> None:
    code, _, err = accel_train("train", "no_such_recipe", **variables)
    assert code == 2
    assert bool(err) is speaks


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("fail", (2, "", "accel-train: error: an unreadable image\n")),  # of this process alone
        ("interrupt", (130, "", "")),
    ],
)
def test_an_error_of_one_process_is_told_by_it_and_an_interrupt_is_quiet(function: str, expected: Any) -> None:
    program = f"""
import os, signal, sys, time
from accel_train import cli
from accel_train.cli import recipes
from accel_train.errors import UserError
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background inherits that it is ignored
def fail(words):
    raise UserError("an unreadable image", every_process=False)
def interrupt(words):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
recipes.recipes = {function}
sys.exit(cli.main(["recipes"]))
"""
    assert accel_train(program=("-c", program), RANK="5") == expected


def at_a_terminal(*words: str, **variables: str) -> tuple[str, str]:
    """Return the first line of `accel-train WORDS` on stderr, and the rest."""
    terminal, inside = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "accel_train", *words],
        env={**os.environ, "TERM": "dumb", **variables},
        stdout=subprocess.DEVNULL,
        stderr=inside,
    )
    os.close(inside)
    with os.fdopen(terminal, "rb", buffering=0) as shown:
        first = b""
        with contextlib.suppress(OSError):  # how a terminal says that nobody is there any more
            while not first.endswith(b"\n") and (byte := shown.read(1)):
                first += byte
        rest = b""
        with contextlib.suppress(OSError):
            while more := shown.read(1000):
                rest += more
    process.wait()
    return first.decode().rstrip("\r\n"), rest.decode()


@pytest.mark.slow
def test_a_terminal_sees_at_once_that_it_has_begun(tmp_path: Path) -> None:
    stub = "import os, sys; print('the import of torch has begun', file=sys.stderr, flush=True); os._exit(3)"
    (tmp_path / "torch.py").write_text(stub)  # found first
    first, rest = at_a_terminal("train", "digits", ACCELERATE_USE_CPU="true", PYTHONPATH=str(tmp_path))
    assert first == f"accel-train {__version__}: digits; importing torch …"
    assert rest.strip() == "the import of torch has begun"
    # not before an error that comes without torch, nor into what is read by other programs
    assert at_a_terminal("train", "digits", "--epoch", "3")[0].startswith("accel-train: error: --epoch")
    assert at_a_terminal("train", "digits", "--config-only") == ("", "")


@pytest.mark.slow
def test_output_may_be_cut_short_and_the_locale_plain() -> None:
    command = f"{sys.executable} -m accel_train train --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.startswith("usage: accel-train train [RECIPE]")
    assert done.stderr == ""
    command = f"{sys.executable} -m accel_train train digits --config-only | true"
    assert subprocess.run(["bash", "-c", command], capture_output=True, text=True).stderr == ""
    code, out, err = accel_train("--help", PYTHONIOENCODING="latin-1", PYTHONUTF8="0")
    assert (code, err) == (0, "")
    assert "COMMAND ?" in out


@pytest.mark.slow
def test_recipes_are_listed_whole_and_printed(tmp_path: Path) -> None:
    from accel_train.config.recipe import RECIPES, recipe_names

    code, out, _ = accel_train("recipes", COLUMNS="20")
    head, *rows = out.splitlines()
    assert code == 0
    assert head.split("  ")[0] == "recipe"
    assert [row.split()[0] for row in rows] == recipe_names()
    for name in recipe_names():
        assert accel_train("recipes", name)[1] == (RECIPES / f"{name}.yaml").read_text()
