"""Finds the image files in a folder and its subfolders."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePath

from accel_train.errors import UserError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""The same as torchvision's ImageFolder; other files (Thumbs.db, notes) do not count as images."""


def is_image(name: str) -> bool:
    """Whether a file of this name (the last part of a path) counts as an image."""
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


@dataclass(frozen=True)
class FolderContents:
    """The contents of a folder tree. Paths are relative to it, with "/", and sorted. Hidden files are excluded."""

    images: list[str]
    folders: list[str]
    others: Counter[str]
    """How many other files there are of each extension: {".heic": 12}."""
    repeated: list[str]
    """Symbolic links to folders that are already included; they are not followed."""


def find_images(root: Path) -> FolderContents:
    """The images in the tree of `root`; each folder counts once, even if symbolic links also lead to it.

    Raises UserError if a folder cannot be read.
    """
    images: list[str] = []
    folders: list[str] = []
    others: Counter[str] = Counter()
    repeated: list[str] = []

    def refuse(error: OSError) -> None:  # os.walk would continue without the folder
        raise UserError(
            f"the folder {error.filename} cannot be read ({error.strerror}); make it readable or remove it."
        )

    def walk(top: Path) -> list[str]:
        """Collect the contents of `top` (the root or a folder in it); return the links to folders."""
        links: list[str] = []
        for where, below, files in os.walk(top, onerror=refuse):
            here = Path(where).relative_to(root).as_posix()
            real = os.path.realpath(where)
            if real in seen:
                repeated.append(here)
                below.clear()
                continue
            seen.add(real)
            prefix = "" if here == "." else here + "/"
            below[:] = [name for name in below if not name.startswith(".")]
            for name in below:
                (links if Path(where, name).is_symlink() else folders).append(prefix + name)
            for name in files:
                if is_image(name):
                    images.append(prefix + name)
                elif not name.startswith("."):
                    others[PurePath(name).suffix.lower() or name] += 1
        return links

    # A link to a parent folder would make a cycle.
    seen = {str(above) for above in Path(os.path.realpath(root)).parents}
    links = walk(root)
    while links:  # after all real folders, and in the same order on every machine
        following = sorted(links)
        links = []
        for link in following:
            if os.path.realpath(root / link) not in seen:
                folders.append(link)
                links += walk(root / link)
            else:
                repeated.append(link)
    return FolderContents(sorted(images), sorted(folders), others, sorted(repeated))
