"""A command that takes a run runs no code and fetches nothing that the run names, unless the user says --trust-code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accel_train.config.options import parse
from accel_train.config.schema import to_yaml, value
from accel_train.errors import UserError
from accel_train.records.directory import references
from accel_train.tools.load_run import read_config
from accel_train.user_code import keep_code, load, parse_reference


def write_run(run: Path, text: str, *, update: int = 0) -> list[str]:
    """Write what a run keeps of its configuration and its code, as training does; return the notes."""
    recipe = run.parent / "recipe.yaml"
    recipe.write_text(text if text.startswith("data:") else "data: {name: digits}\n" + text)
    config = parse([str(recipe)], checks_code=False)
    (run / "code").mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(to_yaml(config))
    return keep_code(references(config), run, lambda name, content: (run / name).write_bytes(content), update)


@pytest.mark.parametrize("text", [
    'model: {name: "subprocess:getoutput", kwargs: {cmd: "true"}}',
    'data: {name: "subprocess:getoutput"}',
    'augment: {own: "timm.loss:LabelSmoothingCrossEntropy"}',
    'metrics: ["timm.loss:LabelSmoothingCrossEntropy"]',
])  # fmt: skip
def test_code_runs_only_when_the_user_says_so(tmp_path: Path, text: str) -> None:
    run, group = tmp_path / "run", text.partition(":")[0]
    option = {"augment": "augment.own", "metrics": "metrics"}.get(group, f"{group}.name")
    write_run(run, text)
    with pytest.raises(UserError, match=f"would run --{option} .*its text is {run}/code/.*--trust-code true"):
        read_config(run, uses=(option,), trust_code=False)
    read_config(run, uses=(), trust_code=False)
    trusted = value(read_config(run, uses=(option,), trust_code=True), option)
    trusted = trusted if isinstance(trusted, str) else trusted[0]
    assert trusted.startswith(f"{run}/code/")  # the text that the user could read, not the installed module


def test_one_s_own_run_asks_too_unless_other_code_is_named(tmp_path: Path) -> None:
    run, code = tmp_path / "run", tmp_path / "mine.py"
    code.write_text("def data(): ...\n")
    write_run(run, f'data: {{name: "{code}:data"}}')
    with pytest.raises(UserError, match=r"would run --data\.name"):
        read_config(run, uses=("data.name",), trust_code=False)
    named = ["--data.name", f"{code}:data"]  # this the user names
    assert read_config(run, uses=("data.name",), trust_code=False, overrides=named).data.name == f"{code}:data"


PLANTED = "from pathlib import Path\nPath({marker!r}).touch()\nwidth = 0\n"


def test_nothing_of_a_run_s_folder_is_imported(tmp_path: Path) -> None:
    """What a kept text imports comes from the user's own folder, not from a file that somebody has put beside it."""
    run, own, marker = tmp_path / "run", tmp_path / "own", tmp_path / "planted-code-was-run"
    own.mkdir()
    (own / "mine.py").write_text("from beside_trust import width\ndef net(num_classes): return width\n")
    (own / "beside_trust.py").write_text("width = 7\n")
    write_run(run, f'model: {{name: "{own}/mine.py:net"}}')
    for folder in (run, run / "code"):
        (folder / "beside_trust.py").write_text(PLANTED.format(marker=str(marker)))
    with pytest.raises(UserError, match=f"what it imports comes from {own} or the environment"):
        read_config(run, uses=("model.name",), trust_code=False)
    name = read_config(run, uses=("model.name",), trust_code=True).model.name
    reference = parse_reference("model.name", name)
    assert reference is not None
    assert load("model.name", reference)(num_classes=2) == 7
    assert not marker.exists()


@pytest.mark.parametrize("named", ["run/code/mine.py", "run/mine.py", "other/code/mine.py"])
def test_a_run_cannot_name_its_own_folder_for_imports(tmp_path: Path, named: str) -> None:
    run, marker = tmp_path / "run", tmp_path / "planted-code-was-run"
    for path in (tmp_path / named, tmp_path / "other/code.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import planted_for_trust\ndef net(num_classes): ...\n" if path.suffix == ".py" else "{}")
    write_run(run, f'model: {{name: "{tmp_path / named}:net"}}')
    (tmp_path / named).with_name("planted_for_trust.py").write_text(PLANTED.format(marker=str(marker)))
    name = read_config(run, uses=("model.name",), trust_code=True).model.name
    reference = parse_reference("model.name", name)
    assert reference is not None
    with pytest.raises(UserError, match="No module named 'planted_for_trust'"):
        load("model.name", reference)
    assert not marker.exists()


