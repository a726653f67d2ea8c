"""The cost of a sweep over the size of its network, of its data, and its number of jobs.

A line through the two smaller networks predicts the largest one, which is measured too. The same
line plans sweeps that this machine cannot run.
"""

import itertools
import shutil
import statistics
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from benchmarks.setting import NO_LATENCY, Record, Setting
from benchmarks.tables import spread, table

WIDTHS = {1: 298, 10: 1_977, 100: 8_577}  # millions of parameters -> width of a hidden layer
SAMPLES = (2_000, 10_000, 50_000)  # half of them are reported
JOBS = {1: ("dtype=int8",), 4: ("dtype=int8,uint8", "per_channel=false,true")}
INPUTS, CLASSES = 3_072, 10
PLANNED = 1_000  # jobs


def measure(setting: Setting) -> Record:
    """Run sweeps of one job and of four: on each network, and on each number of samples."""
    cells = []
    asked = [(size, SAMPLES[0]) for size in WIDTHS] + [(min(WIDTHS), n) for n in SAMPLES[1:]]
    for millions, samples in asked:
        folder, cache = setting.fresh(), setting.fresh()
        model, data = folder / "network.onnx", folder / "samples.npz"
        onnx.save(make_network(WIDTHS[millions]), model)
        inputs = np.random.default_rng(0).normal(size=(samples, INPUTS)).astype(np.float32)
        np.savez(data, x=inputs, y=classify(model, inputs))
        words = (
            *(f"model.path={model}", "data=arrays", f"data.root={data}"),
            *(NO_LATENCY, "evaluate.choice=held_out"),
        )
        setting.run(setting.fresh(), cache, *words)  # converts the network, and runs FP32
        for _ in range(setting.rounds):
            for jobs, varied in JOBS.items():
                shutil.rmtree(cache / "evaluations", ignore_errors=True)
                folder = setting.fresh()
                swept = setting.run(folder, cache, "-m", *words, *varied)
                cell = {"millions": millions, "samples": samples, "jobs": jobs}
                cells.append({**cell, "usage": swept["usage"], "disk_bytes": disk_bytes(folder)})
                assert len(swept["runs"]) == jobs
                wall_s = swept["usage"]["wall_s"]
                setting.say(f"{millions} M, {samples:,} samples, {jobs} jobs: {wall_s:.1f} s")
    return {"cells": cells}


def make_network(width: int) -> onnx.ModelProto:
    """Return a network of dense layers: `INPUTS`, twice `width`, `CLASSES`."""
    rng, sizes = np.random.default_rng(0), (INPUTS, width, width, CLASSES)
    nodes, weights, name = [], [], "x"
    for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        values = rng.normal(size=(inputs, outputs)) * np.sqrt(2 / inputs)
        weights.append(numpy_helper.from_array(values.astype(np.float32), f"w{number}"))
        weights.append(numpy_helper.from_array(np.zeros(outputs, np.float32), f"b{number}"))
        last = outputs == CLASSES
        layer = "logits" if last else f"dense{number}"
        nodes.append(helper.make_node("Gemm", [name, f"w{number}", f"b{number}"], [layer], layer))
        name = "y" if last else f"relu{number}"
        nodes.append(helper.make_node("Softmax" if last else "Relu", [layer], [name], name))
    ends = [
        helper.make_tensor_value_info(end, onnx.TensorProto.FLOAT, ["n", size])
        for end, size in (("x", INPUTS), ("y", CLASSES))
    ]
    graph = helper.make_graph(nodes, "dense", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def classify(model: Path, inputs: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the classes that the network gives: its labels, so that FP32 makes no error."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    batches = np.array_split(inputs, max(1, len(inputs) // 500))
    classes: NDArray[np.int64] = np.concatenate(
        [session.run(None, {"x": batch})[0].argmax(axis=1) for batch in batches]
    )
    return classes


def disk_bytes(folder: Path) -> int:
    """Return the bytes of a folder's files: runs and the store."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def added(record: Record, key: str, millions: int, samples: int) -> list[float]:
    """Return the cost of one more job, round by round."""
    (few, less), (many, more) = ((n, values(record, key, millions, samples, n)) for n in JOBS)
    return [(high - low) / (many - few) for low, high in zip(less, more, strict=True)]


def values(record: Record, key: str, millions: int, samples: int, jobs: int) -> list[float]:
    """Return the cost of a sweep, round by round."""
    asked = {"millions": millions, "samples": samples, "jobs": jobs}
    return [_value(cell, key) for cell in record["cells"] if asked.items() <= cell.items()]


def _value(cell: Record, key: str) -> float:
    usage = cell["usage"]
    values = {
        "wall_s": usage["wall_s"],
        "cpu_s": usage["user_s"] + usage["sys_s"],
        "peak_mb": usage["max_rss_bytes"] / 1e6,
        "disk_mb": cell["disk_bytes"] / 1e6,
    }
    return float(values[key])


def predict(record: Record, key: str) -> float:
    """Return the largest network's cost on the line through the two smaller ones."""
    small, middle, large = WIDTHS
    low, high = (
        statistics.median(added(record, key, size, SAMPLES[0])) for size in (small, middle)
    )
    return low + (high - low) * (large - small) / (middle - small)


def render(record: Record) -> str:
    """Return the section in Markdown."""
    cells = dict.fromkeys((cell["millions"], cell["samples"]) for cell in record["cells"])
    keys = ("wall_s", "cpu_s", "disk_mb")
    rows = []
    for millions, samples in cells:
        spreads = [spread(added(record, key, millions, samples)) for key in keys]
        peak = max(values(record, "peak_mb", millions, samples, max(JOBS)))
        rows.append([f"{millions} M", f"{samples:,}", *spreads, f"{peak:.0f}"])
    large, fitted = max(WIDTHS), []
    for key in keys:
        measured, line = added(record, key, large, SAMPLES[0]), predict(record, key)
        ratio = line / statistics.median(measured)
        fitted.append([key, f"{line:.2f}", spread(measured), f"{ratio:.2f}"])
    plan = [
        [f"{size} M", *(_planned(record, key, size) for key in ("cpu_s", "disk_mb"))]
        for size in WIDTHS
    ]
    return "\n\n".join(
        [
            "Networks of dense layers on arrays, `backend=onnx`, warm. A job is a configuration "
            "of `dtype=int8,uint8 per_channel=false,true`; what one more takes is a third of the "
            "difference of sweeps of four and of one. Disk: `runs/` and the store. Peak: of the "
            "process of the sweep of four.",
            table(
                [
                    "parameters",
                    "samples",
                    "wall s a job",
                    "CPU s a job",
                    "disk MB a job",
                    "peak MB",
                ],
                rows,
            ),
            f"The line through the two smaller networks, for {large} million parameters:",
            table(["a job", "predicted", "measured", "ratio"], fitted),
            f"A sweep of {PLANNED:,} jobs by these figures:",
            table(["parameters", "core-hours", "disk GB"], plan),
            "![Cost against size](images/growth.png)",
        ]
    )


def _planned(record: Record, key: str, millions: int) -> str:
    marginal = statistics.median(added(record, key, millions, SAMPLES[0]))
    return f"{PLANNED * marginal / (3600 if key == 'cpu_s' else 1000):.1f}"
