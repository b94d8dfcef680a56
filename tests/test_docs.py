"""README.md and docs: the programs accept each command, each snippet works, each path exists.

Commands that need only the embedded digits really run, shortened. The programs' own option
parsers read the rest.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import helpers
import pytest
from accelerate.commands.launch import launch_command_parser
from PIL import Image
from reference import BUILT
from torch.distributed.run import get_args_parser as torchrun_parser

from accel_train.cli import COMMANDS, command_class
from accel_train.cli.jobs import Submit, divide
from accel_train.cli.recipes import FOLDERS, Bench, FindLr, Preview
from accel_train.cli.train import Doctor
from accel_train.config.options import parse, parse_command, parse_command_of_recipe
from accel_train.config.schema import option_types
from accel_train.data.image_transform import check_own
from accel_train.tools.cluster.submission import elements_of

ROOT = helpers.ROOT
OF_RECIPE: dict[str, Any] = {"bench": Bench, "doctor": Doctor, "find-lr": FindLr, "preview": Preview}
WRITTEN = sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name not in BUILT)
PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{name}" for name in WRITTEN))
OWN = ("docs/own.md", "docs/from_python.md")
"""The files and commands of these pages are run in this order."""
OTHER_PROGRAMS = {
    "cd",
    "cmp",
    "cp",
    "echo",
    "export",
    "git",
    "head",
    "hf",
    "pip",
    "python3",
    "source",
    "tail",
    "tensorboard",
    "trap",
    ".venv/bin/pip",
}
SBATCH = {
    "--nodes",
    "--ntasks-per-node",
    "--gpus",
    "--gpus-per-node",
    "--gpus-per-task",
    "--cpus-per-task",
    "--mem",
    "--signal",
}


def text_of(page: str) -> str:
    """Return a page, without the text on other trainers' files and options: coming_from.md is about nothing else."""
    return "" if page == "docs/coming_from.md" else (ROOT / page).read_text().split("## Other trainers")[0]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands_in(script: str) -> Iterator[list[str]]:
    """Return the commands of a shell script as words, also those inside bash -c."""
    script = re.sub(r"\$\(\(.*?\)\)|\$\(.*?\)|\$\w+", "1", script.replace("\\\n", " "))  # what the shell fills in
    for line in script.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&;|")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word and set(word) <= set("&;|"):
                if words:
                    yield from unwrapped(words)
                words = []
            elif words or not re.match(r"\w+=", word):  # VARIABLE=value before a command
                words.append(word)


def unwrapped(words: list[str]) -> Iterator[list[str]]:
    """A command; of one that starts bash -c SCRIPT NAME WORD…, the commands of SCRIPT."""
    if words[0] == "srun":
        at = words.index("-c")
        yield from commands_in(words[at + 1].replace('"$@"', shlex.join(words[at + 3 :])))
    else:
        yield words[words[0] == "exec" :]


def check(words: list[str]) -> None:
    """Fail if a program does not accept this command."""
    program, rest = words[0], words[1:]
    if program.endswith("accel-train"):
        check_accel_train(rest)
    elif program == "python" and rest[0] == "-m":
        assert rest[1] in ("accel_train", "accel_train.train"), words
        check_module(rest[1], rest[2:])
    elif program == "accelerate":
        assert rest[0] == "launch", words
        found = launch_command_parser().parse_args(rest[1:])
        assert (ROOT / found.config_file).is_file(), words
        if found.training_script.startswith("examples/"):
            check_example(found.training_script, found.training_script_args)
        else:
            assert found.module, words
            check_module(found.training_script, found.training_script_args)
    elif program == "torchrun":
        found = torchrun_parser().parse_args(rest)
        assert found.module, words
        check_module(found.training_script, found.training_script_args)
    elif program == "sbatch":
        script = next(at for at, word in enumerate(rest) if not word.startswith("-"))
        assert {option.partition("=")[0] for option in rest[:script]} <= SBATCH, words
        assert (ROOT / rest[script]).is_file(), words
        check_accel_train(["train", *rest[script + 1 :]])
    elif program == "qsub":
        assert (ROOT / rest[-1]).is_file(), words
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    elif program == "python" and rest[0].startswith("examples/"):
        check_example(rest[0], rest[1:])
    elif program == "python" and rest[0] != "-m":
        assert (ROOT / rest[0]).is_file() or any(f"# {rest[0]}\n" in text_of(page) for page in OWN), words
    elif rest and program == "export" and rest[0].startswith("TRAIN="):
        check_accel_train(["train", *rest[0].removeprefix("TRAIN=").split()])
    else:
        assert program in OTHER_PROGRAMS, words


def check_example(file: str, rest: list[str]) -> None:
    assert {word for word in rest if word.startswith("--")} <= {*re.findall(r'"(--[\w-]+)"', (ROOT / file).read_text())}


