"""`python -m studies.speed RUN...`: a run's latency beside the benchmark tool of its own library.

RUN is the folder of a finished run (`runs/...`) of onnx, openvino, tflite or executorch. In each of
`ROUNDS` rounds, this project's predictor and the library's tool load the same file anew, one after
the other, and run one sample on one thread. Other programs only ever add time, so that the fastest
run counts. Prints a table in Markdown.

OpenVINO has benchmark_app, and LiteRT litert-benchmark. The wheels of ONNX Runtime and ExecuTorch
have no such tool: there, a bare loop of the runtime's own call is the reference, with the input in
place (ONNX Runtime: bound by its I/O binding).
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.tables import table
from resnet8ptq.backends.registry import make_quantizer
from resnet8ptq.config.loading import CONFIG_FILE, load_config
from resnet8ptq.core import cache
from resnet8ptq.tracking.mlflow_model import EXAMPLE

ROUNDS, REPEATS = 5, 3000
SECONDS = 3.0  # at most, for one side of a round

Time = Callable[[Path, NDArray[Any]], float]  # milliseconds of a file for an input [1, ...]


def main() -> int:
    """Measure the runs; print the table; return the exit code."""
    rows = [row(Path(folder)) for folder in sys.argv[1:]]
    print(table(("run", "reference", "ours, ms", "reference, ms", "ratio of each round"), rows))
    return 0


def row(folder: Path) -> list[str]:
    """Return the cells of a run."""
    config = load_config(folder / CONFIG_FILE)
    [path] = folder.glob("model.*")
    sample = np.load(folder / EXAMPLE)["inputs"]
    quantizer = make_quantizer(config, cache.runtime(config.cache_dir, 1))
    load = partial(quantizer.load, path)
    name, reference = REFERENCES[config.backend.name]
    ours, others = [], []
    for turn in range(ROUNDS):
        if turn % 2:
            others.append(reference(path, sample))
        ours.append(fastest(partial(load(1).predict, sample)))
        if not turn % 2:
            others.append(reference(path, sample))
    ratios = [one / other for one, other in zip(ours, others, strict=True)]
    shown = " ".join(f"{ratio:.2f}" for ratio in ratios)
    best = f"{min(ours):.4f}", f"{min(others):.4f}"
    return [f"{config.model.name} {config.backend.name} {config.dtype.name}", name, *best, shown]


def fastest(call: Callable[[], object]) -> float:
    """Return the milliseconds of the fastest of many calls."""
    best, begin = np.inf, time.perf_counter()
    for turn in range(REPEATS):
        start = time.perf_counter()
        call()
        end = time.perf_counter()
        if turn >= REPEATS // 100:
            best = min(best, end - start)
        if end - begin > SECONDS:
            break
    return 1000 * best


def by_onnxruntime(path: Path, sample: NDArray[Any]) -> float:
    """Time `run_with_iobinding`: the input and the output are bound once."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
    binding = session.io_binding()
    binding.bind_cpu_input(session.get_inputs()[0].name, sample)
    for output in session.get_outputs():
        binding.bind_output(output.name)
    return fastest(lambda: session.run_with_iobinding(binding))


def by_executorch(path: Path, sample: NDArray[Any]) -> float:
    """Time a method's `execute`."""
    import torch
    from executorch.runtime import Runtime

    method = Runtime.get().load_program(path).load_method("forward")
    inputs = [torch.from_numpy(sample)]
    return fastest(lambda: method.execute(inputs))


def by_benchmark_app(path: Path, sample: NDArray[Any]) -> float:
    """Read the fastest run of OpenVINO's benchmark_app."""
    shape = ",".join(map(str, sample.shape))
    settings = ["-hint", "none", "-api", "sync", "-nstreams", "1", "-nthreads", "1", "-pin", "NO"]
    settings += ["-infer_precision", "f32", "-t", f"{SECONDS:.0f}", "-shape", f"[{shape}]"]
    with tempfile.TemporaryDirectory() as scratch:  # with a report, it prints microseconds
        report = ["-report_type", "no_counters", "-report_folder", scratch]
        said = call_tool("benchmark_app", "-m", str(path), *settings, *report)
    [(value, unit)] = re.findall(r"Min:\s+([\d.]+) (us|ms)", said)
    return float(value) / (1000 if unit == "us" else 1)


def by_litert_benchmark(path: Path, sample: NDArray[Any]) -> float:
    """Read the fastest run of LiteRT's litert-benchmark, which rounds to 0.01 ms."""
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch, "result.json")
        runs = ["--num_runs", str(REPEATS), "--num_threads", "1", "--result_json", str(result)]
        call_tool("litert-benchmark", f"--model={path}", *runs)
        return float(json.loads(result.read_text())["latency"]["min_ms"])


def call_tool(name: str, *words: str) -> str:
    """Run a tool of this environment; return what it printed."""
    command = [str(Path(sys.executable).with_name(name)), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


REFERENCES: dict[str, tuple[str, Time]] = {
    "onnx": ("run_with_iobinding", by_onnxruntime),
    "openvino": ("benchmark_app", by_benchmark_app),
    "tflite": ("litert-benchmark", by_litert_benchmark),
    "executorch": ("Method.execute", by_executorch),
}

if __name__ == "__main__":
    sys.exit(main())
