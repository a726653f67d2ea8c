"""Winners of `resnet8ptq ship` against the flagships and NNCF: `python -m studies.ship_beside`.

    python -m studies.ship_beside networks=resnet8,kws    some of the networks
    python -m studies.ship_beside report=true             only the table, from ship_beside.csv

For each network of `studies.ship`, these models are compared on the same samples: the winner;
`experiment=flagship_quick` and `flagship` with the same calibration draw; NNCF with accuracy
control (`studies.accuracy_control`). The measurements are kept in ship_beside.csv and not repeated.
SHARED names the folder of networks and data.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

import numpy as np

from benchmarks.setting import REPO
from benchmarks.tables import table
from resnet8ptq.core import command
from resnet8ptq.evaluation.stopped_hits import read_pair
from resnet8ptq.report import verdicts
from resnet8ptq.tasks.scoring.statistics import SIGNIFICANCE
from resnet8ptq.tasks.scoring.values import Paired
from resnet8ptq.tracking.journal import Journal
from resnet8ptq.tracking.mlflow_store import sync
from resnet8ptq.tracking.record import RunRecord
from studies import ship

RECORD = REPO / "studies" / "ship_beside.csv"
FLAGSHIPS = ("flagship_quick", "flagship")
SHIP, NNCF, SEED = "ship", "nncf", "seed=42"
LIMIT = 0.01  # in the unit of the loss


@dataclass
class Arguments:
    """The key=value arguments of `python -m studies.ship_beside`; networks with commas."""

    networks: str = ""
    minutes: float = 10
    folder: str = "runs/ship_beside"
    report: bool = False


def main() -> int:
    """Measure the networks that the record lacks, then print the table."""
    asked = command.parse_words(sys.argv[1:], Arguments, __doc__ or "")
    chosen = [] if asked.report else ship.choose(asked.networks)
    make = partial(measure, minutes=asked.minutes, folder=Path(asked.folder).absolute())
    print(render(ship.complete(RECORD, chosen, make)))
    return 0


def measure(network: str, minutes: float, folder: Path) -> list[dict[str, Any]]:
    """Make the models of a network; return a row for each."""
    words, spent = ship.NETWORKS[network], {}
    store = f"tracking.root={folder / 'mlruns'}"
    places = {name: folder / f"{network}_{name}" for name in (SHIP, "flagships", NNCF)}
    if not places[SHIP].exists():
        asked = (*words, SEED, f"minutes={minutes:g}", store, f"hydra.sweep.dir={places[SHIP]}")
        spent[SHIP] = ship.call("resnet8ptq", "ship", *asked)["cpu_minutes"]
    if not places["flagships"].exists():
        both = (f"experiment={','.join(FLAGSHIPS)}", *words, SEED, store)
        ship.call("resnet8ptq", "run", "-m", *both, f"hydra.sweep.dir={places['flagships']}")
    records = dict(zip(FLAGSHIPS, sync.load_records(places["flagships"]), strict=True))
    records[SHIP] = ship.find_winner(places[SHIP])[1]
    if not places[NNCF].exists():
        halved = "of the test samples" in records[SHIP].chosen_by
        words = (*words, *(("evaluate.choice=half",) if halved else ()), SEED)
        file = folder / f"{network}_nncf.xml"
        made = ship.call("studies.accuracy_control", str(file), *words)
        spent[NNCF] = made["cpu_minutes"]
        if file.exists():
            named = ("backend=file", f"backend.path={file}", f"hydra.run.dir={places[NNCF]}")
            ship.call("resnet8ptq", "run", *words, store, *named)
    if places[NNCF].exists():
        record = RunRecord.of_journal(Journal.load(places[NNCF]), places[NNCF])
        if record.status == "ok":  # not where it left every layer in float
            records[NNCF] = record
    values = {name: read_values(record) for name, record in records.items()}
    best = values[min(FLAGSHIPS, key=lambda name: records[name].loss or 0.0)]
    return [
        describe(network, name, record, values[name], best, spent.get(name, ""))
        for name, record in records.items()
    ]


def read_values(record: RunRecord) -> Paired:
    """Return the values of each sample of a run, from its folder."""
    with np.load(
        Path(url2pathname(urlparse(record.artifact_uri).path)) / "predictions.npz"
    ) as kept:
        return read_pair(record.task.test, dict(kept))


def describe(
    network: str, name: str, record: RunRecord, values: Paired, best: Paired, spent: str
) -> dict[str, Any]:
    """Return a model as a row, with the p-value that it is worse than the best flagship."""
    metric, total = record.task.metric, int(record.samples or 0)
    margin = values.margin(metric, LIMIT, total)
    worse = values.margin_over(best, metric, 0.0, total)
    return {
        "date": date.today().isoformat(),
        "network": network,
        "model": name,
        "metric": metric.name,
        "samples": total,
        "loss": record.loss,
        "verdict": verdicts.decide([(margin, total)])[0].outcome,
        "bytes": record.size_bytes,
        "speedup": record.speedup,
        "p_worse": "" if values is best else worse.p_beyond,
        "cpu_minutes": spent,
    }


def render(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of `ship.md`."""
    lines = []
    for row in rows:
        worse = row["p_worse"]
        shown = "best flagship" if worse == "" else f"{float(worse):.3f}"
        significant = worse != "" and float(worse) <= SIGNIFICANCE
        name = f"{row['model']}, worse" if significant else row["model"]
        samples = str(row["samples"])
        *known, _ = ship.show(row)  # a speed needs an idle machine
        lines.append([row["network"], name, samples, *known, shown, row["cpu_minutes"]])
    heads = ["network", "model", "samples", "loss", "verdict", "kB", "p worse", "CPU minutes"]
    return table(heads, lines)


if __name__ == "__main__":
    sys.exit(main())
