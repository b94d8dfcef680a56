"""A start in the directory of a finished run: nothing is left, it goes on, or it is refused. No program is started."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from accel_train.config.compatibility import FORMAT, learning_settings
from accel_train.config.schema import Config, Optim, Schedule
from accel_train.errors import UserError
from accel_train.launch.environment import Launch
from accel_train.ownership.lease import Lease
from accel_train.run.start import find_finished_run


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
        assert find_finished_run(tmp_path / "nothing", self.CONFIG, Launch()) is None

    def test_a_result_is_of_its_settings(self, tmp_path: Path) -> None:
        run = self.finished(tmp_path)
        found = find_finished_run(run, self.CONFIG, Launch())
        assert found is not None and found.result
        with pytest.raises(UserError, match=r"3 epochs.*: seed: 0 -> 1\. Give another --output-dir \(or more epochs"):
            find_finished_run(run, Config(recipe="mine", epochs=3, optim=Optim(lr=0.2), seed=1), Launch())

    def test_another_recipes_result(self, tmp_path: Path) -> None:
        settings = {"data.name": "mnist", "epochs": 3}
        run = self.finished(tmp_path / "other", recipe="other", settings=settings)
        with pytest.raises(UserError, match=r"data\.name: mnist -> digits") as error:
            find_finished_run(run, self.CONFIG, Launch())
        assert "allow-change" not in str(error.value)

    @pytest.mark.parametrize(
        "content", [b"", b"{}", b"[1]", b"\xff", b"[" * 9999, b'{"recipe": "mine", "epochs": "3", "updates": 9}']
    )
    def test_a_damaged_one_is_refused(self, tmp_path: Path, content: bytes) -> None:
        run = self.finished(tmp_path)
        (run / "result.json").write_bytes(content)
        with pytest.raises(UserError, match=r"result\.json is damaged\. Delete it"):
            find_finished_run(run, self.CONFIG, Launch())
        assert (run / "result.json").read_bytes() == content

    def test_checkpoints_that_are_gone(self, tmp_path: Path) -> None:
        run = self.finished(tmp_path)
        (run / "checkpoints" / "update-00000009").rmdir()
        config = Config(recipe="mine", epochs=4, optim=Optim(lr=0.2), allow_change=("epochs",))
        with pytest.raises(UserError, match=r"epochs: 3 -> 4\. It cannot go on, because its checkpoints are gone"):
            find_finished_run(run, config, Launch())

    def test_a_late_result_finishes_no_run(self, tmp_path: Path) -> None:
        """An earlier owner wrote it after a later one had begun to train."""
        run = self.finished(tmp_path, generation=1)
        for number, found in ((1, True), (2, False)):
            (run / "generations").mkdir(exist_ok=True)
            (run / "generations" / f"{number:08d}.json").write_text(f'{{"generation": {number}, "update": 5}}')
            assert (find_finished_run(run, self.CONFIG, Launch()) is not None) == found

    @pytest.mark.parametrize("schedule", ["constant", "cosine"])
    def test_a_later_end_is_another_result_and_the_earlier_one_is_kept(self, tmp_path: Path, schedule: str) -> None:
        settings = {"epochs": 3, "optim": {"lr": 0.2}, "schedule": {"name": schedule}}
        run = self.finished(tmp_path, settings=settings)
        longer = Config(recipe="mine", epochs=5, optim=Optim(lr=0.2), schedule=Schedule(name=schedule))  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"epochs: 3 -> 5\. .*--epochs 5 --allow-change epochs$"):
            find_finished_run(run, longer, Launch())
        found = find_finished_run(run, dataclasses.replace(longer, allow_change=("epochs",)), Launch())
        assert found is not None and not found.result
        for name in ("model.safetensors", "ema.safetensors"):
            (run / name).write_text(name)
        found.rename_results(Lease(run, None))
        assert (run / "ema-epoch-3.safetensors").read_text() == "ema.safetensors"
        kept = {"model-epoch-3.safetensors", "ema-epoch-3.safetensors", "result-epoch-3.json"}
        assert {path.name for path in run.iterdir()} == kept | {"checkpoints"}
