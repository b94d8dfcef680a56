"""Writes docs/peers.md: what becomes of each option of timm's, torchvision's and ultralytics' here.

    python benchmarks/peers.py --write
    python benchmarks/peers.py --read train.py      # print the options in one of their files, for peers.txt

accel_train/convert/peers.txt has their options with types and defaults, from their own files, and what becomes of each
here; the words are those that `accel-train train` answers to somebody who types one of them (config/synonyms.py and
`Synonyms`), unless the list has its own.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import yaml

from accel_train.config.option_types import option_types, unknown_option
from accel_train.convert.peers import PEERS, PeerOption

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/peers.md"
KINDS = ("has", "partly", "not")
APART = "apart"
ABOUT = """\
# Coming from timm, torchvision or ultralytics

What becomes of their options here. *Has*: whoever comes with it gets the same effect here, by an option, by another
option's value, on the launch command, or because it is always so; values may be counted in another way: read the
[help](options.md). *Partly*: a part of its effect, or of its values. *Not*: with the reason. `accel-train train` knows
these names, too, and answers; [`accel-train convert`](convert.md) translates whole commands. The page is written by
`python benchmarks/peers.py --write`.

*Of other tasks* are options that ultralytics itself describes as those of something else than training and using a
classifier: the column "Supported Tasks" of its documentation of augmentation does not have classify, its default.yaml
says another task or has them among its export settings, or the description is of boxes, masks, keypoints, videos,
tracking or detections.
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


def told(word: str) -> str:
    """Return what `accel-train train` answers to somebody who gives the option `word`, without its first words."""
    known = option_types()
    if word in known:
        return f"`{word}`"
    text = unknown_option(word, "", known).partition("().")[2].strip()
    names = re.fullmatch(r"Did you mean (.*)\?", text)
    return names[1].replace("'", "`") if names else text


def row(option: PeerOption) -> str:
    """Return the line of a table."""
    verdict = "" if option.verdict == APART else f" {option.verdict} |"
    return f"| `{option.name}` |{verdict} {option.answer or told(option.name)} |"


def page() -> str:
    """Return the text of docs/peers.md."""
    counts, tables = list[str](), list[str]()
    for peer in PEERS.values():
        title, options = f"{peer.name} {peer.version}", [peer.options[name] for name in sorted(peer.options)]
        others = [option for option in options if option.verdict == APART]
        number = Counter(option.verdict for option in options)
        cells = (len(options), len(others), *(number[kind] for kind in KINDS))
        counts.append(f"| {title} | " + " | ".join(map(str, cells)) + " |")
        tables.append(f"\n## {title}\n\n| option | | here |\n|---|---|---|")
        tables += [row(option) for option in options if option.verdict != APART]
        if others:
            tables.append(f"\n### Of other tasks, in {peer.name}\n\n| option | why, and what is here |\n|---|---|")
            tables += [row(option) for option in others]
    head = ["| | options | of other tasks | has | partly | not |", "|---|---|---|---|---|---|", *counts]
    return "\n".join([ABOUT, *head, *tables]) + "\n"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"] and len(sys.argv) == 3:
        print("\n".join(options_in(Path(sys.argv[2]))))
        sys.exit()
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python benchmarks/peers.py --write | --read FILE")
    PAGE.write_text(page())
    print(PAGE)
