"""Winners of `resnet8ptq ship` beside the flagships and NNCF: `python -m studies.ship_beside`.

    python -m studies.ship_beside networks=resnet8,kws    some of the networks of ship.csv
    python -m studies.ship_beside report=true             only the table, from ship_beside.csv

Of each network of `studies.ship`, on the same samples and with the same calibration draw: the
winner, made again by its settings; `experiment=flagship_quick` and `flagship`; NNCF with accuracy
control (`studies.accuracy_control`). What was measured is kept in ship_beside.csv, and not measured
again. SHARED names the folder of networks and data.
"""

import csv
import resource
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.setting import REPO
from benchmarks.tables import table
from resnet8ptq.config import words as grammar
from resnet8ptq.core import command, files, machine
from resnet8ptq.experiment.ladder import rungs
from resnet8ptq.report import verdicts
from resnet8ptq.tasks.contract import Paired
from resnet8ptq.tasks.statistics import SIGNIFICANCE
from resnet8ptq.tracking.journal import Journal
from resnet8ptq.tracking.record import RunRecord
from studies import ship

RECORD = REPO / "studies" / "ship_beside.csv"
FLAGSHIPS = ("flagship_quick", "flagship")
LADDER, NNCF, SEED = "ladder", "nncf", "seed=42"
LIMIT = 0.01  # in the unit of the loss


@dataclass
class Arguments:
    """What `python -m studies.ship_beside` takes, as key=value; networks with commas."""

    networks: str = ""
    folder: str = "runs/ship_beside"
    report: bool = False


def main() -> int:
    """Measure what is not in the table yet, then print the table."""
    asked = command.parse_words(sys.argv[1:], Arguments, __doc__ or "")
    rows, won = read(), {row["network"]: row["winner"] for row in ship.read()}
    known = {row["network"] for row in rows}
    chosen = asked.networks.split(",") if asked.networks else list(won)
    for network in [] if asked.report else chosen:
        if network not in known:
            rows += measure(network, won[network], Path(asked.folder).absolute())
            names = list(rows[0])
            files.write_text(RECORD, files.to_csv([names, *([r[n] for n in names] for r in rows)]))
    print(render(rows))
    return 0


def measure(network: str, winner: str, folder: Path) -> list[dict[str, Any]]:
    """Make the models of a network; return a row for each."""
    words = ship.NETWORKS[network]
    store, sweep = f"tracking.root={folder / 'mlruns'}", folder / f"{network}_flagships"
    if not sweep.exists():
        both = f"experiment={','.join(FLAGSHIPS)}"
        call("resnet8ptq", "run", "-m", both, SEED, *words, store, f"hydra.sweep.dir={sweep}")
    places = {name: next(sweep.glob(f"{number}_*")) for number, name in enumerate(FLAGSHIPS)} | {
        name: folder / f"{network}_{name}" for name in (LADDER, NNCF)
    }
    halved = "of the test samples" in load(places[FLAGSHIPS[0]])[0].chosen_by
    words = (*words, *(("evaluate.choice=half",) if halved else ()))
    run, cpu_minutes = ("resnet8ptq", "run", *words, SEED, store), {}
    if not places[LADDER].exists():
        call(*run, *settings_of(winner), f"hydra.run.dir={places[LADDER]}")
    if not places[NNCF].exists():
        file = folder / f"{network}_nncf.xml"
        cpu_minutes[NNCF] = call("studies.accuracy_control", str(file), *words, SEED)
        named = f"backend=file backend.path={file}".split() if file.exists() else []
        if named:
            call(*run, *named, f"hydra.run.dir={places[NNCF]}")
    models = {name: load(place) for name, place in places.items() if place.exists()}
    best = min((models[name] for name in FLAGSHIPS), key=lambda model: model[0].drop or 0.0)
    return [
        describe(network, name, *model, best[1], cpu_minutes.get(name, ""))
        for name, model in models.items()
    ]


def settings_of(winner: str) -> list[str]:
    """Return the settings of a winner of ship.csv: those of the first step, and its changes."""
    first = rungs.start(rungs.Seen("onnx", machine.has_vnni(), LIMIT)).settings
    changes = [] if winner == "the first step" else shlex.split(winner)
    by_key = {grammar.parse(word).key_or_group: word for word in (*first, *changes)}
    return ["backend=onnx", *by_key.values()]


def call(module: str, *words: str) -> str:
    """Run a module; return its minutes of the CPU."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", module, *words], check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return f"{(sum(after[:2]) - sum(before[:2])) / 60:.1f}"


def load(folder: Path) -> tuple[RunRecord, Paired]:
    """Return a run's record, and its values of each sample."""
    record = RunRecord.of_journal(Journal.load(folder), folder)
    with np.load(folder / "predictions.npz") as arrays:
        return record, record.task.test.read(dict(arrays))


def describe(
    network: str, name: str, record: RunRecord, values: Paired, best: Paired, cpu_minutes: str
) -> dict[str, Any]:
    """Return a model as a row, with the p-value that it is worse than the best flagship."""
    metric, total = record.task.metric, int(record.total or 0)
    margin = values.margin(metric, LIMIT, total)
    worse = values.margin_over(best, metric, 0.0, total)
    return {
        "date": date.today().isoformat(),
        "network": network,
        "model": name,
        "metric": metric.name,
        "samples": total,
        "loss": record.drop,
        "verdict": verdicts.decide([margin], [total])[0].outcome,
        "bytes": record.size_bytes,
        "speedup": record.speedup,
        "p_worse": "" if values is best else worse.p_beyond,
        "cpu_minutes": cpu_minutes,
    }


def read() -> list[dict[str, Any]]:
    """Return what was measured before."""
    if not RECORD.exists():
        return []
    with RECORD.open(newline="") as file:
        return list(csv.DictReader(file))


def render(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of `ship.md`."""
    lines = []
    for row in rows:
        worse = row["p_worse"]
        shown = "best flagship" if worse == "" else f"{float(worse):.3f}"
        significant = worse != "" and float(worse) <= SIGNIFICANCE
        name = f"{row['model']}, worse" if significant else row["model"]
        samples = str(row["samples"])
        lines.append([row["network"], name, samples, *ship.show(row), shown, row["cpu_minutes"]])
    heads = ["network", "model", "samples", "loss", "verdict", "kB", "speed"]
    return table([*heads, "p worse", "CPU minutes"], lines)


if __name__ == "__main__":
    sys.exit(main())
