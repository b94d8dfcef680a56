"""The garbage collector is off during imports, and on again afterwards."""

import gc

import pytest

from accel_train.cli.common import importing


@pytest.fixture(autouse=True)
def collecting():
    yield
    gc.enable()


def test_collects_again_whatever_the_import_does() -> None:
    with importing(), importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), importing():
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()


def test_who_has_turned_it_off_finds_it_off() -> None:
    gc.disable()
    with importing():
        pass
    assert not gc.isenabled()
