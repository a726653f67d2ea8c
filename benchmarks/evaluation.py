"""Evaluating against the best that a bare session or module reaches on the same artifact."""

import argparse
import json
import os
import statistics
import sys
import time
from itertools import product
from pathlib import Path

from benchmarks import process
from benchmarks.setting import NO_LATENCY, Record, Setting, find_runs, read_run
from benchmarks.tables import ratios, spread, table

BATCHES = (16, 32, 64, 128, 256, 512)
KEPT = 3  # combinations that run in every round, after one round of all
SWEEP = ("-m", "backend=onnx,torch", "dtype=fp32,int8,uint8", NO_LATENCY)


def measure(setting: Setting) -> Record:
    """Run a sweep, then its artifacts bare over batch sizes and threads, in turns."""
    setting.run_warm(*SWEEP)
    artifacts: dict[str, Record] = {}
    for turn in range(setting.rounds):
        folder, cache = setting.warm
        before = set(find_runs(folder))
        setting.run(folder, cache, *SWEEP)
        for run_folder in sorted(set(find_runs(folder)) - before):
            run = read_run(run_folder)
            name = f"{run['backend']} {run['dtype']}"
            entry = artifacts.setdefault(name, {"ours_s": [], "bare_s": {}})
            entry["ours_s"].append(run["evaluate_s"])
            (artifact,) = (*run_folder.glob("model.onnx"), *run_folder.glob("model.pt"))
            for combination, seconds in _run_bare(setting, artifact, _best(entry)).items():
                entry["bare_s"].setdefault(combination, []).append(seconds)
            setting.say(f"evaluation, round {turn + 1} of {setting.rounds}: {name}")
    return {"artifacts": artifacts}


def _best(entry: Record) -> list[str]:
    """Return the fastest combinations of the first round; before it, all of them."""
    if not entry["bare_s"]:
        threads = range(1, len(os.sched_getaffinity(0)) + 1)
        return [f"{batch}x{count}" for batch, count in product(BATCHES, threads)]
    first = {name: times[0] for name, times in entry["bare_s"].items()}
    return sorted(first, key=lambda name: first[name])[:KEPT]


def _run_bare(setting: Setting, artifact: Path, combinations: list[str]) -> dict[str, float]:
    command = setting.module("evaluation", artifact, *combinations)
    done = process.run(command, setting.fresh(), setting.environment())
    return {str(name): float(seconds) for name, seconds in json.loads(done.out).items()}


def render(record: Record) -> str:
    """Return the section in Markdown."""
    rows = []
    for name, entry in record["artifacts"].items():
        full = {c: t for c, t in entry["bare_s"].items() if len(t) == len(entry["ours_s"])}
        best = min(full, key=lambda combination: statistics.median(full[combination]))
        batch, threads = best.split("x")
        ratio = ratios(entry["ours_s"], full[best])
        cells = [spread(entry["ours_s"]), spread(full[best]), batch, threads, spread(ratio)]
        rows.append([name, *cells])
    header = ["artifact", "`evaluate_s`", "bare s", "batch", "threads", "ratio"]
    return "\n\n".join(
        [
            "`evaluate_s` of a run for all test images, beside a bare session or module on the "
            f"same file and images. Of the batch sizes {', '.join(map(str, BATCHES))} and every "
            "number of threads, the bare side takes the fastest.",
            table(header, rows),
        ]
    )


def time_bare(artifact: Path, combinations: list[str]) -> dict[str, float]:
    """Return the seconds that each combination `<batch>x<threads>` takes for all test images."""
    from benchmarks import bare

    images, _ = bare.read_images(Path(os.environ["CIFAR10_DIR"]), ["test_batch"])
    seconds = {}
    for combination in combinations:
        batch_size, threads = map(int, combination.split("x"))
        predict = bare.load(artifact, threads)
        for batch in list(bare.batches(images[: 2 * batch_size], batch_size)):
            predict(batch)  # torch compiles in its first two calls of a shape
        start = time.perf_counter()
        for batch in bare.batches(images, batch_size):
            predict(batch)
        seconds[combination] = time.perf_counter() - start
    return seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="time a bare session or module")
    parser.add_argument("artifact", type=Path)
    parser.add_argument("combinations", nargs="+", help="<batch size>x<threads>")
    arguments = parser.parse_args()
    json.dump(time_bare(arguments.artifact, arguments.combinations), sys.stdout)
