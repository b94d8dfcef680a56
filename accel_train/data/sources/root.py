"""Whether what --data.root names is there. The command line asks this before it imports torch."""

from __future__ import annotations

from accel_train.config.schema import Data
from accel_train.config.url import check_protocol, is_url
from accel_train.errors import UserError
from accel_train.user_code.reference import parse_reference

NAMED = {
    "tar": "a tar file or a folder of them",
    "wds": "the folder of the shards",
    "hfds/parquet": "a folder of Parquet files",
}
"""What --data.root names, by --data.name."""


def check_root(data: Data) -> None:
    """Raise UserError if the data is to be on this machine, and is not where --data.root says."""
    root, kind = data.root, data.name.partition("/")[0]
    if is_url(root):
        if parse_reference("data.name", data.name) is None:
            check_protocol(root)
        return
    if kind == "digits" and root != Data().root:
        # Whoever names own data and leaves out the name, whose default is digits, must not get a model of digits.
        own = {".csv": "csv", ".tar": "tar"}.get(root.suffix.lower(), "folder")
        raise UserError(
            f"--data.root {root}: --data.name is digits, which come with the package and are not read from there. "
            f"For your own data give its kind, too: --data.name {own}."
        )
    if kind == "folder" and not root.is_dir():
        what = "is a file, not a folder" if root.exists() else "does not exist"
        table = " To train on a table, give --data.name csv." if root.suffix.lower() == ".csv" else ""
        raise UserError(f"--data.root {root} {what}; name the folder that holds train/ or the class folders.{table}")
    if kind == "csv" and not root.is_file():
        what = "is not a regular file" if root.exists() else "does not exist"
        raise UserError(f"--data.root {root} {what}; name a CSV file.")
    named = NAMED.get(data.name, NAMED.get(kind))
    if named is not None and not root.exists():
        raise UserError(f"--data.root {root} does not exist; name {named}.")
