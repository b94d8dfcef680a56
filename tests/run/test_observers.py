"""A user's observers: what they are told, what they may ask for, and that the training stays what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import helpers
import pytest

from accel_train.errors import UserError
from accel_train.launch.stopping import StopRequests
from accel_train.records.events import Ended, Evaluated, SaveCommitted, Started, UpdateDone
from accel_train.run.observers import METHODS, Observers, check_observers


class Good:
    def on_update(self, update: Any) -> None: ...


class Misspelt:
    def on_updates(self, update: Any) -> None: ...


class Partly(Good):
    def on_epoch_end(self, event: Any) -> None: ...


class NoMethod:
    on_end = 3


@pytest.mark.parametrize(
    ("observers", "message"),
    [
        ([Misspelt()], "Misspelt has 'on_updates', which is never called. Did you mean 'on_update'?"),
        ([Good(), Partly()], "Partly has 'on_epoch_end', which is never called"),
        ([object()], "object is no object with one of the methods on_start, on_update, on_evaluation, on_checkpoint"),
        ([Good], "Good is no object with one of the methods"),
        ([NoMethod()], "NoMethod is no object with one of the methods"),
        (Good(), "must be a list of objects, but is 'Good'"),
        ("Good", "must be a list of objects, but is 'str'"),
    ],
)
def test_what_is_no_observer_is_refused_at_once(observers: Any, message: str) -> None:
    with pytest.raises(UserError) as raised:
        check_observers(observers)
    assert message in str(raised.value)
    check_observers((Good(),))


def started() -> Started:
    return Started(4, 9, 1, 3, False, 0, resumed=True, trained=False, checkpoint=4, directory=Path("run"))


EVENTS = {
    "on_start": started(),
    "on_update": UpdateDone(5, 1, None, line_due=False),
    "on_evaluation": Evaluated("val", 5, 1, {"loss": 1.0}, 9, 0.1),
    "on_checkpoint": SaveCommitted(5, Path("update-00000005")),
    "on_end": Ended(5, "finished", "all", {}, {}, result={"settings": {"a": [1]}}),
}


class Asks:
    """Notes what it is told, and answers each time the same; or raises it, if it is an exception."""

    def __init__(self, answer: Any = None, **attributes: Any) -> None:
        self.answer, self.heard = answer, []  # type: tuple[Any, list[tuple[str, Any]]]
        vars(self).update(attributes)

    def _hear(self, method: str, event: Any) -> Any:
        self.heard.append((method, event))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def on_start(self, event: Any) -> Any:
        return self._hear("on_start", event)

    def on_update(self, event: Any) -> Any:
        return self._hear("on_update", event)

    def on_evaluation(self, event: Any) -> Any:
        return self._hear("on_evaluation", event)

    def on_checkpoint(self, event: Any) -> Any:
        return self._hear("on_checkpoint", event)

    def on_end(self, event: Any) -> Any:
        return self._hear("on_end", event)


@pytest.mark.parametrize("method", METHODS)
def test_each_method_may_ask(method: str) -> None:
    for answer in ("stop", "save"):
        requests = StopRequests()
        assert Observers([Asks(), Asks(answer)], requests).handle(EVENTS[method]) == []
        assert requests.reason == ("the observer Asks" if answer == "stop" else "")
        assert requests.poll() == (answer == "stop", answer == "save")


@pytest.mark.parametrize("method", METHODS)
def test_one_that_fails_is_named_once_and_dropped(method: str) -> None:
    requests, fails, other = StopRequests(), Asks(ZeroDivisionError("no\nluck")), Asks()
    observers = Observers([fails, other], requests)
    (warning,) = observers.handle(EVENTS[method])
    error = r"ZeroDivisionError: no\nluck"
    assert warning == f"the observer Asks failed in {method}: {error}. The training goes on without it."
    assert observers.handle(EVENTS[method]) == [] and len(fails.heard) == 1 and len(other.heard) == 2
    assert requests.poll() == (False, False)


def test_one_that_must_not_fail_ends_the_run() -> None:
    requests = StopRequests()
    (warning,) = Observers([Asks(OSError("full"), must_not_fail=True)], requests).handle(EVENTS["on_update"])
    assert warning.endswith("OSError: full. It must not fail: the run is saved and stops.")
    assert requests.reason == "the failed observer Asks"


def test_a_wrong_answer_is_a_failure_and_a_signal_comes_first() -> None:
    requests = StopRequests()
    requests.reason = "SIGTERM"
    (warning,) = Observers([Asks("sotp"), Asks("stop")], requests).handle(EVENTS["on_update"])
    assert "returned 'sotp', but an observer returns 'save', 'stop' or nothing" in warning
    assert requests.reason == "SIGTERM"
    with pytest.raises(KeyboardInterrupt):
        Observers([Asks(KeyboardInterrupt())], requests).handle(EVENTS["on_update"])


def test_what_it_does_to_the_values_nobody_sees() -> None:
    class Vandal:
        def on_evaluation(self, evaluation: Any) -> None:
            evaluation.metrics["loss"] = -1.0

        def on_end(self, end: Any) -> None:
            end.result["settings"]["a"].append(2)

    other = Asks()
    observers = Observers([Vandal(), other], StopRequests())
    for method in ("on_evaluation", "on_end"):
        assert observers.handle(EVENTS[method]) == []
    assert [event for _, event in other.heard] == [EVENTS["on_evaluation"], EVENTS["on_end"]]
    assert other.heard[0][1].metrics == {"loss": 1.0} and other.heard[1][1].result == {"settings": {"a": [1]}}


# Real runs in one process after each other: 10 updates an epoch, a line of the log each 4th.
PROGRAM = """
import json, os, sys, time
from pathlib import Path
from accel_train.api import train

