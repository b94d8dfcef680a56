"""`accel-train submit` without a scheduler: options, the elements' names and recipes, how a job finds its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import helpers
import pytest

from accel_train.config.options import parse
from accel_train.config.schema import to_yaml
from accel_train.errors import UserError
from accel_train.tools.cluster.scheduler import Pbs, Slurm
from accel_train.tools.cluster.submission import elements_of, jobs_of_folder, jobs_to_queue, newest, words_of_element

ROOT = helpers.ROOT


def names(*over: str, seeds: str | None = None) -> list[str]:
    return [element.name for element in elements_of("digits", [], seeds, over)]


def test_each_combination_is_an_element_with_a_readable_name() -> None:
    assert names() == ["digits"]
    assert names(seeds="0-2,7") == ["seed=0", "seed=1", "seed=2", "seed=7"]
    found = names("optim.lr=0.1,0.01", "model.name=cnn", seeds="3,4")
    assert found == [f"optim.lr={lr}_model.name=cnn_seed={seed}" for lr in (0.1, 0.01) for seed in (3, 4)]
    assert names("optim.lr=0.1,0.1,0.10") == ["optim.lr=0.1"]
    scales = names("augment.crop=resized", "augment.scale=0.5 1,0.08 1")
    assert scales[1].startswith("augment.crop=resized_augment.scale=0.08-1-")


ODD = ["a b", "it's", 'a"b', "a,b", "$HOME", "`id`", "a=b", "{1: 2}", "é*?", "-x", "\\n", "x" * 300]


@pytest.mark.parametrize("value", ODD)
def test_any_value_is_kept_and_no_name_needs_a_quote(value: str, tmp_path: Path) -> None:
    """The element's recipe has the value; its name, which a shell does not change, is found in the list."""
    text = "data.root=" + value.replace(",", "\\,")
    (element,) = elements_of("digits", [], None, [text])
    assert str(element.config.data.root) == value and len(element.name) < 170
    assert set(element.name) < set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.=+-_")
    (tmp_path / "recipe.yaml").write_text(element.recipe)
    assert parse([str(tmp_path / "recipe.yaml")]) == element.config
    folder = tmp_path / "it's a $folder"
    (folder / "jobs").mkdir(parents=True)
    lines = [json.dumps({"name": name, "options": element.options}) for name in ("other", element.name)]
    (folder / "jobs" / "x.jsonl").write_text("\n".join(lines) + "\n")
    recipe, option, run = words_of_element(folder / "jobs" / "x.jsonl", "12_1")
    assert (recipe, option, run) == (f"{run}/recipe.yaml", "--output-dir", f"{folder}/{element.name}")
    assert words_of_element(folder / "jobs" / "x.jsonl", "5[1].server")[2] == run
    assert words_of_element(folder / "jobs" / "x.jsonl", "5.server")[2] == f"{folder}/other"
    (folder / "jobs" / "x.jsonl").write_text('{"name": "../../elsewhere"}\n')
    for job in ("12", "12_1"):
        with pytest.raises(UserError, match="has no element in line"):
            words_of_element(folder / "jobs" / "x.jsonl", job)


def test_values_that_look_alike_have_different_names() -> None:
    assert len({*names("data.root=a b,a-b,a_b,a;b," + "x" * 60 + "," + "x" * 61)}) == 6


def test_an_element_is_the_recipe_with_its_options(tmp_path: Path) -> None:
    words = ["--epochs", "3", "--augment.crop", "resized", "--augment.scale", "0.5", "1.0", "--trackers", "tensorboard"]
    for element in elements_of("digits", words, "1,2", ["optim.lr=0.1,0.2"]):
        assert element.config == parse(["digits", *words, *element.options])
        path = tmp_path / "recipe.yaml"
        path.write_text(element.recipe)
        assert to_yaml(parse([str(path)])) == to_yaml(element.config) == element.recipe


def test_settings_that_only_fit_together_are_accepted() -> None:
    """The recipe without them would be refused."""
    found = elements_of(
        "digits", ["--schedule.name", "multistep", "--epochs", "9"], None, ["schedule.milestones=3,3 6"]
    )
    assert [element.config.schedule.milestones for element in found] == [(3,), (3, 6)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--over", "optim.lr"], "--over: expected KEY=VALUE,VALUE, such as optim.lr=0.1,0.01, found 'optim.lr'."),
        (["--over", "lr=1,2"], "--lr: unknown option (--over). Did you mean 'optim.lr'?"),
        (["--over", "optim.lr=0.1,fast"], "--optim.lr: expected a number, found 'fast' (--over)."),
        (["--over", "optim.lr=0.1,-1"], "--optim.lr: expected a number that is not negative, found '-1' (--over)."),
        (["--over", "optim.lr=1,2", "optim.lr=3"], "--over, --seeds: optim.lr is given twice."),
        (["--over", "optim.lr=1,2", "--over=epochs=3"],
         "--over: expected all settings after one --over, such as --over optim.lr=0.1,0.01 epochs=2,4."),
        (["--seed", "3", "--seeds", "0-4"], "--over, --seeds: seed is given twice."),
        (["--over", "resume=must,never"], "--over: resume is no setting that runs can be compared by."),
        (["--seeds", "0-2", "--over", "seed=1,2"], "--over, --seeds: seed is given twice."),
        (["--seeds", "0..4"], "--seeds: expected numbers and ranges, such as 0-4 or 1,2,7-9, found '0..4'."),
        (["--seeds", "$SLURM_ARRAY_TASK_ID"],
         "--seeds: expected numbers and ranges, such as 0-4 or 1,2,7-9, found '$SLURM_ARRAY_TASK_ID'."),
        (["--seeds", "4-0"], "--seeds: 4-0 is empty: the lower number comes first."),
        (["--seeds", "0-999999999999"], "--seeds: more than 10,000 seeds."),
        (["--seeds", "0-999", "--over", "epochs=" + ",".join(map(str, range(1, 21)))],
         "20,000 elements, but one submission has at most 10,000; submit a part of them."),
        (["--epoch", "3"], "--epoch: unknown option (command line). Did you mean 'epochs'?"),
        (["--config-only"], "--config-only: an option of one start, not of submitted runs; leave it out."),
        (["--", "--array=0-3"], "--array=0-3: accel-train submit sets this option of sbatch itself; leave it out."),
        (["--over", ""], "--over: expected KEY=VALUE,VALUE, such as optim.lr=0.1,0.01, found ''."),
        (["--over"], "--over: expected all settings after one --over, such as --over optim.lr=0.1,0.01 epochs=2,4."),
        (["--", "-a", "0-3"], "-a: accel-train submit sets this option of sbatch itself; leave it out."),
    ],
)  # fmt: skip
def test_each_mistake_is_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "slurm").symlink_to(ROOT / "slurm")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(f"#!/bin/sh\ntouch {tmp_path}/queued\n")
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-m", "accel_train", "submit", "digits", *words], capture_output=True, text=True,
        cwd=tmp_path, env=environment | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"accel-train: error: {message}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "slurm"]


