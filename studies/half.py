"""16-bit weights of several networks in each backend: `python -m studies.half [key=value ...]`.

    python -m studies.half                       every network of SHARED, and the table
    python -m studies.half networks=kws,vit      some of them

A network is one sweep in a folder of `folder=`, and is not measured again while that is there.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tables import table
from resnet8ptq.core import command
from resnet8ptq.results import load_sweep
from resnet8ptq.tracking.record import RunRecord
from studies.recipes import SHARED
from studies.ship import NETWORKS as SHIPPED
from studies.ship import call

BACKENDS = ("onnx", "torch", "tflite", "openvino")
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
    """What `python -m studies.half` takes, as key=value; networks with commas."""

    networks: str = ""
    folder: str = "runs/half"


def main() -> int:
    """Measure what has no folder yet, then print the table."""
    asked = command.parse_words(sys.argv[1:], Arguments, __doc__ or "")
    names = asked.networks.split(",") if asked.networks else list(NETWORKS)
    rows = [row for name in names for row in measure(name, Path(asked.folder).absolute())]
    heads = ["network", "backend", "FP32 kB", "fp16 kB", "part", "SQNR dB", "loss"]
    print(table(heads, rows))
    return 0


def measure(name: str, root: Path) -> list[list[str]]:
    """Return a row for each backend that quantizes the network."""
    folder = root / name
    words = ("dtype=fp16", f"backend={','.join(BACKENDS)}", "latency.enabled=false")
    store = (f"tracking.root={root / 'mlruns'}", f"hydra.sweep.dir={folder}")
    if not folder.exists():
        call("resnet8ptq", "run", "-m", *NETWORKS[name], *words, "evaluate.choice=none", *store)
    return [[name, *show(run)] for run in load_sweep(folder=folder).runs]


def show(run: RunRecord) -> list[str]:
    """Return the cells of a run; its reason if it is unsupported."""
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
