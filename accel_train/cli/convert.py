"""`accel-train convert`."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from accel_train.cli.common import below_one, importing
from accel_train.config.options import CommandOptions, parse_command
from accel_train.errors import print_line


@dataclass(frozen=True)
class Convert(CommandOptions):
    """Print a recipe that learns what a command of another trainer learns: timm's train.py, torchvision's
    references/classification/train.py, or `yolo classify train`.

    The recipe's comments say what is lost, what differs and how values were computed. If something is lost that changes
    what is learned, the exit code is 1.

    accel-train convert "torchrun --nproc_per_node=8 train.py --data-path imagenet --lr 0.2" > recipe.yaml
    """

    command: Annotated[Positional[str], arg(metavar="COMMAND")]
    """The whole command, in quotation marks or not, with its launcher; or a file that has it, or a run's args.yaml."""
    peer: Literal["timm", "torchvision", "ultralytics"] | None = None
    """Whose command it is, if it could be of several."""
    processes: int | None = None
    """The number of processes, if the command does not say it: its batches are those of one process."""
    lossy: bool = False
    """Exit with code 0 also if something is lost."""

    def mistakes(self) -> list[str]:
        return below_one(processes=self.processes)


def convert(arguments: Sequence[str]) -> int:
    """Run `accel-train convert`; return the exit code."""
    own, words = _divide(arguments)
    text = words[0] if len(words) == 1 else shlex.join(words)
    if words:  # a word that begins with "-" would be read as an option
        own.append(text if not text.startswith("-") else f" {text}")
    options, _ = parse_command(Convert, own, "accel-train convert", positional=("command",))
    with importing():
        from accel_train.convert.command_line import read_command
        from accel_train.convert.recipe import convert as converted
        from accel_train.convert.recipe import recipe_text

        translation = converted(read_command(options.command, options.peer, options.processes))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `convert … | head` ends quietly
    sys.stdout.write(recipe_text(translation))
    sys.stdout.flush()
    if translation.lost and not options.lossy:
        print_line(
            f"accel-train convert: what changes what is learned is lost: {', '.join(translation.lost)}. The recipe's "
            "first lines say why; with --lossy this is no error.",
            sys.stderr,
        )
        return 1
    return 0


def _divide(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (our own options with their values, the words of the command). Ours may be before and after it."""
    own, words = list[str](), list[str]()
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        name, equals, _ = word.partition("=")
        if name in ("--lossy", "-h", "--help"):
            own.append(word)
        elif name in ("--peer", "--processes"):
            own += [word, *([] if equals else remaining[:1])]
            remaining = remaining[not equals :]
        else:
            words.append(word)
    return own, words
