"""Pages in headless Chromium."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def in_browser(page: str, folder: Path, width: int, script: str, *, dark: bool = False) -> Any:
    """What `script` (JavaScript, an expression) gives on the page, `width` pixels wide.

    The page is in a frame, because a window of headless Chromium is never narrower than 500 pixels.
    """
    assert CHROMIUM
    probe = "<script>window.problems = []; window.onerror = text => window.problems.push(text);</script>"
    framed = escape(page.replace("<head>", f"<head>{probe}", 1))
    file = folder / f"probe-{width}.html"
    file.write_text(
        "<!doctype html><meta name='color-scheme' content='light dark'><body style='margin: 0'>"
        f"<iframe width={width} height=2000 style='border: 0' srcdoc=\"{framed}\"></iframe>"
        "<script>window.onload = () => { document.title = JSON.stringify("
        f"document.querySelector('iframe').contentWindow.eval({json.dumps(script)})) }}</script>",
        encoding="utf-8",
    )
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1600,2100", "--dump-dom",
         f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--user-data-dir={folder / 'profile'}",
         file.as_uri()],
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title, done.stderr
    return json.loads(unescape(title[1]))