def test_a_text_that_is_not_the_recorded_one_is_refused(tmp_path: Path) -> None:
    run, code = tmp_path / "run", tmp_path / "mine.py"
    code.write_text("def net(num_classes): ...\n")
    write_run(run, f'model: {{name: "{code}:net"}}')
    (kept,) = (run / "code").iterdir()
    kept.write_text("def net(num_classes): ...  # another one\n")
    for trust in (False, True):
        with pytest.raises(UserError, match=r"not the one whose hash code\.json records; copy"):
            read_config(run, uses=("model.name",), trust_code=trust)
    kept.unlink()
    with pytest.raises(UserError, match="does not have the text of this code"):
        read_config(run, uses=("model.name",), trust_code=True)


@pytest.mark.parametrize("arguments", [
    {"pretrained_cfg": {"file": "x"}}, {"pretrained_cfg_overlay": {"url": "x"}}, {"layers": [1, {"a": 2}]},
])  # fmt: skip
def test_an_argument_of_more_than_plain_values_asks(tmp_path: Path, arguments: dict[str, object]) -> None:
    run = tmp_path / "run"
    write_run(run, f"model: {{name: resnet18, kwargs: {json.dumps(arguments)}}}")
    with pytest.raises(UserError, match=f"would use --model.kwargs '{next(iter(arguments))}'"):
        read_config(run, uses=("model.name",), trust_code=False)
    assert read_config(run, uses=("model.name",), trust_code=True).model.kwargs


def test_plain_arguments_need_no_question(tmp_path: Path) -> None:
    run = tmp_path / "run"
    kwargs = {"act_layer": "gelu", "global_pool": "avg", "layers": [1, 1, 1, 1], "base_width": 32, "aa_layer": None}
    write_run(run, f"model: {{name: resnet18, kwargs: {json.dumps(kwargs)}}}")
    read_config(run, uses=("model.name",), trust_code=False)


@pytest.mark.parametrize(("text", "named"), [
    ("data: {name: wds, root: 'https://somewhere/train-{0000..0003}.tar'}", "--data.root"),
    ("data: {name: hfds/somebody/images}", "--data.name"),
])  # fmt: skip
def test_data_of_elsewhere_is_fetched_only_when_the_user_says_so(tmp_path: Path, text: str, named: str) -> None:
    run = tmp_path / "run"
    write_run(run, text)
    with pytest.raises(UserError, match=f"would fetch {named} "):
        read_config(run, uses=("data.name",), trust_code=False)
    read_config(run, uses=("data.name",), trust_code=True)
    own = ["--data.name", "folder", "--data.root", str(tmp_path)]
    assert read_config(run, uses=("data.name",), trust_code=False, overrides=own).data.root == tmp_path


def test_no_file_is_copied_to_where_a_run_says_unless_the_user_says_so(tmp_path: Path) -> None:
    run, elsewhere, own = tmp_path / "run", tmp_path / "elsewhere", ["--data.stage", str(tmp_path / "own")]

    def stage(*overrides: str, trust: bool = False) -> Path | None:
        return read_config(run, uses=("data.name",), trust_code=trust, overrides=overrides).data.stage

    write_run(run, f"data: {{name: wds, root: {tmp_path}, stage: {elsewhere}}}")
    assert stage() is None and stage(*own) == tmp_path / "own" and stage(trust=True) == elsewhere
    write_run(run, f"data: {{name: wds, root: 'https://somewhere/shards', stage: {elsewhere}}}")
    with pytest.raises(UserError, match=f"would fetch --data.root https:.*shards into --data.stage {elsewhere}"):
        stage()
    assert stage("--data.root", str(tmp_path)) is None and stage(trust=True) == elsewhere


def test_a_start_tells_of_changed_code_and_of_a_changed_module_that_it_imports(tmp_path: Path) -> None:
    run, own = tmp_path / "run", tmp_path / "own"
    own.mkdir()
    (own / "mine.py").write_text("import beside_one\ndef net(num_classes): ...\n")
    (own / "beside_one.py").write_text("import beside_two, yaml\n")
    (own / "beside_two.py").write_text("width = 7\n")
    text = f'model: {{name: "{own}/mine.py:net"}}'
    assert write_run(run, text) == []
    assert write_run(run, text, update=4) == []
    own = own.rename(tmp_path / "moved")  # the same text in another folder is the same code
    text = f'model: {{name: "{own}/mine.py:net"}}'
    assert write_run(run, text, update=6) == []
    (own / "beside_two.py").write_text("width = 8\n")
    (note,) = write_run(run, text, update=8)
    assert "model.name: beside_two changed since the last start of this run" in note
    before = (own / "mine.py").read_text()
    (own / "mine.py").write_text(before + "# changed\n")
    (note,) = write_run(run, text, update=12)
    assert "changed since the last start of this run. From update 12 on" in note
    changed, _, old = note.partition(")")[0].partition(" (before: ")
    assert changed == f"model.name: {own}/mine.py" and (run / old).read_text() == before
