"""The trainers whose command lines can be converted, and all their options, from their own files (peers.txt)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PeerOption:
    """An option as the peer declares it."""

    flags: tuple[str, ...]
    """As they are typed: ("-b", "--batch-size"); ("data",) if it is a word without a flag; ("epochs",) of key=value."""
    kind: str
    """int, float, str, flag, kwargs (name=value …), or any (a value as in YAML)."""
    count: str
    """"": one value; "+" or "*": several; "3": so many; "?WORD": one, or WORD without a value."""
    default: Any
    verdict: str = ""
    """What becomes of it here: has, partly, not, or apart (it is not of classification). "" of older versions."""
    answer: str = ""
    """What docs/peers.md says of it, if not what `accel-train train` answers to its name."""

    @property
    def name(self) -> str:
        """The name that tables use: that of the longest flag, without its dashes and with "-"."""
        return max(self.flags, key=len).lstrip("-").replace("_", "-")


@dataclass(frozen=True)
class Peer:
    name: str
    """timm, torchvision or ultralytics."""
    version: str
    """Which version and file the options are from."""
    options: dict[str, PeerOption]
    older: dict[str, PeerOption]
    """Those of older versions that published commands still have."""

    @property
    def all_options(self) -> dict[str, PeerOption]:
        """By name: the options of this version and of older ones."""
        return self.options | self.older


def _read() -> dict[str, Peer]:
    """The file: `# NAME VERSION` before the options of each peer, `## …` before older ones; then FLAGS | KIND COUNT |
    DEFAULT (as JSON) | VERDICT ANSWER."""
    peers: dict[str, Peer] = {}
    name = ""
    options: dict[str, PeerOption] = {}
    for line in Path(__file__).with_name("peers.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            name, _, version = line[2:].partition(" ")
            peers[name] = Peer(name, version, options := {}, {})
        elif line.startswith("## "):
            options = peers[name].older
        else:
            flags, kind, default, *rest = line.split(" | ")
            of, _, count = kind.partition(" ")
            verdict, _, answer = "".join(rest).partition(" ")
            option = PeerOption(tuple(flags.split()), of, count, json.loads(default), verdict, answer)
            options[option.name] = option
    return peers


PEERS = _read()
