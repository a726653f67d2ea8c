"""`resnet8ptq ship` on several networks: `python -m studies.ship [key=value ...]`.

    python -m studies.ship                          every network, and the tables
    python -m studies.ship networks=kws,vit         some of them
    python -m studies.ship report=true              only the tables, from ship.csv

One command ships each network, in a separate folder; the plain 8-bit configuration runs for
comparison. The measurements are kept in ship.csv and not repeated. SHARED names the folder of
networks and data. `folder=` keeps the runs.
"""

import csv
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from math import log10
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.setting import REPO
from benchmarks.tables import table
from resnet8ptq.core import command, files
from resnet8ptq.experiment.network_properties import ATTENTION, POOLS
from resnet8ptq.exploration.search import step_table
from resnet8ptq.report.verdicts import PASS
from resnet8ptq.results import load_run, load_sweep
from resnet8ptq.sweeps.search import noise
from resnet8ptq.tracking.mlflow_store import sync
from resnet8ptq.tracking.record import RunRecord
from studies.recipes import NETWORKS as RECIPES_ON

RECORD = REPO / "studies" / "ship.csv"
SHARED = os.environ.get("SHARED", "")
NETWORKS: dict[str, tuple[str, ...]] = {
    **{name: words for name, words in RECIPES_ON.items() if name != "shapes"},
    "yolox_nano": (
        *("data=coco", "task=detection", "preprocess=yolox"),
        *(f"data.images={SHARED}/coco/images", f"data.annotations={SHARED}/coco/instances.json"),
        f"model.path={SHARED}/detectors/yolox_nano.onnx",
    ),
    "vit": ("data=cifar10", "preprocess=unit", f"model.path={SHARED}/vit/vit_cifar10.onnx"),
    "minilm": (
        *("data=arrays", f"data.root={SHARED}/text/tokens.npz"),
        f"model.path={SHARED}/text/minilm_banking77.onnx",
        "data.inputs={input_ids: ids, attention_mask: mask}",
    ),
}
PLAIN = ("backend=onnx", "dtype=int8", "per_channel=true")
KINDS = (  # of steps, later ones first: each builds on earlier ones
    *("nodes_to_exclude", "corrections.adaround", "corrections.smooth_quant"),
    *("corrections.bias_correction", "op_types", "calib"),
)
SHOWN = ("metric", "loss", "verdict", "bytes", "speedup")
HELPS = 0.8  # of the noise of the plain step: a step with less has helped


@dataclass
class Arguments:
    """The key=value arguments of `python -m studies.ship`; networks with commas."""

    networks: str = ""
    minutes: float = 10
    goal: str = "fastest"
    folder: str = "runs/ship"
    report: bool = False


def main() -> int:
    """Ship the networks that the record lacks, then print the tables."""
    asked = command.parse_words(sys.argv[1:], Arguments, __doc__ or "")
    chosen = [] if asked.report else choose(asked.networks)
    print(render(complete(RECORD, chosen, lambda network: [measure(network, asked)])))
    return 0


def choose(networks: str) -> list[str]:
    """Return the networks whose names are joined by commas; all for an empty text."""
    return networks.split(",") if networks else list(NETWORKS)


