"""`python -m studies.formats`: QDQ or QOperator, weights per tensor or per channel, on this CPU.

ONNX Runtime's guidance prefers QDQ, and per tensor on CPUs; the flagship is neither. All four are
made by a sweep on CIFAR-10, loaded again in one process, and timed in turns with FP32: at four
batch sizes, and while they load. Prints a table in Markdown.
"""

import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import process
from benchmarks.setting import REPO
from benchmarks.tables import table
from resnet8ptq.backends.registry import make_quantizer
from resnet8ptq.config.loading import CONFIG_FILE, load_config
from resnet8ptq.config.schema import LatencyConfig
from resnet8ptq.core import machine
from resnet8ptq.evaluation import paired_latency
from resnet8ptq.evaluation.evaluator import baseline_config
from resnet8ptq.evaluation.paired_latency import Blocks, ratio
from resnet8ptq.experiment.compatibility import load as load_subject
from resnet8ptq.experiment.settings import resolve

SWEEP = (
    *("-m", "format=qdq,qoperator", "per_channel=false,true", "backend=onnx", "dtype=u8s8"),
    *("calib=percentile", "calib.percentile=99.99", "float_output=true", "slim=true"),
    *("latency.enabled=false", "evaluate.choice=none"),
)
BATCHES = {1: 1000, 8: 300, 64: 60, 256: 20}  # images at a time, and how often
LOADS = 40


def main() -> int:
    """Run the sweep, time its files, print the table; return the exit code."""
    exact = [] if machine.has_vnni() else ["reduce_range=true"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command: list[str | Path] = [sys.executable, REPO / "run.py", *SWEEP, *exact]
        process.run(command, folder, {**os.environ, "PYTHONPATH": str(REPO)})
        runs = sorted(folder.glob("runs/sweeps/*/*/*/result.json"))
        print(table(HEADS, measure([path.parent for path in runs], folder)))
    return 0


HEADS = (
    *("format", "weights", "correct", "bytes", "load ms"),
    *(f"speedup at {size} (95%)" for size in BATCHES),
)


def measure(runs: list[Path], scratch: Path) -> list[list[str]]:
    """Return a row of cells for each run of the sweep."""
    configs = [load_config(run / CONFIG_FILE) for run in runs]
    settings = resolve(replace(configs[0], threads=1))
    data, fp32 = load_subject(settings)
    split = data.test
    paths = [*(run / "model.onnx" for run in runs), fp32.onnx_path]
    loads = [
        partial(make_quantizer(config, settings.runtime).load, path)
        for config, path in zip([*configs, baseline_config(configs[0])], paths, strict=True)
    ]
    took: list[list[float]] = [[] for _ in loads]
    for _ in range(LOADS):
        for times, load in zip(took, loads, strict=True):
            start = time.perf_counter()
            load(1)
            times.append(1000 * (time.perf_counter() - start))
    names = [str(path) for path in paths]
    blocks: dict[int, list[Blocks]] = {}
    for size, repeats in BATCHES.items():
        timing = LatencyConfig(batch_size=size, batch_repeats=repeats, repeats=10)
        raced = paired_latency.run(dict(zip(names, loads, strict=True)), split, timing).batch
        blocks[size] = [raced[name] for name in names]
    rows = []
    for number, (run, config) in enumerate(zip(runs, configs, strict=True)):
        metrics = json.loads((run / "result.json").read_text())["metrics"]
        correct = metrics["accuracy"] * metrics["counts/total"]
        ratios = [ratio(times_ms[number], times_ms[-1]) for times_ms in blocks.values()]
        rows.append(
            [
                *(config.format or "qdq", "per channel" if config.per_channel else "per tensor"),
                *(f"{correct:.0f}", f"{metrics['size_bytes']:,.0f}"),
                f"{np.median(took[number]):.1f}",
                *(f"{r.value:.2f} ({r.low:.2f} to {r.high:.2f})" for r in ratios),
            ]
        )
    size = fp32.onnx_path.stat().st_size
    fp32_ms = [f"{np.median(times_ms[-1]):.3f} ms" for times_ms in blocks.values()]
    rows.append(["FP32", "", "", f"{size:,}", f"{np.median(took[-1]):.1f}", *fp32_ms])
    return rows


if __name__ == "__main__":
    sys.exit(main())
