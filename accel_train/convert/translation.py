"""What a command of another trainer becomes here: settings with comments, and what cannot be said.

The tables of the trainers (timm.py, torchvision.py, ultralytics.py) say which option there is which here (`To`); what
needs arithmetic, or several options at once, is a function there that takes a `Translation`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accel_train.config.declaration import Bound, Synonyms
from accel_train.config.option_types import declared, option_types, typed_value
from accel_train.config.recipe import Option
from accel_train.config.synonyms import advice
from accel_train.convert.command import Command, check_kind, shown


@dataclass(frozen=True)
class To:
    """What an option of a peer is here. Its value is written also if it is the peer's default, because ours differ."""

    key: str = ""
    """Our option; "": there is none, and a value that is not in `fine` is lost."""
    words: Mapping[Any, Any] = field(default_factory=dict)
    """A value there -> the value here, if it is another one."""
    fine: Sequence[Any] = ()
    """Values there that need no option here."""
    when: Callable[[Translation], bool] = lambda _: True
    """Whether the option has an effect, with the values of the others."""


Table = Mapping[str, "str | To"]


@dataclass(frozen=True)
class Setting:
    value: Any
    comment: str = ""


class Translation:
    """The recipe so far. `translation["lr"]` is the value of the peer's option, and notes that it was looked at."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.processes = command.processes
        self.settings: dict[str, Setting] = {}
        """By our keys, such as "optim.weight-decay"."""
        self.lost: dict[str, str] = {}
        """What changes what is learned and cannot be said here -> why."""
        self.differs: list[str] = []
        """What is measured or counted in another way, or needs to be known; it does not change what is learned."""
        self.launch: list[str] = []
        """Options of `accelerate launch`."""
        self.left_out: list[str] = []
        """Options that do not change what is learned."""
        self._seen: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self._seen.add(name)
        value = self.command.values[name]
        check_kind(self.command.peer.all_options[name], value)
        return value

    def is_given(self, name: str) -> bool:
        """Whether the command has the option with a value that is not the peer's default."""
        return name in self.command.given and self[name] != self.command.peer.all_options[name].default

    def set(self, key: str, value: Any, comment: str = "", *, of: str = "") -> None:
        """Write a setting, unless our option does not take the value: then the option `of` the peer is lost."""
        if accepts(key, value):
            self.settings[key] = Setting(value, comment)
        else:
            self.lose(of or key, f"{key} does not take {value!r}")

    def lose(self, name: str, why: str = "") -> None:
        """Note that the peer's option `name` is lost. `why`: by default what `accel-train train` says about it."""
        if name in self.command.peer.all_options:
            self._seen.add(name)
            default = " (the default)" * (name not in self.command.given)
            self.lost["".join(shown(self.command, name)) + default] = why or reason(name)
        else:
            self.lost[name] = why

    def apply(self, table: Table, *, only_given: bool = False) -> None:
        """Write the options of a table that have a value and an effect. `only_given`: without the peer's defaults."""
        for name, entry in table.items():
            if only_given and not self.is_given(name):
                continue
            to = To(entry) if isinstance(entry, str) else entry
            value = self[name]
            if value in (None, "") or value in to.fine or not to.when(self):
                continue
            if to.key:
                self.set(to.key, to.words.get(value, value) if to.words else value, of=name)
            elif to.fine or value != self.command.peer.all_options[name].default:
                self.lose(name)

    def ignore(self, *names: str, because: str) -> None:
        """Note that options which were given have no effect."""
        for name in names:
            if self.is_given(name):
                self.left_out += (f"{option} (no effect {because})" for option in shown(self.command, name))

    def finish(self, harmless: Sequence[str]) -> None:
        """Note what becomes of the options that were given and not looked at, and of a file's unknown ones.

        `harmless`: those that do not change what is learned; all others are lost.
        """
        for name in sorted(self.command.given - self._seen):
            if self.command.values[name] == self.command.peer.all_options[name].default:
                continue
            if name in harmless:
                self.left_out += shown(self.command, name)
            else:
                self.lose(name)
        for name, value in self.command.unknown.items():
            self.lost[f"{name}: {value}"] = f"no option of {self.command.peer.name}, {self.command.peer.version}"


def reason(name: str) -> str:
    """Return what `accel-train train` says about a peer's option that is not one here."""
    return advice(name, option_types(), declared(Synonyms)).strip() or "not known here"


def accepts(key: str, value: Any) -> bool:
    """Whether there is an option `key` that takes the value."""
    kind = option_types().get(key)
    if kind is None:
        return False
    words = tuple(json.dumps(each) if isinstance(each, dict) else str(each) for each in as_list(value))
    typed = typed_value(Option(key, words, ""), kind)
    bounds = [bound for name, bound in declared(Bound) if name == key]
    return typed is not None and all(typed[0] is None or bound.is_within(typed[0]) for bound in bounds)


def as_list(value: Any) -> list[Any]:
    """Return the values of an option that may have several."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def rounded(number: float) -> float:
    """The number without what binary arithmetic adds: 0.1 * 3 is 0.3."""
    return float(f"{number:.10g}")
