"""MLflow's UI on a real sweep, looked at in a real browser."""

import shutil
from collections.abc import Iterator

import pytest

from resnet8ptq.tracking.mlflow_store import view
from tests.helpers.calling import Called
from tests.helpers.mlflow_server import Server

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

if CHROMIUM is None:
    pytest.skip(
        "needs Chromium on the PATH (Debian: apt install chromium)", allow_module_level=True
    )

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright  # noqa: E402

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def ui(sweep: Called) -> Iterator[str]:
    """Serve the sweep's store; yield the address of MLflow's UI."""
    with Server(sweep.folder, sweep.folder / "mlruns" / "mlflow.db") as server:
        yield server.uri


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page of its own for each test: the UI keeps what it has shown when only the hash moves."""
    page = browser.new_page(viewport={"width": 2200, "height": 1200})
    page.set_default_timeout(PATIENCE_MS)
    yield page
    page.close()


def open_artifact(page: Page, address: str, shown: Locator) -> None:
    """Open the page of an artifact, again where the UI has come up without the run's files.

    It asks for their list once; on a busy machine it can ask before it knows the run, and then
    shows "No Artifacts Recorded" for good.
    """
    missing = page.get_by_text("No Artifacts Recorded")
    for _ in range(5):
        page.goto("about:blank")
        page.goto(address)
        expect(shown.or_(missing).first).to_be_visible(timeout=PATIENCE_MS)
        if shown.is_visible():
            return
    expect(shown).to_be_visible(timeout=PATIENCE_MS)


def test_comparison_page_lists_parent_and_children_with_columns(sweep, ui, page):
    page.goto(ui + view.path(sweep.parent.info.experiment_id))
    # A page for agents has others in place of these.
    expect(page.get_by_role("link", name="Models", exact=True)).to_be_visible(timeout=PATIENCE_MS)
    for run in [sweep.parent, *sweep.children]:
        link = page.get_by_role("link", name=run.info.run_name).first  # other tests add their runs
        expect(link).to_be_visible(timeout=PATIENCE_MS)
    for column in ("verdict", "accuracy_percent", "loss_points", "size_kb"):
        expect(page.get_by_role("columnheader", name=column, exact=True).first).to_be_visible()
    for run in sweep.children:
        verdict = page.get_by_text(run.data.tags["verdict"], exact=True).first
        expect(verdict).to_be_visible()
        if "size_kb" in run.data.metrics:
            shown = str(run.data.metrics["size_kb"])
            expect(page.get_by_text(shown, exact=True).first).to_be_visible()


def test_charts_of_the_comparison_start_with_the_trade_offs(sweep, ui, page):
    page.goto(ui + view.path(sweep.parent.info.experiment_id) + "&compareRunsMode=CHART")
    heading = page.get_by_text("Trade-offs", exact=False).first
    leading = page.get_by_text("Model metrics", exact=False).first
    expect(heading).to_be_visible(timeout=PATIENCE_MS)
    expect(leading).to_be_visible(timeout=PATIENCE_MS)
    boxes = heading.bounding_box(), leading.bounding_box()
    assert boxes[0] and boxes[1] and boxes[0]["y"] < boxes[1]["y"]


def test_models_page_shows_the_metrics_of_each_model(sweep, ui, page):
    experiment = sweep.parent.info.experiment_id
    page.goto(f"{ui}/#/experiments/{experiment}/models?workflowType=machine_learning")
    for run in sweep.children:
        if run.data.tags["status"] == "ok":
            link = page.get_by_role("link", name=run.info.run_name).first
            expect(link).to_be_visible(timeout=PATIENCE_MS)
    expect(page.get_by_role("columnheader", name="accuracy_percent").first).to_be_visible()


def test_run_page_shows_metrics_and_figures(sweep, ui, page):
    run = next(run for run in sweep.children if run.data.tags["status"] == "ok")
    address = f"{ui}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
    path = f"/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
    page.goto(f"{ui}{path}?workflowType=machine_learning")
    accuracy = page.get_by_text("accuracy_percent", exact=True).first
    expect(accuracy).to_be_visible(timeout=PATIENCE_MS)
    shown = str(run.data.metrics["accuracy_percent"])
    expect(page.get_by_text(shown, exact=True).first).to_be_visible()
    expect(page.get_by_role("link", name="Models", exact=True)).to_be_visible()
    picture = page.locator("img[src*='confusion.png'], img[src^='blob:']").first
    open_artifact(page, f"{address}/artifacts/confusion.png", picture)
    assert picture.evaluate("image => image.complete && image.naturalWidth") > 500


def test_parent_page_shows_the_report(sweep, ui, page):
    run = sweep.parent
    experiment = f"{ui}/#/experiments/{run.info.experiment_id}"
    frame = page.locator("iframe").first
    open_artifact(page, f"{experiment}/runs/{run.info.run_id}/artifacts/report.html", frame)
    report = page.frame_locator("iframe").locator("h1")
    expect(report).to_contain_text("Quantization report shapes", timeout=PATIENCE_MS)
    pictures = page.frame_locator("iframe").locator(".method img")
    assert pictures.first.evaluate("image => image.naturalWidth") > 300
