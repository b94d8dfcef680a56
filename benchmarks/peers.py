"""Writes docs/peers.md: what becomes of each option of timm's, torchvision's and ultralytics' here.

    python benchmarks/peers.py --write
    python benchmarks/peers.py --read train.py      # print the options in one of their files, for peers.txt

accel_train/convert/peers.txt has their options with types and defaults, from their own files; the answers are those
that `accel-train train` gives to somebody who types one of them (config/synonyms.py and `Synonyms`).
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import yaml

from accel_train.config.declaration import Synonyms
from accel_train.config.option_types import declared, option_types, unknown_option
from accel_train.config.synonyms import LAUNCHER
from accel_train.convert.peers import PEERS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/peers.md"
KINDS = ("an option", "another way", "not supported")
NOTES = {
    "mixup-mode": "timm's batch is a process's; here it is the virtual batch (`virtual-batch-size`), the same on any "
    "number of processes",
}
"""What a user must know of an option that has the same purpose."""
ABOUT = """\
# Coming from timm, torchvision or ultralytics

What becomes of their options here. The answers are those of `accel-train train`, if you give it one of these names.
*An option*: an option here, or of `accelerate launch`, has the same purpose; its values may be counted in another way:
read its [help](options.md). *Another way*: something else here does the same, or it happens by itself. The page is
written by `python benchmarks/peers.py --write`, from the lists of options in their own files.
"""


def options_in(path: Path) -> Iterator[str]:
    """Yield a line of peers.txt for each option in a peer's file: calls of add_argument, or a YAML mapping."""
    if path.suffix == ".yaml":
        for name, default in yaml.safe_load(path.read_text()).items():
            yield f"{name} | any | {json.dumps(default)}"
        return
    for call in ast.walk(ast.parse(path.read_text())):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".add_argument"):
            given = {each.arg: ast.unparse(each.value) for each in call.keywords}
            names = " ".join(ast.literal_eval(each) for each in call.args)
            kind = given.get("type", "str").partition(".")[0] + " " + given.get("nargs", "").strip("'")
            if "store_true" in given.get("action", ""):
                kind, given["default"] = "flag", "False"
            # Defaults such as 3 / 4 are no literals.
            default = json.dumps(eval(given.get("default", "None"), {"__builtins__": {}}))
            if given.get("nargs") == "'?'" and "const" in given:
                kind += given["const"].strip("'") * (given["const"] != "None")
            yield f"{names} | {kind.strip()} | {default}"


def answer(word: str) -> tuple[str, str]:
    """Return (one of `KINDS`, what is said of the option `word`)."""
    known = option_types()
    if word in known:
        return KINDS[0], f"`{word}`"
    text = unknown_option(word, "", known).partition("().")[2].strip()
    if text.startswith("Not supported"):
        return KINDS[2], text
    of_launcher = any(word in words.split() for words in LAUNCHER.values())
    named = any(word in each.words.split() for _, each in declared(Synonyms)) or text.startswith("Did you mean")
    text = text.removeprefix("Did you mean ").rstrip("?").replace("'", "`") if named else text
    text += f": {NOTES[word]}." if word in NOTES else ""
    return KINDS[0] if of_launcher or named else KINDS[1], text


def page() -> str:
    """Return the text of docs/peers.md."""
    counts, tables = list[str](), list[str]()
    for peer in PEERS.values():
        title, answers = f"{peer.name} {peer.version}", {word: answer(word) for word in peer.options}
        number = Counter(kind for kind, _ in answers.values())
        counts.append(f"| {title} | {len(answers)} | " + " | ".join(str(number[kind]) for kind in KINDS) + " |")
        tables.append(f"\n## {title}\n\n| option | | here |\n|---|---|---|")
        tables += [f"| `{word}` | {kind} | {text} |" for word, (kind, text) in sorted(answers.items())]
    head = ["| | options | " + " | ".join(KINDS) + " |", "|---|---|---|---|---|", *counts]
    return "\n".join([ABOUT, *head, *tables]) + "\n"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"] and len(sys.argv) == 3:
        print("\n".join(options_in(Path(sys.argv[2]))))
        sys.exit()
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python benchmarks/peers.py --write | --read FILE")
    PAGE.write_text(page())
    print(PAGE)
