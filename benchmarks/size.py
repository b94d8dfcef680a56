"""Counts what a successor reads and a user learns; docs/architecture.md has the table.

python benchmarks/size.py           # print it
python benchmarks/size.py --write   # and write it into docs/architecture.md
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from pathlib import Path

from accel_train.cli import COMMANDS
from accel_train.config.schema import option_types

ROOT = Path(__file__).parent.parent


def counts() -> dict[str, int]:
    """Return each figure by what it counts, of the files that git has."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=True
    ).stdout.splitlines()
    texts = {
        name: (ROOT / name).read_text() for name in listed if name.endswith((".py", ".md")) and (ROOT / name).exists()
    }
    package = {name: text for name, text in texts.items() if re.match(r"accel_train/.*\.py$", name)}
    lines = [line.strip() for text in package.values() for line in text.splitlines()]
    imports = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for text in package.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    return {
        "files of the package": len(package),
        "lines of the package": len(lines),
        "of these neither empty nor a comment": sum(bool(line) and not line.startswith("#") for line in lines),
        "of these imports": sum(imports),
        "options of `train`": len(option_types()),
        "commands": len(COMMANDS),
        "words of README and docs": sum(
            len(text.split()) for name, text in texts.items() if re.match(r"(README|docs/.*)\.md$", name)
        ),
        "lines of tests": sum(text.count("\n") for name, text in texts.items() if re.match(r"tests/.*\.py$", name)),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    table = "\n".join(["| counted | |", "|---|---|", *(f"| {name} | {count:,} |" for name, count in counts().items())])
    print(table)
    if parser.parse_args().write:
        page, text = ROOT / "docs" / "architecture.md", f"<!-- size -->\n{table}\n<!-- end of size -->"
        page.write_text(re.sub("<!-- size -->.*<!-- end of size -->", text, page.read_text(), flags=re.DOTALL))
