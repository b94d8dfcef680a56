"""Names of a user's own code, and what is said of a wrong one before any code runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_train.config.options import parse
from accel_train.user_code import Reference, code_file, mistakes, parse_reference

CODE = """
raise SystemExit("nobody may run this")

def net(num_classes):
    pass

class Data:
    pass
"""


@pytest.mark.parametrize(
    ("option", "text", "expected"),
    [
        ("model.name", "mine.py:net", Reference("mine.py", "", "net")),
        ("model.name", "../a b/mine.py:net", Reference("../a b/mine.py", "", "net")),
        ("model.name", "package.module:net", Reference("", "package.module", "net")),
        ("model.name", "torchvision/resnet18", None),
        ("model.name", "torchvision/mine.py:net", None),
        ("model.name", "resnet18", None),
        ("model.name", "mine.py:not a name", None),
        ("data.name", "hfds/a:b", None),
        ("data.name", "mine.py:data", Reference("mine.py", "", "data")),
        ("loss.name", "torch.nn.functional:cross_entropy", Reference("", "torch.nn.functional", "cross_entropy")),
    ],
)
def test_prefixes_come_before_files_and_files_before_modules(
    option: str, text: str, expected: Reference | None
) -> None:
    assert parse_reference(option, text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}/mine.py:nett", "has no 'nett'. Did you mean 'net'?"),
        ("{}/mine.py:xyz", "has no 'xyz'. It has net, Data."),
        ("{}/mina.py:net", "mina.py: no such file. Did you mean 'mine.py'?"),
        ("{}/mine.py", "is a file. Name the function in it, too: "),
        ("{}/broken.py:net", "broken.py:2: not valid Python: "),
        ("no_such_package.inner:net", "found no module 'no_such_package.inner' in this environment"),
    ],
)
def test_a_wrong_name_is_told_without_running_the_file(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "broken.py").write_text("x = 1\ndef net(:\n")
    (found,) = mistakes("model.name", text.format(tmp_path))
    assert message in found


def test_a_recipe_names_files_relative_to_itself_and_the_command_line_to_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/mine.py").write_text(CODE)
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "recipes/r.yaml").write_text("model: {name: 'mine.py:net', kwargs: {depth: 3, rate: 1e-3, on: true}}\n")
    monkeypatch.chdir(tmp_path)
    config = parse(["recipes/r.yaml", "--data.name", "mine.py:Data"])
    assert config.model.name == f"{tmp_path}/recipes/mine.py:net"
    assert config.data.name == f"{tmp_path}/mine.py:Data"
    assert config.model.kwargs == '{"depth": 3, "rate": 0.001, "on": true}'


def test_a_module_is_found_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text(CODE)
    (package / "inner.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    assert code_file(Reference("", "some_package.inner", "net")) == package / "inner.py"
    assert code_file(Reference("", "some_package", "net")) == package / "__init__.py"
    assert code_file(Reference("", "some_package.inner.more", "net")) is None