def check_module(module: str, rest: list[str]) -> None:
    assert module in ("accel_train", "accel_train.train"), module
    check_accel_train(rest if module == "accel_train" else ["train", *rest])


def check_accel_train(rest: list[str]) -> None:
    recipes = ("RECIPE", "my_recipe.yaml", "./my_recipe.yaml", "photos.yaml")
    command, words = rest[0], ["digits" if word in recipes else word for word in rest[1:]]
    assert command in COMMANDS, command
    if command == "train":
        parse(words, checks_code=False)
    elif command == "submit":
        ours, _ = divide(words)
        options, given = parse_command(Submit, ours)
        assert elements_of(options.recipe, given, options.seeds, options.over), rest
    elif command in OF_RECIPE:
        parse_command_of_recipe(OF_RECIPE[command], words)
    else:  # those of the README run, below
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options_of(command), rest


def options_of(command: str) -> set[str]:
    """The options of a command: those of its class, and the options of train that it takes, too."""
    cls = command_class(command)
    more = [key for key in option_types() if key.startswith(cls.TRAIN_OPTIONS)]
    return {f"--{key}" for key in (*option_types(cls), *more)}


@pytest.mark.parametrize("page", PAGES)
def test_each_command_is_accepted(page: str) -> None:
    for block in blocks(text_of(page), "bash"):
        syntax = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True)
        assert syntax.returncode == 0, syntax.stderr
        for words in commands_in(block):
            check(words)


@pytest.mark.parametrize("page", PAGES)
def test_each_path_exists(page: str) -> None:
    """Links, and `code` that is a path of the repository or of the package, from its root or from a package of it."""
    text = (ROOT / page).read_text()
    built = BUILT if page.startswith("docs/") else ()  # on the site, but not in the repository
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    lost = [link for link in links if link not in built and not ((ROOT / page).parent / link).exists()]
    folders = {path.name for top in (ROOT, ROOT / "accel_train") for path in top.iterdir() if path.is_dir()} - {"runs"}
    for path in re.findall(r"`([\w.-]+/[\w./-]*)`", text.split("## Other trainers")[0]):
        is_ours = path.partition("/")[0] in folders and not re.search("NAME|PACKAGE|FILE", path)
        if is_ours and not any((top / path).exists() for top in (ROOT, ROOT / "accel_train")):
            lost.append(path)
    assert lost == []