def complete(
    record: Path, networks: Sequence[str], measure: Callable[[str], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the rows of a CSV file, with those of `networks` that it lacks, measured now."""
    rows: list[dict[str, Any]] = []
    if record.exists():
        with record.open(newline="") as file:
            rows += csv.DictReader(file)
    known = {row["network"] for row in rows}
    for network in networks:
        if network not in known:
            rows += measure(network)
            names = list(rows[0])
            files.write_text(record, files.to_csv([names, *([r[n] for n in names] for r in rows)]))
    return rows


def measure(network: str, asked: Arguments) -> dict[str, Any]:
    """Ship a network, run its plain configuration, and return both as a row."""
    folder = Path(asked.folder).absolute() / network
    words, store = NETWORKS[network], f"tracking.root={folder.parent / 'mlruns'}"
    took = {"minutes": "", "cpu_minutes": ""}
    if not (folder / "winner.yaml").exists():
        ship = ("ship", *words, f"goal={asked.goal}", f"minutes={asked.minutes:g}")
        took = call("resnet8ptq", *ship, store, f"hydra.sweep.dir={folder}")
    steps, (winner, step) = sync.load_records(folder), find_winner(folder)
    halved = any("of the test samples" in step.chosen_by for step in steps)
    half = ("evaluate.choice=half",) if halved else ()
    plain = folder.parent / f"{network}_plain"
    if not plain.exists():
        call("resnet8ptq", "run", *words, *PLAIN, *half, store, f"hydra.run.dir={plain}")
    return {
        "date": date.today().isoformat(),
        "network": network,
        "properties": next(filter(None, (s.params.get("properties") for s in steps)), ""),
        "steps": len(steps),
        "helped": "; ".join(helped(steps)),
        "winner": " ".join(changed(step, steps[0])) or "the first step",
        **describe("winner", winner),
        **describe("plain", load_run(folder=plain)),
        **took,
    }


def find_winner(folder: Path) -> tuple[RunRecord, RunRecord]:
    """Return the last confirmed run that passes, else the first confirmed."""
    runs = load_sweep(folder=folder).runs
    confirmed = [run for run in runs if run.samples_from == "test"]
    winner = next((run for run in reversed(confirmed) if run.verdict == PASS), confirmed[0])
    [step] = [step for step in sync.load_records(folder) if step.run_id == winner.run_id]
    return winner, step


def call(module: str, *words: str) -> dict[str, str]:
    """Run a module; return its minutes, by the clock and of the CPU."""
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", module, *words], check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    minutes = (time.monotonic() - begun) / 60
    return {"minutes": f"{minutes:.1f}", "cpu_minutes": f"{cpu_s / 60:.1f}"}


def describe(name: str, run: RunRecord) -> dict[str, Any]:
    """Return the results of a run, as columns."""
    return {
        f"{name}_samples": run.samples,
        f"{name}_metric": run.metric and run.metric.name,
        f"{name}_fp32": run.fp32_value,
        f"{name}_value": run.value,
        f"{name}_loss": run.loss,
        f"{name}_bound": run.loss_upper_bound,
        f"{name}_verdict": run.verdict,
        f"{name}_bytes": run.size_bytes,
        f"{name}_speedup": run.speedup,
    }


def helped(steps: Sequence[RunRecord]) -> list[str]:
    """Return the changes whose outputs were nearer to FP32's than those of the first step."""
    tried = [step for step in steps if step.held_out and step.loss is not None]
    return [
        f"{' '.join(changed(step, tried[0]))} ({noise(step) / noise(tried[0]):.2f})"
        for step in tried[1:]
        if noise(step) < HELPS * noise(tried[0])
    ]


def changed(step: RunRecord, first: RunRecord) -> list[str]:
    """Return the settings of a step that the first step lacks."""
    ours, theirs = (each.job_overrides.split() for each in (step, first))
    hidden = ("evaluate.", "latency.", "max_drop=", "max_seconds=")
    return [word for word in ours if word not in theirs and not word.startswith(hidden)]


def render(rows: Sequence[dict[str, Any]]) -> str:
    """Return the tables of `ship.md`: results, steps that helped, and orders of steps."""
    ends, known = [], []
    for row in rows:
        both = [cells(row, name) for name in ("winner", "plain")]
        took = f"{row['minutes']} ({row['cpu_minutes']})"
        ends.append([row["network"], row["winner_samples"], *both[0], took, *both[1]])
        known.append([row["network"], row["properties"], row["winner"], row["helped"]])
    heads = ["loss", "verdict", "kB", "speed"]
    first = table(["network", "samples", *heads, "minutes (CPU)", *heads], ends)
    helps = table(["network", "properties", "winner", "helped (noise)"], known)
    heads = ["network left out", "its winner", "by gain", "place", "by gain over time", "place"]
    others = table(heads, left_out(rows))
    return f"{first}\n\n{helps}\n\n{others}"


def left_out(rows: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Return, for each network, the order of steps by the other networks, and its winner's place.

    There are two orders: by the mean gain in decibels of noise, 0 where a step did not help, and by
    that gain over the expected time of the step.
    """
    times = expected_times()
    lines = []
    for row in rows:
        others = [gains(other) for other in rows if other is not row]
        means = {kind: fmean(10 * log10(1 / g.get(kind, 1.0)) for g in others) for kind in KINDS}
        per_time = {kind: means[kind] / times[kind] for kind in KINDS}
        kind = kind_of(row["winner"])
        line = [row["network"], kind.removeprefix("corrections.") or "the first step"]
        for value in (means, per_time):
            order = sorted(filter(value.get, KINDS), key=value.__getitem__, reverse=True)
            place = str(order.index(kind) + 1) if kind in order else "none" if kind else ""
            names = [each.removeprefix("corrections.") for each in order]
            line += [", ".join(names), place]
        lines.append(line)
    return lines


def expected_times() -> dict[str, float]:
    """Return the search's expected time of each kind of step, in units of the plain run."""
    seen = step_table.Seen("onnx", True, 0.01, (ATTENTION, POOLS))
    names = ("calibrations", "operators", "smooth_quant", "bias_correction")
    costly = ("float_layers", "learned_rounding")
    proposals = [one for name in (*names, *costly) for one in step_table.propose(name, seen)]
    return {kind_of(proposal.change.words): proposal.cost for proposal in proposals}


def gains(row: dict[str, Any]) -> dict[str, float]:
    """Return the least noise of each kind of step, against the best step that it builds on."""
    pairs = [text.rpartition(" (") for text in filter(None, row["helped"].split("; "))]
    noises = [(set(change.split()), float(ratio.rstrip(")"))) for change, _, ratio in pairs]
    least: dict[str, float] = {}
    for words, ratio in noises:
        base = min((other for before, other in noises if before < words), default=1.0)
        kind = kind_of(" ".join(words))
        least[kind] = min(least.get(kind, 1.0), ratio / base)
    return least


def kind_of(change: str) -> str:
    """Return the kind of the last step of a change; empty for the first step."""
    return next((kind for kind in KINDS if f"{kind}=" in change), "")


def cells(row: dict[str, Any], name: str) -> list[str]:
    """Return loss, verdict, size and speed of a model."""
    return show({key: row[f"{name}_{key}"] for key in SHOWN})


def show(row: dict[str, Any]) -> list[str]:
    """Return the columns of `SHOWN`, except the metric, as texts."""
    loss, size, speed = (row[key] for key in ("loss", "bytes", "speedup"))
    points = row["metric"] in ("accuracy", "agreement")
    return [
        (f"{100 * float(loss):.2f}" if points else f"{float(loss):.3f}")
        if loss not in ("", None)
        else "",
        row["verdict"] or "",
        f"{float(size) / 1000:.1f}" if size not in ("", None) else "",
        f"{float(speed):.2f}" if speed not in ("", None) else "",
    ]


if __name__ == "__main__":
    sys.exit(main())
