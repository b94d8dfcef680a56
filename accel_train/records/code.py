"""The user's own code in a run: code.json names it, and code/ keeps the text of each file.

Only the named files are kept. What they import is recorded by version or hash, but not copied.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_train.config.schema import Config, to_yaml, value
from accel_train.errors import UserError
from accel_train.untrusted import is_file_name, read_regular_file
from accel_train.user_code.record import file_hash, imports
from accel_train.user_code.reference import PREFIXES, Reference, code_file, parse_reference
from accel_train.user_code.trust import is_remembered, remember

FILE, FOLDER = "code.json", "code"


def references(config: Config) -> dict[str, Reference]:
    """Return the options of `config` that name a user's code: "model.name" -> its Reference."""
    found = {option: parse_reference(option, value(config, option)) for option in PREFIXES}
    return {option: reference for option, reference in found.items() if reference is not None}


def code_hashes(config: Config) -> str:
    """Return the hashes of the user's files as one text, equal on processes that have the same code."""
    files = {option: code_file(reference) for option, reference in references(config).items()}
    return " ".join(f"{option} {file_hash(path)}" for option, path in files.items() if path is not None)


def keep_code(config: Config, run: Path, write: Callable[[str, bytes], object], update: int) -> list[str]:
    """Keep the user's code in the folder `run`, by `write(name, content)`. Returns notes about what has changed.

    `update`: the number of updates before this start.
    """
    used = references(config)
    if not used:
        return []
    before, notes = _read(run), []
    now: dict[str, dict[str, Any]] = {}
    for option, reference in used.items():
        path = code_file(reference)
        if path is None:  # a module that is not a file of Python
            now[option] = {"reference": str(reference)}
            continue
        kept = f"{FOLDER}/{path.stem}-{file_hash(path)[:12]}.py"
        write(kept, path.read_bytes())
        old = before.get(option, {})
        earlier = old.get("earlier", [])
        if old.get("sha256", file_hash(path)) != file_hash(path):
            earlier = [*earlier, {"kept": old.get("kept"), "sha256": old["sha256"], "until_update": update}]
            notes.append(
                f"{option}: {path} has changed since the last start of this run. From update {update} on the new text "
                f"is used; the old one is {old.get('kept')}."
            )
        now[option] = {
            "reference": str(reference),
            "kept": kept,
            "sha256": file_hash(path),
            "imports": imports(path),
            "earlier": earlier,
        }
    write(FILE, (json.dumps(now, indent=2) + "\n").encode())
    return notes


def remember_training(config: Config) -> list[str]:
    """Record outside the run's folder that this user trains with this code. Returns a note if that is not possible."""
    used = references(config)
    if not used and not config.model.kwargs:
        return []
    files = {option: code_file(reference) for option, reference in used.items()}
    try:
        remember(to_yaml(config), {option: file_hash(path) for option, path in files.items() if path is not None})
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        return [
            f"your folder for the state of programs cannot be used ({error}): evaluate, predict, report and export "
            "will ask for --trust-code true for this run. Set XDG_STATE_HOME to a folder of yours."
        ]
    return []


def trained_code(run: Path, text: str) -> dict[str, str] | None:
    """Return the SHA-256 of the code of the run in the folder `run` (option -> hash), if this user has trained the run:
    with `text` as its config.yaml and with this code. Else None.

    A record outside the folder says so: what is in the folder may have been written by anybody, at any time. So what
    is returned, not what is in the folder a moment later, is the code that may be run.
    """
    code = {}
    try:
        for option, entry in _read(run).items():
            name = str(entry.get("kept", "")).removeprefix(f"{FOLDER}/")
            if is_file_name(name):
                code[option] = hashlib.sha256(read_regular_file(run / FOLDER / name, follow=True)).hexdigest()
    except (OSError, ValueError):
        return None
    return code if is_remembered(text.encode(), code) else None


def _read(run: Path) -> dict[str, dict[str, Any]]:
    """Return the content of code.json; {} if there is none. Raises UserError if it is damaged."""
    path = run / FILE
    if not path.exists():
        return {}
    try:
        content = json.loads(read_regular_file(path, follow=True))
        if not (isinstance(content, dict) and all(isinstance(entry, dict) for entry in content.values())):
            raise ValueError("it is not a table of options")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); copy it again from where the model was trained.") from error
    return content


@dataclass(frozen=True)
class KeptCode:
    """A user's code as a run keeps it. Nothing in it has been run."""

    reference: Reference
    """As it was given to the run."""
    path: Path
    """The kept file."""

    def to_run(self, option: str, *, trained: Mapping[str, str] | None, trust: bool) -> str:
        """Return the value of `option` that runs this code. Raises UserError if nobody has said that it is safe.

        It is if `trust`, or if this user has trained the run (see `trained_code`) and the file that the run names is as
        it was. A module is run by its name only if `trained`: else the kept text is what one can read.
        """
        named = code_file(self.reference)
        found = file_hash(named) if named is not None and _is_own(named) else ""
        if trained is not None and found and found == trained.get(option):
            return str(self.reference)
        same = found == file_hash(self.path)
        if trust:
            kept = f"{self.path.absolute()}:{self.reference.name}"
            return str(self.reference) if same and self.reference.file else kept
        reason = "this file is missing, is not yours, or has changed"
        if same:
            reason = "you have not trained the run with this configuration on this machine"
        raise UserError(
            f"--{option} {self.reference}: the run uses its own code, but {reason}. Read {self.path} and the arguments "
            f"in config.yaml; if you trust them, add --trust-code true."
        )


def _is_own(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_uid in (os.getuid(), 0)
    except OSError:
        return False


def kept_code(option: str, reference: Reference, run: Path) -> KeptCode:
    """Return the code that the run in the folder `run` keeps for `option`, where it names `reference`.

    Raises UserError if it is missing.
    """
    name = str(_read(run).get(option, {}).get("kept", "")).removeprefix(f"{FOLDER}/")
    path = run / FOLDER / name
    if not (is_file_name(name) and path.is_file()):
        raise UserError(
            f"--{option} {reference.short}: the run does not have the text of this code ({FILE} and {FOLDER}/); copy "
            "them again from where the model was trained."
        )
    return KeptCode(reference, path)