def run_commands(folder: Path) -> list[tuple[list[str], int]]:
    """Run the README's commands that need only digits or a few images, in one process: (words, exit code) of each.

    They run with a copy of the package, beside the files of the pages on own data and own models.
    """
    for name in ("accel_train", *FOLDERS):
        shutil.copytree(ROOT / name, folder / name)
    write_snippets(folder)
    for name in ("PetImages/Cat/1.jpg", "PetImages/Cat/2.jpg", "PetImages/Dog/3.jpg", "photo.png", "folder/1.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), "gray").save(folder / name)
    lines = []
    for block in blocks(text_of("README.md"), "bash"):
        for program, *words in commands_in(block):
            # submit needs a batch system: tests/cluster/test_submit.py
            if (
                program == "accel-train"
                and words[0] != "submit"
                and (words[0] not in ("train", "bench") or words[1] == "digits")
            ):
                lines.append(["run" if word.startswith("runs/") else word for word in words])
                if words[0] == "train":
                    name = "run" if len(words) == 2 else "stripes" if "stripes.py:data" in words else "bitwise"
                    name = next((word for word in words if word in ("--data.sampler", "--stop.hours")), name).lstrip(
                        "-"
                    )
                    lines[-1] += ["--epochs", "1", "--output-dir", name]
    script = (
        "import json, sys; import accel_train; from accel_train.cli import main; print(accel_train.__file__); "
        "print(json.dumps([main(words) for words in json.loads(sys.argv[1])]))"
    )
    line = [sys.executable, "-c", script, json.dumps([["recipes", "digits"], *lines])]
    ran = subprocess.run(
        line, cwd=folder, env=helpers.environment(PYTHONPATH=""), capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.startswith(str(folder)), ran.stdout
    return list(zip(lines, json.loads(ran.stdout.splitlines()[-1])[1:], strict=True))


def write_snippets(folder: Path) -> None:
    """Write the files of the pages: each block's first line is `# NAME`."""
    for page in OWN:
        for language in ("python", "yaml"):
            for block in blocks(text_of(page), language):
                (folder / block.splitlines()[0].removeprefix("# ")).write_text(block)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_pages_on_own_data_and_models_work_as_they_are(tmp_path: Path) -> None:
    """In a folder that has only these files and the launch configs, as `accel-train init` writes them."""
    write_snippets(tmp_path)
    ran = 0
    torchmetrics = find_spec("torchmetrics") is not None
    for page in OWN:
        for block in blocks(text_of(page).split("## A loop of your own")[0], "bash"):  # which test_own_loop.py runs
            for program, *words in commands_in(block):
                if "scores.py:auc" in words and not torchmetrics:
                    continue
                if program == "python":
                    done = helpers.python(*words, cwd=tmp_path)
                    assert done.returncode == 0, (words, done.stderr)
                    continue
                processes = 2 if program == "accelerate" else 1
                words = ["train", *words[words.index("accel_train.train") + 1 :]] if processes == 2 else words
                done = helpers.python("-m", "accel_train", *words, processes=processes, cwd=tmp_path)
                assert done.returncode == 0, (words, done.stderr)
                ran += 1
    assert ran == 27 + torchmetrics
    assert len(list((tmp_path / "runs").glob("*/result.json"))) == 21 + torchmetrics
    for name in ("arrows", "arrows_2", "stripes", "shades", "scans"):
        assert json.loads((tmp_path / "runs" / name / "result.json").read_text())["test_accuracy"] > 0.9
    assert json.loads((tmp_path / "runs" / "shapes" / "result.json").read_text())["test_map"] > 0.8
    assert json.loads((tmp_path / "runs" / "net" / "result.json").read_text())["test_accuracy"] > 0.8
    done = helpers.python("notebook.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "('left', 'right') tensor([[" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("2 test ")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tutorial_works_as_it_is(tmp_path: Path) -> None:
    """All its commands but those that install, in one folder, as they are there (photographs smaller)."""
    import numpy as np
    import timm
    import torch

    page = text_of("docs/tutorial.md")
    (recipe,) = blocks(page, "yaml")
    (tmp_path / recipe.splitlines()[0].removeprefix("# ")).write_text(recipe)
    torch.manual_seed(0)
    torch.save(timm.create_model("resnet18").state_dict(), tmp_path / "resnet18.pth")  # of 1000 classes
    for name, low in (("cat", 0), ("dog", 100)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(40):
            pixels = np.random.default_rng(number + low).integers(low, low + 150, (40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.jpg")
    ran = []
    for block in blocks(page, "bash"):
        for program, *words in commands_in(block):
            if program not in ("accel-train", "accelerate"):
                continue
            processes = 2 if program == "accelerate" else 1
            words = ["train", *words[words.index("accel_train.train") + 1 :]] if processes == 2 else words
            if "--model.pretrained" in words:  # needs a network: the page says what to give without one
                without = ["--model.weights", "resnet18.pth", "--model.image-size", "32"]  # small images are fast
                words = [*words[: (at := words.index("--model.pretrained"))], *without, *words[at + 2 :]]
            done = helpers.python("-m", "accel_train", *words, processes=processes, cwd=tmp_path, timeout=300)
            assert done.returncode == 0, (words, done.stderr)
            ran.append(words[0])
    assert ran == ["train", "train", "train", "init", "train", "report", "evaluate", "report",
                   "check-data", "train", "evaluate", "report", "predict"]  # fmt: skip
    results = {run.name: json.loads((run / "result.json").read_text()) for run in (tmp_path / "runs").iterdir()}
    assert {name: result["epochs"] for name, result in results.items()} == {
        "first": 3, "more": 6, "longer": 12, "two": 3, "photos": 4,
    }  # fmt: skip
    # Longer is better, as the page says.
    first, more, longer = (results[name]["test_accuracy"] for name in ("first", "more", "longer"))
    assert first < more <= longer
    for path in ("comparison.html", "runs/two/report.html", "runs/photos/report.html"):
        assert (tmp_path / path).is_file()
    rows = (tmp_path / "found.csv").read_text().splitlines()
    assert len(rows) == 1 + 80 * 2 and rows[1].startswith("photos/cat/0.jpg,1,")


@pytest.mark.slow
def test_the_page_on_evaluation_works_as_it_is(digits_run: Path, tmp_path: Path) -> None:
    page = text_of("docs/evaluate.md").split("## A report")[0]  # what follows shows only how to call it
    (tmp_path / "runs").mkdir()
    shutil.copytree(digits_run, tmp_path / "runs" / "mine")
    helpers.write_digits(tmp_path / "new_images")
    for block in blocks(page, "bash"):
        for _, *words in commands_in(block):
            done = helpers.python("-m", "accel_train", *words, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
    snippets = {re.match(r"# (\S+)\n", code)[1]: code for code in blocks(page, "python")}  # type: ignore[index]
    for file, code in snippets.items():
        (tmp_path / file).write_text(code)
    told = helpers.python("figures.py", cwd=tmp_path).stdout
    record = json.loads((tmp_path / "runs" / "mine" / "evaluation-test.json").read_text())["ema"]
    assert told.startswith(f"accuracy {record['accuracy']:.2%}\n")
    # Of the classification report: macro avg, precision, recall, f1.
    row = next(line for line in told.splitlines() if "macro avg" in line).split()
    assert row[2:5] == [f"{record[name]:.2f}" for name in ("precision", "recall", "f1")]
    for file, shown in (("views.py", "probabilities.sum(1)"), ("embeddings.py", "embeddings[0].shape"),
                        ("temperature.py", "0.01 < temperature < 100")):  # fmt: skip
        (tmp_path / "shown.py").write_text(f"from {file.removesuffix('.py')} import *\nprint({shown})\n")
        done = helpers.python("shown.py", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (40, 40)).save(tmp_path / "photos" / name / "0.png")
    without_network = snippets["published.py"].replace("resnet50.a1_in1k", "test_resnet").replace("=True", "=False")
    (tmp_path / "published.py").write_text(without_network)
    assert helpers.python("published.py", cwd=tmp_path).stdout.startswith("accuracy ")


@pytest.mark.slow
def test_the_page_on_export_works_as_it_is(digits_run: Path, tmp_path: Path) -> None:
    """But for the upload. The script runs where nothing but onnxruntime, NumPy and Pillow can be imported."""
    page = text_of("docs/export.md")
    run = tmp_path / "runs" / "mine"
    shutil.copytree(digits_run, run)
    for code in blocks(page, "python"):
        (tmp_path / code.splitlines()[0].removeprefix("# ")).write_text(code)
    for block in blocks(page, "bash")[:2]:
        for program, *words in commands_in(block):
            if program == "accel-train":
                done = helpers.python("-m", "accel_train", *words, cwd=tmp_path)
                assert done.returncode == 0, done.stderr
            else:
                assert words == ["classify.py", "runs/mine/export-onnx", "digit.png"]
    images = helpers.write_digits(tmp_path / "images")
    predicted = helpers.python("-m", "accel_train", "predict", run, *images, "--output", tmp_path / "p.csv")
    assert predicted.returncode == 0, predicted.stderr
    expected = [line["predictions"][0]["class"] for line in helpers.classes_in(tmp_path / "p.csv")]
    without = (
        "import runpy, sys; from importlib.metadata import packages_distributions; "
        "allowed = {'numpy', 'onnxruntime', 'PIL', 'flatbuffers', 'google'}; "
        "sys.modules.update({name: None for name in packages_distributions() if name not in allowed}); "
        "sys.argv[1:2] = []; assert sys.modules['torch'] is None; runpy.run_path('classify.py', run_name='__main__')"
    )
    found = []
    for image in images:
        line = [sys.executable, "-c", without, "-", "runs/mine/export-onnx", str(image)]
        ran = subprocess.run(line, cwd=tmp_path, env=helpers.environment(PYTHONPATH=""), capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        found.append(ran.stdout.strip())
    assert found == expected and len(found) == 5

    assert helpers.python("-m", "accel_train", "export", run, "--format", "pt2").returncode == 0
    done = helpers.python("classify_pt2.py", cwd=tmp_path)
    assert done.stdout.strip() in list("0123456789"), done.stderr


@pytest.mark.ci
def test_the_commands_that_can_run_do_and_the_snippets_train(tmp_path: Path) -> None:
    codes = run_commands(tmp_path)
    assert {words[0] for words, _ in codes} == {
        "recipes",
        "init",
        "train",
        "evaluate",
        "predict",
        "report",
        "runs",
        "check-data",
        "shards",
        "doctor",
        "find-lr",
        "preview",
    }
    assert [words for words, code in codes if code != 0] == []
    for name in ("run/result.json", "run/evaluation-test.json", "unreadable-PetImages.txt"):
        assert (tmp_path / name).is_file(), name
    result = json.loads((tmp_path / "stripes" / "result.json").read_text())
    assert result["settings"]["data.name"] == "stripes.py:data"
    assert result["test_accuracy"] > 0.9


def test_each_snippet_is_tried() -> None:
    """They are above; the snippet of another page needs a test of its own."""
    tried = {*OWN, *(f"docs/{name}.md" for name in ("augmentation", "evaluate", "export"))}
    assert {page for page in PAGES if blocks(text_of(page), "python")} == tried


def test_the_transform_of_the_page_on_augmentation_is_taken(tmp_path: Path) -> None:
    (code,) = blocks(text_of("docs/augmentation.md"), "python")
    (tmp_path / "mine.py").write_text(code)
    check_own(f"{tmp_path / 'mine.py'}:augment", 3, 32)


@pytest.mark.slow
def test_the_observer_of_the_page_works(tmp_path: Path) -> None:
    write_snippets(tmp_path)
    done = helpers.python("observe.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "begins at 0 in runs/watched" in lines
    first = next(int(line.split()[-1]) for line in lines if line.startswith("interrupted the observer Watch after"))
    assert lines[-1].startswith("False the observer Watch ['update-") and first < 120
