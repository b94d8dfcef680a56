"""One run's page in a real browser: nothing overflows, whatever the width, the theme and the number of classes."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import pytest
from browser import CHROMIUM, in_browser
from made_up import made_up_evaluation, made_up_run
from PIL import Image

from accel_train.tools.report.report import Picture, page_of_run

pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"), pytest.mark.slow]

NAMES = {
    2: ["cat", "<b>dog</b> & " + "x" * 120],
    10: [f"{number} " + "a long name " * number for number in range(10)],
    1000: [f"class number {number}, with a long name" for number in range(1000)],
}
# What is wider than its place: an element that is not in a box that scrolls, text in a chart that leaves it.
PROBE = """(() => {
    const root = document.documentElement, wide = [];
    const inside = element => element.closest(".scroll") || element.closest("svg");
    for (const element of document.body.querySelectorAll("*"))
        if (!inside(element) && element.getBoundingClientRect().right > root.clientWidth + 1)
            wide.push(element.tagName + "." + element.className);
    for (const box of document.querySelectorAll("figure, .lead, .note, .chart"))
        if (box.scrollWidth > box.clientWidth + 1) wide.push("in " + box.className);
    for (const text of document.querySelectorAll("svg text")) {
        const outer = text.closest("svg").getBoundingClientRect(), inner = text.getBoundingClientRect();
        if (inner.right > outer.right + 1 || inner.left < outer.left - 1 || inner.bottom > outer.bottom + 1)
            wide.push("text " + text.textContent);
    }
    const style = getComputedStyle(document.body);
    const used = Math.max(...[...document.querySelectorAll(".charts")].map(each => each.getBoundingClientRect().right));
    return {wide: wide.slice(0, 5), scrolls: root.scrollWidth > root.clientWidth, background: style.backgroundColor,
            color: style.color, used, problems: window.problems};
})()"""


def uri() -> str:
    file = io.BytesIO()
    Image.new("RGB", (96, 96), (200, 80, 20)).save(file, format="png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def page_with(count: int) -> str:
    names = NAMES[count]
    losses = [2.0, 1.0, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3]
    images = {"images": 10 * count, "class_images": [1 + number % 19 for number in range(count)]}
    run = made_up_run(names, train=[1 / n for n in range(1, 10)], val=losses, data={"train": images, "unused": "9 .db"})
    shown = [Picture("folder/" + "n" * 80 + ".jpg", uri(), f"{names[-1]} (90%)", f"{names[0]} (1%)")] * 7
    evaluation = made_up_evaluation(names, 4000 if count > 10 else 200)
    return page_of_run(run, evaluation, shown, ["A note about " + "y" * 150])


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("count", NAMES)
def test_nothing_overflows(tmp_path: Path, count: int, dark: bool) -> None:
    page = page_with(count)
    for width in (390, 900, 1440):
        seen = in_browser(page, tmp_path, width, PROBE, dark=dark)
        assert seen["wide"] == [] and not seen["scrolls"] and seen["problems"] == [], width
        assert seen["used"] > width - 40  # all but the margin and the scroll bar
        light = sum(map(int, re.findall(r"\d+", seen["background"]))) > sum(map(int, re.findall(r"\d+", seen["color"])))
        assert light != dark


def test_a_probe_that_cannot_fail_would_prove_nothing(tmp_path: Path) -> None:
    page = page_of_run(made_up_run(train=[1.0]), {}, [], [])
    broken = page.replace("<header>", '<header><div style="width: 3000px">wide</div>', 1)
    seen = in_browser(broken, tmp_path, 900, PROBE)
    assert seen["scrolls"] and seen["wide"] == ["DIV."]