def test_a_seed_that_the_shell_should_have_replaced_is_told_what_to_do() -> None:
    for seed in ("$SLURM_ARRAY_TASK_ID", "${PBS_ARRAY_INDEX}", "0-4", "0,1"):
        with pytest.raises(UserError, match=r"For a job array: accel-train submit RECIPE --seeds 0-4"):
            parse(["digits", "--seed", seed])


def test_numbers_of_elements(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    for number, (job, elements) in enumerate({"7": ["a", "b"], "8": ["b"], "9[].s": ["b", "c"], "10.s": ["c"]}.items()):
        path = tmp_path / "jobs" / f"{job}.jsonl"
        path.write_text("".join(json.dumps({"name": name}) + "\n" for name in elements))
        os.utime(path, (number, number))
        path.with_suffix(".id").write_text(job + "\n")
    (tmp_path / "jobs" / "unknown.jsonl").write_text('{"name": "a"}\n')
    assert jobs_of_folder(tmp_path) == {"a": ["7_0"], "b": ["7_1", "8", "9[0].s"], "c": ["9[1].s", "10.s"]}
    assert newest(["7_1", "8"], {"7_1": "running", "8": "failed"}) == ("7_1", "running")
    assert newest(["7_1", "8"], {"7_1": "failed", "8": "finished"}) == ("8", "finished")
    assert newest(["7_1"], {}) == ("", "")


def test_the_users_variables_reach_a_job_of_pbs_beside_ours(tmp_path: Path) -> None:
    words = Pbs().command("n", tmp_path / "n.jsonl", 2, tmp_path / "s", ["-l", "select=1", "-v", "A,B=1", "-vC"])
    assert words[:2] == ["env", f"TRAIN={tmp_path}/n.jsonl"] and words[words.index("-v") + 1] == "TRAIN,A,B=1,C"
    assert words.count("-v") == 1 and words[-3:] == ["-l", "select=1", str(tmp_path / "s")]
    with pytest.raises(UserError, match="cannot pass on the quote"):
        Pbs().command("n", tmp_path / "it's.jsonl", 2, tmp_path / "s", [])
    assert "--array=0-1" in Slurm().command("n", tmp_path / "n.jsonl", 2, tmp_path / "s", [])
    assert not any("array" in word for word in Slurm().command("n", Path("n.jsonl"), 1, tmp_path / "s", []))


def test_the_same_run_on_several_numbers_of_nodes(tmp_path: Path) -> None:
    """Elements of an array share one number of nodes, so each number is a job or an array of its own."""
    found = elements_of("digits", [], "0-1", ["nodes=1,2"])
    assert [(element.name, element.nodes) for element in found] == [
        ("nodes=1_seed=0", 1), ("nodes=2_seed=0", 2), ("nodes=1_seed=1", 1), ("nodes=2_seed=1", 2),
    ]  # fmt: skip
    jobs = [*jobs_to_queue(tmp_path, found, Slurm(), tmp_path / "my.sbatch", ["--array=%1", "--time=9"])]
    assert [[element.name for element in part] for part, _, _ in jobs] == [
        ["nodes=1_seed=0", "nodes=1_seed=1"], ["nodes=2_seed=0", "nodes=2_seed=1"],
    ]  # fmt: skip
    assert all("--array=0-1%1" in words and "--array=%1" not in words for _, _, words in jobs)
    assert [[word for word in words if word.startswith("--nodes")][-1] for _, _, words in jobs] == [
        "--nodes=1",
        "--nodes=2",
    ]
    chunks = ["-l", "select=1:ncpus=4", "-J%3"]
    pbs = [words for _, _, words in jobs_to_queue(tmp_path, found, Pbs(), tmp_path / "my.pbs", chunks)]
    assert ["select=1:ncpus=4" in pbs[0], "select=2:ncpus=4" in pbs[1]] == [True, True]
    assert all("0-1%3" in words for words in pbs)
    with pytest.raises(UserError, match=r"--over nodes: give -l select=1"):
        [*jobs_to_queue(tmp_path, found, Pbs(), tmp_path / "my.pbs", [])]
    for wrong in (["nodes=0"], ["nodes=1,two"], ["nodes="], ["nodes=1", "nodes=2"]):
        with pytest.raises(UserError, match=r"--over: .*nodes"):
            elements_of("digits", [], None, wrong)
