"""Pages from templates."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from accel_train import __version__
from accel_train.errors import needing, one_line
from accel_train.files import check_writable


def check_library() -> None:
    """Raise UserError unless Jinja2 is installed."""
    with needing("Jinja2 is not installed, so there is no report: pip install 'accel-train[report]'."):
        import jinja2  # noqa: F401


def check_page(option: str, path: Path) -> None:
    """Raise UserError if the page `path` that the `option` names cannot be written: before the work for it is done."""
    check_library()
    check_writable(option, path)


def render(template: str, **content: Any) -> str:
    """The page of a template, which is named from the top of the package: "report/one_run/run.html"."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("accel_train", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: one_line(value) if type(value) is str else value,  # not the page's own markup
    )
    now = datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
    page: str = environment.get_template(template).render(version=__version__, now=now, **content)
    return page
