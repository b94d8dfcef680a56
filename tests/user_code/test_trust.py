"""Somebody else's run runs no code and opens no file; a run that this user has trained needs no question."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from accel_train.analysis.load_run import read_config
from accel_train.config.options import parse
from accel_train.config.schema import to_yaml
from accel_train.errors import UserError
from accel_train.records.provenance import keep_code, remember_training, trained_code


def write_run(run: Path, text: str, *, trained: bool) -> None:
    """Write what a run keeps of its configuration and its code, as training or as somebody else would."""
    recipe = run.parent / "recipe.yaml"
    recipe.write_text(text if text.startswith("data:") else "data: {name: digits}\n" + text)
    config = parse([str(recipe)], checks_code=False)
    (run / "code").mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(config))
    keep_code(config, run, lambda name, content: (run / name).write_bytes(content), 0)
    if trained:
        assert remember_training(config) == []


def is_trained(run: Path) -> bool:
    return trained_code(run, (run / "config.yaml").read_text()) is not None


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state/accel_train/trained"


@pytest.mark.parametrize("text", [
    'model: {name: "subprocess:getoutput", kwargs: {cmd: "true"}}',
    'data: {name: "subprocess:getoutput"}',
    'loss: {name: "timm.loss:LabelSmoothingCrossEntropy"}',
])  # fmt: skip
def test_equal_bytes_are_no_reason_to_run_code(tmp_path: Path, text: str) -> None:
    run, option = tmp_path / "run", text.partition(":")[0] + ".name"
    write_run(run, text, trained=False)
    with pytest.raises(UserError, match="--trust-code true"):
        read_config(run, uses=(option,), trust_code=False)
    trusted = getattr(read_config(run, uses=(option,), trust_code=True), option.partition(".")[0]).name
    assert trusted.startswith(f"{run}/code/")  # the text that the user could read, not the installed module


def test_a_run_is_trusted_if_this_user_has_trained_it_with_these_bytes_and_arguments(tmp_path: Path) -> None:
    run, code = tmp_path / "run", tmp_path / "mine.py"
    code.write_text("def net(num_classes, width=1): ...\n")
    write_run(run, f'model: {{name: "{code}:net", kwargs: {{width: 2}}}}', trained=True)
    assert read_config(run, uses=("model.name",), trust_code=False).model.name == f"{code}:net"
    moved = run.rename(tmp_path / "moved")
    assert is_trained(moved)
    configuration = moved / "config.yaml"
    configuration.write_text(
        configuration.read_text().replace('"width": 2', '"width": 3').replace("width: 2", "width: 3")
    )
    with pytest.raises(UserError, match="have not trained"):
        read_config(moved, uses=("model.name",), trust_code=False)


def test_records_that_others_could_have_written_do_not_count(tmp_path: Path, state: Path) -> None:
    run = tmp_path / "run"
    write_run(run, "model: {name: resnet18, kwargs: {checkpoint_path: /any/file}}", trained=True)
    assert is_trained(run)
    record = next(state.iterdir())
    assert (state.stat().st_mode & 0o777, record.stat().st_mode & 0o777) == (0o700, 0o600)
    for path in (state, record):
        before = path.stat().st_mode
        path.chmod(before | 0o020)
        assert not is_trained(run)
        path.chmod(before)
    if os.getuid() == 0:
        os.chown(record, 12345, -1)
        assert not is_trained(run)


def test_a_home_that_cannot_be_written_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    config = parse(["digits", "--model.kwargs", '{"width": 2}'], checks_code=False)
    assert "--trust-code true" in " ".join(remember_training(config))


@pytest.mark.parametrize("arguments", [
    {"checkpoint_path": "/any/file"}, {"checkpoint_path": "name"}, {"pretrained_cfg": {"file": "x"}},
    {"pretrained_cfg_overlay": {"url": "x"}}, {"weights": "DEFAULT"}, {"weights": True}, {"act_layer": "os.system"},
    {"block": "name"}, {"cache_dir": 3},
])  # fmt: skip
def test_an_argument_that_could_open_a_file_is_refused_before_the_model_is_made(
    tmp_path: Path, arguments: dict[str, object]
) -> None:
    run = tmp_path / "run"
    write_run(run, f"model: {{name: resnet18, kwargs: {json.dumps(arguments)}}}", trained=False)
    with pytest.raises(UserError, match=f"'{next(iter(arguments))}' could open a file"):
        read_config(run, uses=("model.name",), trust_code=False)
    assert read_config(run, uses=("model.name",), trust_code=True).model.kwargs


def test_harmless_arguments_need_no_question(tmp_path: Path) -> None:
    run = tmp_path / "run"
    kwargs = {"act_layer": "gelu", "global_pool": "avg", "layers": [1, 1, 1, 1], "base_width": 32, "aa_layer": None}
    write_run(run, f"model: {{name: resnet18, kwargs: {json.dumps(kwargs)}}}", trained=False)
    read_config(run, uses=("model.name",), trust_code=False)


def test_what_is_checked_is_what_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who can write in the run's folder puts other files there a moment after they were looked at."""
    run, code = tmp_path / "run", tmp_path / "mine.py"
    code.write_text("def net(num_classes): ...\n")
    write_run(run, f'model: {{name: "{code}:net"}}', trained=True)
    own, evil = (run / "config.yaml").read_text(), tmp_path / "evil.py"
    evil.write_text("def net(num_classes): ...  # evil\n")

    def swapped(folder: Path, text: str) -> dict[str, str] | None:
        found = trained_code(folder, text)
        (run / "config.yaml").write_text(own.replace(str(code), str(evil)))
        for kept in (run / "code").iterdir():
            kept.write_text(evil.read_text())
        return found

    monkeypatch.setattr("accel_train.analysis.load_run.trained_code", swapped)
    assert read_config(run, uses=("model.name",), trust_code=False).model.name == f"{code}:net"
    monkeypatch.undo()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(UserError, match="--trust-code true"):
        read_config(run, uses=("model.name",), trust_code=False)
