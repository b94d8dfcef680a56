"""A user's own objects that see what happens in a training: `train(…, observers=[mine])`.

They are told on the main process, after everybody else, and get copies of plain values. They may ask for a save or for
the end, as a signal does; nothing else of what they do reaches the training.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

from accel_train.errors import LOGGER, UserError, nearest, one_line
from accel_train.launch.stopping import StopRequests
from accel_train.records.events import Ended, Evaluated, Event, Logged, SaveCommitted, Started, UpdateDone

METHODS = ("on_start", "on_update", "on_evaluation", "on_checkpoint", "on_end")
REQUESTS = ("save", "stop")


def check_observers(observers: Iterable[object]) -> None:
    """Raise UserError unless each is an object with at least one of the methods, and none with a similar name."""
    if isinstance(observers, (str, bytes)) or not isinstance(observers, Sequence):
        raise UserError(f"observers: must be a list of objects, but is {type(observers).__qualname__!r}: give [it].")
    for observer in observers:
        methods = [name for name in dir(observer) if name.startswith("on_") and callable(getattr(observer, name))]
        for name in methods:
            if name not in METHODS:
                raise UserError(
                    f"observers: {_name(observer)} has {name!r}, which is never called.{nearest(name, METHODS)} "
                    f"There are {', '.join(METHODS)}."
                )
        if not methods or isinstance(observer, type):
            raise UserError(f"observers: {_name(observer)} is no object with one of the methods {', '.join(METHODS)}.")


class Observers:
    """Calls the observers of a run, in their order; one that fails is not called again."""

    def __init__(self, observers: Iterable[object], requests: StopRequests) -> None:
        self._observers, self._requests = list(observers), requests

    def handle(self, event: Event) -> Sequence[str]:
        match event:
            case UpdateDone() if not event.line_due:
                method = "on_update"
            case Logged():
                method = "on_update"
            case Evaluated() if event.name != "train":  # its metrics are the updates' own
                method = "on_evaluation"
            case SaveCommitted():
                method = "on_checkpoint"
            case Started():
                method = "on_start"
            case Ended():
                method = "on_end"
            case _:
                return ()
        return [warning for observer in list(self._observers) for warning in self._call(observer, method, event)]

    def _call(self, observer: object, method: str, event: Event) -> Sequence[str]:
        if not hasattr(observer, method):
            return ()
        name = _name(observer)
        try:
            answer = getattr(observer, method)(copy.deepcopy(event))  # nobody else sees what it does to the values
            if answer is not None and answer not in REQUESTS:
                raise ValueError(f"returned {answer!r}, but an observer returns 'save', 'stop' or nothing")
        except Exception as error:
            LOGGER.debug("observer %s", name, exc_info=True)
            self._observers.remove(observer)
            text = f"the observer {name} failed in {method}: {type(error).__name__}: {one_line(str(error))}"
            if getattr(observer, "must_not_fail", False):
                self._requests.ask(f"the failed observer {name}")
                return [f"{text}. It must not fail: the run is saved and stops."]
            return [f"{text}. The training goes on without it."]
        if answer == "save":
            self._requests.request_save()
        elif answer == "stop":
            self._requests.ask(f"the observer {name}")
        return ()


def _name(observer: object) -> str:
    kind = observer if isinstance(observer, type) else type(observer)
    return kind.__qualname__.rpartition("<locals>.")[2]
