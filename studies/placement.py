"""8 bits only where they are faster: `python -m studies.placement [key=value ...]`.

    python -m studies.placement                         every network of SHARED, and the table
    python -m studies.placement networks=kws,vit        some of them

Run it on an idle machine. Each network is one sweep in a subfolder of `folder=`; one whose folder
exists is not repeated.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tables import table
from resnet8ptq.core import command
from resnet8ptq.results import load_sweep
from resnet8ptq.tracking.record import RunRecord
from studies import half
from studies.recipes import SHARED
from studies.ship import call

NETWORKS = {
    **half.NETWORKS,
    "efficientnet_lite0": (
        *("data=folder", f"data.root={SHARED}/coco/images", "data.labels=none"),
        *("preprocess.size=224", "preprocess.mean=[127]", "preprocess.std=[128]"),
        f"model.path={SHARED}/networks/efficientnet_lite0.onnx",
    ),
}
SETTINGS = (
    *("backend=onnx", "dtype=u8s8,int8", "per_channel=true"),
    *("precision.placement=measured", "evaluate.choice=none"),
)
TIMES = {  # of a whole network: its words in a message, and its metric
    "FP32": "placement/fp32_ms",
    "all in 8 bits": "placement/all_ms",
    "placement": "placement/ms",
}


@dataclass
class Arguments:
    """The key=value arguments of `python -m studies.placement`; networks with commas."""

    networks: str = ""
    folder: str = "runs/placement"


def main() -> int:
    """Measure the networks without a folder, then print the table."""
    asked = command.parse_words(sys.argv[1:], Arguments, __doc__ or "")
    names = asked.networks.split(",") if asked.networks else list(NETWORKS)
    root = Path(asked.folder).absolute()
    rows = []
    for name in names:
        measure(name, root)
        runs = load_sweep(folder=root / name).runs
        rows += [[name, *show(run)] for run in runs]
    heads = ["network", "dtype", *(f"{name}, ms" for name in TIMES), "taken", "speedup of the run"]
    print(table(heads, rows))
    return 0


def measure(name: str, root: Path) -> None:
    """Run the sweep of a network, unless it has a folder."""
    folder = root / name
    if folder.exists():
        return
    store = (f"tracking.root={root / 'mlruns'}", f"hydra.sweep.dir={folder}")
    call("resnet8ptq", "run", "-m", *NETWORKS[name], *SETTINGS, *store)


def show(run: RunRecord) -> list[str]:
    """Return the cells of a run; an unsupported run's reason contains its times."""
    dtype = run.combination.dtype
    if run.status != "ok":
        times = [find_time(name, run.reason) for name in TIMES]
        taken = "none is faster than FP32" if any(times) else run.reason[:80]
        return [dtype, *times, taken, ""]
    measured = [run.metrics.get(metric) for metric in TIMES.values()]
    layers = int(run.metrics["placement/layers"])
    return [
        dtype,
        *("" if ms is None else f"{ms:.3f}" for ms in measured),
        f"{layers} layers in float" if layers else "all in 8 bits",
        "" if run.speedup is None else f"{run.speedup:.2f}",
    ]


def find_time(name: str, reason: str) -> str:
    """Return the milliseconds after a name in a message; empty if there are none."""
    found = re.search(rf"\b{name} ([\d.]+) ms", reason)
    return found[1] if found else ""


if __name__ == "__main__":
    sys.exit(main())
