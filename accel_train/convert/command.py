"""A command of another trainer once it is read, and the forms that are no command line: files and name=value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_train.convert.peers import PEERS, Peer, PeerOption
from accel_train.errors import UserError, nearest, reason_of

LARGEST_FILE = 1 << 20


@dataclass(frozen=True)
class Command:
    """What somebody has told a peer. `values` has all its options, by name; those not in `given` are its defaults."""

    peer: Peer
    values: Mapping[str, Any]
    given: frozenset[str]
    processes: int
    text: str
    """The command, for a comment; of a file its name."""
    unknown: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a file that another version of the peer has written, and this one does not have."""


def shown(command: Command, name: str) -> Iterator[str]:
    """Yield the option with its value, as it is typed."""
    value, option = command.values[name], command.peer.all_options[name]
    if option.kind == "any":
        yield f"{option.flags[0]}={value}"
    elif option.kind == "flag":
        yield f"--{name}"
    else:
        yield f"{option.flags[-1]} {' '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"


def with_defaults(
    peer: Peer, values: Mapping[str, Any], processes: int, text: str, unknown: Mapping[str, Any] | None = None
) -> Command:
    defaults = {name: option.default for name, option in peer.all_options.items()}
    return Command(peer, defaults | dict(values), frozenset(values), processes, text, unknown or {})


def not_an_option(peer: Peer, flag: str, names: Sequence[str]) -> str:
    return f"{flag}: no option of {peer.name} ({peer.version}).{nearest(flag, names, least=0.6)}"


def read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise UserError(f"{path}: more than {LARGEST_FILE:,} bytes; that is no command.")
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {reason_of(error)}") from error


def read_pairs(peer: Peer, arguments: Sequence[str], text: str, processes: int) -> Command:
    """Read `yolo classify train name=value …`, where spaces may be around the "="."""
    joined = re.sub(r"\s*=\s*", "=", "\0".join(arguments).replace("\0=", "=").replace("=\0", "=")).split("\0")
    values, mistakes = dict[str, Any](), list[str]()
    for word in joined:
        name, equals, value = word.lstrip("-").partition("=")
        key = name.replace("_", "-")
        if not equals and word in ("classify", "detect", "segment", "pose", "obb", "semantic", "depth"):
            values["task"] = word
        elif not equals and word in ("train", "val", "predict", "export", "track", "benchmark"):
            values["mode"] = word
        elif key not in peer.options:
            mistakes.append(not_an_option(peer, name, list(peer.options)))
        else:
            # ultralytics reads None, which YAML has as null.
            values[key] = (None if value.lower() == "none" else load_yaml(value, word)) if equals else True
    if mistakes:
        raise UserError(*mistakes)
    if config := values.pop("cfg", None):
        values = settings_of(peer, load_yaml(read_text(Path(config)), config))[0] | values
    return with_defaults(peer, values, processes, text)


def load_yaml(text: str, name: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{name}: cannot be read as YAML: {reason_of(error)}") from error


def settings_of(peer: Peer, settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (the settings that the peer has, those that it does not have), by the names of its options."""
    if not isinstance(settings, dict):
        raise UserError("expected a YAML file of NAME: VALUE, as timm's args.yaml.")
    by_name = {str(name).replace("_", "-"): value for name, value in settings.items()}
    options = peer.all_options
    known = {name: _typed(options[name], value) for name, value in by_name.items() if name in options}
    return known, {name: value for name, value in by_name.items() if name not in options and value}


def _typed(option: PeerOption, value: Any) -> Any:
    """The value as argparse gives it: YAML reads 1e-5 as a word, and a single value need not be in a list."""
    if value is None and option.default == "":
        return ""
    kind = {"int": int, "float": float, "str": str}.get(option.kind)
    if kind is None or isinstance(value, (bool, list, dict, type(None))):
        return value
    try:
        return [kind(value)] if option.count in ("+", "*") else kind(value)
    except ValueError as error:
        raise UserError(f"{option.name}: expected {option.kind}, found {value!r}.") from error


def check_kind(option: PeerOption, value: Any) -> None:
    """Raise UserError if the value is of another kind than the option: what is no command line may have any."""
    default = option.default
    of_any = option.kind == "any" and (default is None or isinstance(default, bool if value is not None else str))
    if option.kind == "flag" or of_any or value == default or (isinstance(value, dict) and isinstance(default, dict)):
        return
    number = option.kind in ("int", "float") or isinstance(default, (int, float))
    kinds, expected = ((int, float), "a number") if number else ((str, int, float), "a word")
    each: Sequence[Any] = [value]
    if option.count in ("+", "*") or option.count.isdigit():
        each, expected = value if isinstance(value, (list, tuple)) else [None], f"a list, each of it {expected}"
    if any(not isinstance(item, kinds) or isinstance(item, bool) for item in each):
        raise UserError(f"{option.name}: expected {expected}, found {'nothing' if value is None else repr(value)}.")


def read_settings(text: str, name: str, peer: str | None, processes: int | None) -> Command:
    """Read a file of settings, as timm writes it into each run's folder, and ultralytics too."""
    settings = load_yaml(text, name)
    fits = {each: len(settings_of(PEERS[each], settings)[0]) for each in PEERS}
    chosen = PEERS[peer or max(fits, key=lambda each: fits[each])]
    if not fits[chosen.name]:
        raise UserError(f"{name}: has no option of {', '.join(PEERS)}.")
    known, unknown = settings_of(chosen, settings)
    return with_defaults(chosen, known, processes or 1, name, unknown)
