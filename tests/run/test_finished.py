"""A start in the directory of a finished run: nothing is left, or it is refused. No program is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accel_train.config.compatibility import FORMAT, learning_settings
from accel_train.config.schema import Config, Optim, Schedule
from accel_train.errors import UserError
from accel_train.run.start import find_result


class TestEarlierEnd:
    """Reading result.json, without starting a program."""

    CONFIG = Config(recipe="mine", epochs=3, optim=Optim(lr=0.2))

    def finished(self, run: Path, **values: Any) -> Path:
        (run / "checkpoints" / "update-00000009").mkdir(parents=True)
        result = {"format": FORMAT, "recipe": "mine", "epochs": 3, "updates": 9}
        result["settings"] = learning_settings(self.CONFIG)
        (run / "result.json").write_text(json.dumps(result | values))
        return run

    def test_no_result(self, tmp_path: Path) -> None:
        assert find_result(tmp_path / "nothing", self.CONFIG) is None

    def test_a_result_is_of_its_settings(self, tmp_path: Path) -> None:
        run = self.finished(tmp_path)
        found = find_result(run, self.CONFIG)
        assert found is not None and found["updates"] == 9
        with pytest.raises(UserError, match=r"3 epochs.*: seed: 0 -> 1\. Give another --output-dir, for a new run"):
            find_result(run, Config(recipe="mine", epochs=3, optim=Optim(lr=0.2), seed=1))

    def test_another_recipes_result(self, tmp_path: Path) -> None:
        settings = {"data.name": "mnist", "epochs": 3}
        run = self.finished(tmp_path / "other", recipe="other", settings=settings)
        with pytest.raises(UserError, match=r"data\.name: mnist -> digits"):
            find_result(run, self.CONFIG)

    @pytest.mark.parametrize(
        "content", [b"", b"{}", b"[1]", b"\xff", b"[" * 9999, b'{"recipe": "mine", "epochs": "3", "updates": 9}']
    )
    def test_a_damaged_one_is_refused(self, tmp_path: Path, content: bytes) -> None:
        run = self.finished(tmp_path)
        (run / "result.json").write_bytes(content)
        with pytest.raises(UserError, match=r"result\.json is damaged\. Delete it"):
            find_result(run, self.CONFIG)
        assert (run / "result.json").read_bytes() == content

    def test_a_late_result_finishes_no_run(self, tmp_path: Path) -> None:
        """An earlier owner wrote it after a later one had begun to train."""
        run = self.finished(tmp_path, generation=1)
        for number, found in ((1, True), (2, False)):
            (run / "generations").mkdir(exist_ok=True)
            (run / "generations" / f"{number:08d}.json").write_text(f'{{"generation": {number}, "update": 5}}')
            assert (find_result(run, self.CONFIG) is not None) == found

    @pytest.mark.parametrize("schedule", ["constant", "cosine"])
    def test_a_later_end_is_refused_with_the_way_to_it(self, tmp_path: Path, schedule: str) -> None:
        settings = {"epochs": 3, "optim": {"lr": 0.2}, "schedule": {"name": schedule}}
        run = self.finished(tmp_path / "a run", settings=settings)
        longer = Config(recipe="mine", epochs=5, optim=Optim(lr=0.2), schedule=Schedule(name=schedule))  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"epochs: 3 -> 5\. .*--resume '.*/a run'$"):
            find_result(run, longer)
