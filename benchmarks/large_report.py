"""The report of a thousand runs: time to make it, and time until Chromium shows it.

    python -m benchmarks.large_report SWEEP_FOLDER REPORT_FOLDER

The runs are those of a finished sweep, read from its folder and repeated as further seeds, with a
few predictions changed. The report is made by the code that ends a sweep. Then Chromium opens the
page from disk in a new process, and `shown` ends with the second frame after the page has loaded.
"""

import shutil
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.tables import spread
from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.report import comparison, page, trade_off
from resnet8ptq.report.comparison import Cell, Family
from resnet8ptq.report.facts import labels
from resnet8ptq.report.terminal import REPORT
from resnet8ptq.tasks.hits import Hits
from resnet8ptq.tasks.values import Paired
from resnet8ptq.tracking import sync
from resnet8ptq.tracking.store import Store

RUNS, OPENINGS = 1000, 5
CHANGED = 0.01  # of the predictions of a repeated run, at most
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
_SHOWN = """() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(
    () => done(performance.now()))))"""


def multiply(family: Family, count: int) -> Family:
    """Return a family of `count` runs made of the measured ones."""
    random = np.random.default_rng(0)
    cells = [_vary(family.measured[i % len(family.measured)], i, random) for i in range(count)]
    names = labels([cell.record for cell in cells])
    return comparison.compare([replace(c, label=n) for c, n in zip(cells, names, strict=True)])


def _vary(cell: Cell, number: int, random: np.random.Generator) -> Cell:
    assert cell.paired is not None and isinstance(cell.paired.model, Hits)
    model = cell.paired.model
    changed = random.random(len(model.labels)) < random.uniform(0, CHANGED)
    drawn = random.integers(0, model.labels.max() + 1, len(model.labels))
    own = Hits(np.where(changed, drawn, model.predictions), model.labels)
    accuracy, record = float(own.right.mean()), cell.record
    low, high = own.interval
    metrics = {
        **record.metrics,
        **{"accuracy": accuracy, "expected_accuracy": accuracy},
        **{"drop": record.metrics["baseline/accuracy"] - accuracy},
        **{"ci95/value_low": low, "ci95/value_high": high},
        "size_bytes": record.metrics["size_bytes"] * random.uniform(0.9, 1.1),
        "latency_p50_ms": record.metrics.get("latency_p50_ms", 1.0) * random.uniform(0.8, 1.2),
    }
    params = {**record.params, "seed": str(number), "artifact_sha256": f"{number:064x}"}
    params.pop("outputs_sha256", None)  # each run is another file
    varied = record.changed(run_id=f"{number:032x}", metrics=metrics, params=params)
    return replace(cell, record=varied, paired=Paired(own, cell.paired.baseline))


def open_page(path: Path) -> float:
    """Return the seconds from the start of navigation until a new Chromium shows the page."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=list(FLAGS)
        )
        tab = browser.new_page(viewport={"width": 1400, "height": 1000})
        tab.goto(path.absolute().as_uri())
        seconds = float(tab.evaluate(_SHOWN)) / 1000
        browser.close()
    return seconds


def main() -> None:
    """Make the report and open it; print the times."""
    source, folder = map(Path, sys.argv[1:])
    records = [record for record in sync.load_records(source) if not record.is_analysis]
    (family, *_) = comparison.load(Store("", "", ""), records)
    many = multiply(family, RUNS)
    start = time.perf_counter()
    chosen = page.select([many], ReportConfig())
    html = page.to_html(chosen, [trade_off.panels(selected) for selected in chosen], {})
    made_s = time.perf_counter() - start
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REPORT).write_text(html, encoding="utf-8")
    shown = [open_page(folder / REPORT) for _ in range(OPENINGS)]
    print(f"{RUNS} runs, {len(html) / 1e6:.1f} MB: made in {made_s:.1f} s")
    print(f"shown after {spread(shown)} s (median {statistics.median(shown):.2f})")


if __name__ == "__main__":
    main()