RECIPE = {"base": "digits", "epochs": 2, "log_every_updates": 4, "data": {"train_limit": 480, "test_limit": 60,
          "val_fraction": 0.1}}
def tell(name, value):
    if os.environ.get("RANK", "0") == "0" or name == "result":
        os.write(1, f"told: {json.dumps([name, value])}\\n".encode())  # in one piece: all processes write to one pipe
def go(name, *observers, options=()):
    result = train(RECIPE, "--output-dir", name, *options, observers=observers)
    tell("result", [name, result.finished, result.stopped_by, result.metrics["updates"]])
class Sees:
    def __init__(self, ask=None, at=None, after=0, fails=False, seconds=0.0):
        self.ask, self.at, self.after, self.fails, self.seconds = ask, at, after, fails, seconds
    def _see(self, method, event, **values):
        tell(method, {"update": event.update, **values})
        time.sleep(self.seconds)
        if method == self.at and event.update >= self.after:
            if self.fails:
                raise ValueError("as it was told")
            return self.ask
    def on_start(self, start):
        return self._see("on_start", start, resumed=start.resumed, folder=start.directory.name)
    def on_update(self, update):
        if isinstance(update.metrics, dict):
            update.metrics.clear()  # a copy
        return self._see("on_update", update, figures=update.metrics is not None, epoch=update.epoch)
    def on_evaluation(self, evaluation):
        return self._see("on_evaluation", evaluation, split=evaluation.split, figures=sorted(evaluation.metrics))
    def on_checkpoint(self, checkpoint):
        return self._see("on_checkpoint", checkpoint, there=(checkpoint.path / "model.safetensors").is_file())
    def on_end(self, end):
        return self._see("on_end", end, state=end.state, stopped_by=end.stopped_by, result=end.result is not None)
