"""Stand-ins for the packages wandb and mlflow: servers in memory that keep what these really keep.

W&B drops a step that is not after the last one. MLflow appends every value, also of a step that it has.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class FakeWandB:
    """The module `wandb`. A second `init` with the same id goes on with the run."""

    def __init__(self, *, offline: bool = False) -> None:
        self.offline = offline
        self.runs: dict[str, SimpleNamespace] = {}
        self.calls: list[dict[str, Any]] = []
        self.config = self  # of the current run: `wandb.config.update`

    def init(self, **options: Any) -> Any:
        self.calls.append(options)
        rows: list[dict[str, Any]] = []
        new = SimpleNamespace(rows=rows, config={}, offline=self.offline, finished=0)
        self.run = run = self.runs.setdefault(options["id"], new)
        run.starting_step = 0 if self.offline or not run.rows else run.rows[-1]["_step"] + 1
        run.log, run.finish = self.log, self.finish
        return run

    def update(self, values: dict[str, Any], allow_val_change: bool) -> None:
        self.run.config.update(values)

    def log(self, values: dict[str, Any], step: int) -> None:
        if self.offline or not self.run.rows or step > self.run.rows[-1]["_step"]:
            self.run.rows.append(values | {"_step": step})

    def finish(self) -> None:
        self.run.finished += 1


class FakeMLflow:
    """The module `mlflow`."""

    utils = SimpleNamespace(validation=SimpleNamespace(MAX_PARAM_VAL_LENGTH=6000, MAX_PARAMS_TAGS_PER_BATCH=100))

    def __init__(self) -> None:
        self.experiments: list[str] = []
        self.runs: dict[str, SimpleNamespace] = {}
        self.active: Any = None

    def search_experiments(self, filter_string: str) -> list[Any]:
        return [SimpleNamespace(experiment_id=name) for name in self.experiments if filter_string == f"name = '{name}'"]

    def create_experiment(self, name: str, artifact_location: Any, tags: Any) -> str:
        self.experiments.append(name)
        return name

    def start_run(self, run_id: str | None, experiment_id: str, run_name: str, **_: Any) -> Any:
        if run_id is None:
            run_id = f"run-{len(self.runs)}"
            self.runs[run_id] = SimpleNamespace(
                info=SimpleNamespace(run_id=run_id, run_name=run_name),
                data=SimpleNamespace(params={}),
                values=[],
            )
        self.active = self.runs[run_id]
        return self.active

    def end_run(self) -> None:
        self.active = None

    def log_params(self, values: dict[str, Any]) -> None:
        assert not values.keys() & self.active.data.params.keys(), "parameters cannot be changed"
        self.active.data.params.update(values)

    def log_metrics(self, values: dict[str, float], step: int, timestamp: int) -> None:
        for key, value in values.items():
            self.active.values.append(SimpleNamespace(key=key, value=value, step=step, timestamp=timestamp))
