"""The page of a report in a real browser: layout, keyboard, hovering, paper."""

import re
import shutil
from collections.abc import Iterator

import pytest

from resnet8ptq.report.families import Family, make_family
from tests.helpers.cells import predictions, sweep, unmeasured
from tests.helpers.pages import to_page

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

if CHROMIUM is None:
    pytest.skip(
        "needs Chromium on the PATH (Debian: apt install chromium)", allow_module_level=True
    )

from playwright.sync_api import Browser, Page, sync_playwright  # noqa: E402

MODEL = "onnx int8 minmax per tensor"


def few() -> Family:
    measured = sweep(
        ("a", predictions(lost=3), {"latency_p50_ms": 0.3, "baseline/latency_p50_ms": 0.4}),
        ("b", predictions(lost=60), {"backend": "torch", "latency_p50_ms": 0.2}),
    )
    return make_family([*measured.cells, unmeasured("c", "unsupported", "no kernel")])


def many() -> Family:
    runs = [
        (
            f"{number:02}",
            predictions(lost=number),
            {"seed": str(number), "size_bytes": 9e4 + number},
        )
        for number in range(100)
    ]
    return sweep(*runs)


FAMILIES = {
    "few": few,
    "many": many,
    "one": lambda: sweep(("a", predictions(lost=3), {})),
    "none passes": lambda: sweep(("a", predictions(lost=90), {})),
    "all unsupported": lambda: make_family(
        [unmeasured(name, "unsupported", "no") for name in "ab"]
    ),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture
def errors() -> list[str]:
    return []


@pytest.fixture
def tab(browser, tmp_path, errors, request) -> Iterator[Page]:
    """The page of the family that the test names, 1,400 px wide."""
    (tmp_path / "report.html").write_text(to_page(FAMILIES[request.param]()), encoding="utf-8")
    tab = browser.new_page(viewport={"width": 1400, "height": 1000})
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda message: errors.append(message.text))  # also breaches of its policy
    tab.goto((tmp_path / "report.html").as_uri())
    yield tab
    tab.close()


@pytest.mark.parametrize("tab", FAMILIES, indirect=True)
def test_no_page_scrolls_sideways_or_takes_more_than_five_sheets(tab, errors):
    for width in (1400, 400):
        tab.set_viewport_size({"width": width, "height": 800})
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        inner = (
            "[...document.querySelectorAll('.list .wide')].map(d => d.scrollWidth - d.clientWidth)"
        )
        assert max(tab.evaluate(inner)) <= 0
    sheets = len(re.findall(rb"/Type\s*/Page\b(?!s)", tab.pdf(prefer_css_page_size=True)))
    assert 1 <= sheets <= 5
    assert not errors


@pytest.mark.parametrize("tab", ["few"], indirect=True)
def test_the_figure_is_beside_the_table_and_below_the_recommendation(tab):
    boxes = [
        tab.locator(name).bounding_box() for name in (".answer", ".cards", ".trade-off", ".list")
    ]
    answer, cards, figure, table = boxes
    assert answer["y"] < cards["y"] < figure["y"]
    assert abs(figure["y"] - table["y"]) < 10
    assert figure["x"] + figure["width"] <= table["x"]


@pytest.mark.parametrize("tab", ["few"], indirect=True)
def test_a_point_names_itself_beside_the_pointer_and_on_focus(tab):
    point = tab.locator(".panel-of:not(.away) .point[role]").first
    point.locator(".mark").hover(force=True)
    tip, mark = tab.locator(".tip"), point.locator(".mark").bounding_box()
    assert MODEL in tip.inner_text() and "pass" in tip.inner_text()
    assert abs(tip.bounding_box()["y"] - mark["y"]) < 100
    tab.mouse.move(0, 0)
    assert tip.is_hidden()
    point.focus()
    assert tip.is_visible()
    tab.keyboard.press("Enter")
    assert MODEL in tab.locator("tr.on").inner_text()
    assert tab.locator(".panel-of:not(.away) .point[tabindex='0']").count() == 1
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowLeft")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Enter")
    assert "torch" in tab.locator("tr.on").inner_text()


@pytest.mark.parametrize("tab", ["few"], indirect=True)
def test_the_keyboard_sorts_and_shows_all_columns(tab):
    head = tab.get_by_role("columnheader", name="accuracy").get_by_role("button")
    head.focus()
    tab.keyboard.press("Enter")
    shown = [
        float(text.rstrip("%"))
        for text in tab.locator("td.b:nth-child(2)").all_inner_texts()
        if text
    ]
    assert shown == sorted(shown) and len(shown) == 4
    tab.get_by_role("button", name="all columns").press("Enter")
    assert tab.get_by_role("columnheader", name="framework").is_visible()
    assert tab.get_by_role("columnheader", name="model").is_hidden()
