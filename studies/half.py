"""16-bit weights of several networks in each backend: `python -m studies.half [key=value ...]`.

    python -m studies.half                             every network of SHARED, and the table
    python -m studies.half networks=kws,vit            some of them
    python -m studies.half networks=kws speed=true     its speed, measured in turn with FP32
    python -m studies.half networks=kws bf16=true      computed in bfloat16, by OpenVINO

Each network is one sweep in a subfolder of `folder=`; one whose folder exists is not repeated.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from benchmarks.tables import table
from resnet8ptq.backends.registry import make_quantizer
from resnet8ptq.config.loading import CONFIG_FILE, load_config
from resnet8ptq.core import command
from resnet8ptq.evaluation.evaluator import baseline_config
from resnet8ptq.evaluation.paired_latency import Blocks, ratio, typical
from resnet8ptq.experiment.network_and_data import load_data_and_network
from resnet8ptq.experiment.settings import resolve
from resnet8ptq.precision.decisions import Decisions
from resnet8ptq.results import load_sweep
from resnet8ptq.tracking import origin
from resnet8ptq.tracking.record import RunRecord
from studies.recipes import SHARED
from studies.ship import NETWORKS as SHIPPED
from studies.ship import call

BACKENDS = ("onnx", "torch", "tflite", "openvino")
LOADINGS = 10
RUNS = 100  # of each file in a loading
IN_BF16 = ("backend=openvino", "backend.inference_precision=bf16")
NETWORKS = {
    **SHIPPED,
    "ultraface": (
        *("data=folder", f"data.root={SHARED}/coco/images", "data.labels=none"),
        *("preprocess=symmetric", "preprocess.size=[240,320]"),
        f"model.path={SHARED}/networks/version-RFB-320.onnx",
    ),
}


@dataclass
class Arguments:
    """The key=value arguments of `python -m studies.half`; networks with commas."""

    networks: str = ""
    folder: str = "runs/half"
    speed: bool = False
    bf16: bool = False


def main() -> int:
    """Measure the networks without a folder, then print the table."""
    asked = command.parse_words(sys.argv[1:], Arguments, __doc__ or "")
    names = asked.networks.split(",") if asked.networks else list(NETWORKS)
    root = Path(asked.folder).absolute()
    root = root / "bf16" if asked.bf16 else root
    chosen = IN_BF16 if asked.bf16 else (f"backend={','.join(BACKENDS)}",)
    swept = {name: sweep(name, root, chosen) for name in names}
    heads = ["network", "backend", "FP32 kB", "fp16 kB", "part", "SQNR dB", "loss"]
    rows = [[name, *show(run)] for name, runs in swept.items() for run in runs]
    if asked.speed:
        heads = ["network", "backend", "FP32 ms", "fp16 ms", "speed (95% interval)"]
        rows = [row for name, runs in swept.items() for row in time(name, runs, root / name)]
    print(table(heads, rows))
    return 0


def sweep(name: str, root: Path, chosen: tuple[str, ...]) -> list[RunRecord]:
    """Return the run of each backend; measure the network if it has no folder."""
    folder = root / name
    words = ("dtype=fp16", *chosen, "latency.enabled=false")
    store = (f"tracking.root={root / 'mlruns'}", f"hydra.sweep.dir={folder}")
    if not folder.exists():
        call("resnet8ptq", "run", "-m", *NETWORKS[name], *words, "evaluate.choice=none", *store)
    return list(load_sweep(folder=folder).runs)


def time(name: str, runs: list[RunRecord], folder: Path) -> list[list[str]]:
    """Time the file of each run in turn with its backend's FP32; return a row for each."""
    rows = []
    for run in runs:
        own = origin.own_folder(run, folder)
        if own is None or run.size_bytes is None:
            continue
        half, fp32 = time_in_turns(own)
        speed = ratio(half, fp32)
        shown = f"{speed.value:.2f} ({speed.low:.2f} to {speed.high:.2f})"
        rows.append([name, run.framework, f"{typical(fp32):.3f}", f"{typical(half):.3f}", shown])
    return rows


def time_in_turns(folder: Path) -> tuple[Blocks, Blocks]:
    """Return the fastest run of a sample in each of ten loadings, in ms: of the file and of FP32.

    On a busy machine, other programs determine the median.
    """
    settings = resolve(load_config(folder / CONFIG_FILE))
    data, network = load_data_and_network(settings)
    [sample] = data.test.take(np.arange(1)).batches(1)
    [path] = [path for path in folder.glob("model.*") if path.suffix != ".json"]
    fp32 = make_quantizer(baseline_config(settings.config), settings.runtime)
    blocks: tuple[Blocks, Blocks] = ([], [])
    with tempfile.TemporaryDirectory() as scratch:
        made = fp32.quantize(network, Decisions(), data.test, Path(scratch)).path
        for _ in range(LOADINGS):
            pair = [settings.quantizer.load(path, threads=1), fp32.load(made, threads=1)]
            times: tuple[Blocks, Blocks] = ([], [])
            for _ in range(RUNS):
                for predictor, own in zip(pair, times, strict=True):
                    begin = perf_counter()
                    predictor.predict(sample)
                    own.append(1000 * (perf_counter() - begin))
            for kept, own in zip(blocks, times, strict=True):
                kept.append(min(own))
    return blocks


def show(run: RunRecord) -> list[str]:
    """Return the cells of a run; for an unsupported run, its reason."""
    if run.size_bytes is None or not run.fp32_size_bytes:
        return [run.framework, "", "", "", run.status, run.reason[:80]]
    noise = run.metrics.get("sqnr_db")
    loss = "" if run.loss is None or run.metric is None else run.metric.show_change(run.loss)
    return [
        run.framework,
        f"{run.fp32_size_bytes / 1000:.1f}",
        f"{run.size_bytes / 1000:.1f}",
        f"{run.size_bytes / run.fp32_size_bytes:.3f}",
        "" if noise is None else f"{noise:.1f}",
        loss,
    ]


if __name__ == "__main__":
    sys.exit(main())