"""


def told(script: str, folder: Path, processes: int = 1) -> list[tuple[str, Any]]:
    done = helpers.python("-c", PROGRAM + script, cwd=folder, processes=processes, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "stderr").write_text(done.stderr)
    return [tuple(json.loads(line[6:])) for line in done.stdout.splitlines() if line.startswith("told: ")]


def of(heard: list[tuple[str, Any]], name: str) -> list[Any]:
    return [value for each, value in heard if each == name]


def weights(run: Path) -> bytes:
    return (run / "model.safetensors").read_bytes()


@pytest.mark.ci
def test_what_a_run_tells_and_that_observers_change_no_bit(tmp_path: Path) -> None:
    heard = told("go('alone')\ngo('seen', Sees(seconds=0.01), Sees(at='on_update', fails=True))", tmp_path)
    assert of(heard, "on_start") == [{"update": 0, "resumed": False, "folder": "seen"}] * 2
    updates = [value["update"] for value in of(heard, "on_update")]
    assert updates == [1, 1, *range(2, 21)]  # the second one failed at its first update
    due = [value["update"] for value in of(heard, "on_update") if value["figures"]]
    assert due == [4, 8, 10, 12, 16, 20]
    assert {value["epoch"] for value in of(heard, "on_update") if value["update"] > 10} == {2}
    splits = [(value["update"], value["split"]) for value in of(heard, "on_evaluation")]
    assert splits == [(10, "val"), (20, "val"), (20, "test")]
    assert {"update": 20, "there": True} in of(heard, "on_checkpoint")
    assert of(heard, "on_end") == [{"update": 20, "state": "finished", "stopped_by": "epochs", "result": True}]
    warning = "the observer Sees failed in on_update: ValueError: as it was told. The training goes on without it."
    assert (tmp_path / "stderr").read_text().count(warning) == 1
    assert weights(tmp_path / "seen") == weights(tmp_path / "alone")
    lines = {name: (tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("seen", "alone")}
    figures = {
        name: [{key: line.get(key) for key in ("kind", "update", "loss", "accuracy")} for line in map(json.loads, them)]
        for name, them in lines.items()
    }
    assert [line for line in figures["seen"] if line["kind"] != "event"] == figures["alone"]


@pytest.mark.ci
def test_an_observer_ends_the_run_anywhere_and_it_goes_on_without_a_difference(tmp_path: Path) -> None:
    script = """
go('alone')
for method, after in (('on_start', 0), ('on_update', 1), ('on_evaluation', 10), ('on_checkpoint', 1), ('on_end', 0)):
    go(method, Sees('stop', method, after))
    tell('again', method)
    go(method, Sees())
go('failed', Sees(at='on_update', after=3, fails=True))
strict = Sees(at='on_update', after=3, fails=True)
strict.must_not_fail = True
go('strict', strict)
"""
    heard = told(script, tmp_path)
    results = {name: (finished, by, updates) for name, finished, by, updates in reversed(of(heard, "result"))}
    asked = "the observer Sees"
    finished, by, later = results.pop("on_checkpoint")
    # The checkpoint of the first epoch is written in the background, and told at the end of an update.
    assert (finished, by) == (False, asked) and 12 <= later <= 20
    assert {name: results[name] for name in METHODS if name in results} == {
        "on_start": (False, asked, 1),  # the update at whose end all agree
        "on_update": (False, asked, 2),
        "on_evaluation": (False, asked, 11),
        "on_end": (True, "epochs", 20),
    }
    assert results["failed"] == (True, "epochs", 20)
    assert results["strict"] == (False, "the failed observer Sees", 4)
    starts = of(heard, "on_start")
    assert [start["update"] for start in starts if start["resumed"]] == [1, 2, 11, later]
    for name in ("on_start", "on_update", "on_evaluation", "on_checkpoint", "failed"):
        assert weights(tmp_path / name) == weights(tmp_path / "alone"), name
    ends = [value for value in of(heard, "on_end") if value["state"] == "interrupted"]
    assert [(end["update"], end["stopped_by"]) for end in ends][:2] == [(1, asked), (2, asked)]
    assert not any(end["result"] for end in ends)


@pytest.mark.ci
def test_a_save_asked_for_at_each_update_is_made(tmp_path: Path) -> None:
    heard = told("go('saves', Sees('save', 'on_update'))", tmp_path)
    assert of(heard, "result") == [["saves", True, "epochs", 20]]
    saved = [line["update"] for line in helpers.lines_of(tmp_path / "saves", "checkpoint")]
    assert saved == [*range(2, 21)]
    assert [value["update"] for value in of(heard, "on_checkpoint")] == saved


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_all_processes_stop_and_save_at_the_same_update(tmp_path: Path, processes: int) -> None:
    script = "go('save', Sees('save', 'on_update', 3))\ngo('stop', Sees('stop', 'on_update', 3))\ngo('stop', Sees())"
    heard = told(script, tmp_path, processes)
    stopped = [value for value in of(heard, "result") if value[0] == "stop" and not value[1]]
    assert len(stopped) == processes and {(value[2], value[3]) for value in stopped} == {("the observer Sees", 5)}
    assert len([value for value in of(heard, "result") if value[1]]) == 2 * processes
    assert [start["update"] for start in of(heard, "on_start")] == [0, 0, 5]  # told on the main process alone
    assert weights(tmp_path / "stop") == weights(tmp_path / "save")
