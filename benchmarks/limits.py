"""Peak memory of whole runs beside `memory_gb`, on networks of many kinds.

SHARED names the folder of networks and data, as for `studies.ship`; a network whose files are not
there is left out.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.setting import NO_LATENCY, Record, Setting
from benchmarks.tables import table
from studies.ship import NETWORKS, SHARED

GIGABYTES = {"minilm": 1.8}  # others: the least, 1
PLAIN = ("backend=onnx", "dtype=u8s8", "per_channel=true", "format=qdq", NO_LATENCY)
STEPS = {
    "first run": (),  # with the conversion, in a process of its own
    "calibration": ("calib=percentile",),
    "bias correction": ("corrections.bias_correction=true",),
    "AdaRound": ("corrections.adaround=true", "corrections.adaround_iterations=5"),
    "sensitivity": ("+analysis=sensitivity",),
    "diagnosis": ("+analysis=diagnose",),
}
ANALYSED = "held_out_images=2"  # few, for a short run: memory does not depend on their number
SIDE, CHANNELS = 1000, 16  # of the made-up network's maps


def measure(setting: Setting) -> Record:
    """Run each step on each network; note the peak of its processes."""
    made = setting.fresh()
    networks = {
        **NETWORKS,
        "ultraface": (
            *("data=folder", f"data.root={SHARED}/coco/images", "data.labels=none"),
            f"model.path={SHARED}/networks/version-RFB-320.onnx",
        ),
        "large_maps": make_large_maps(made),
    }
    rows = []
    for network, words in networks.items():
        paths = [word.partition("=")[2] for word in words if "=/" in word]
        if not all(Path(path).exists() for path in paths):
            setting.say(f"{network}: left out: no {', '.join(paths)}")
            continue
        limit, folder = GIGABYTES.get(network, 1.0), setting.fresh()
        peaks = {}
        for step, changes in STEPS.items():
            few = (ANALYSED,) * any("analysis" in change for change in changes)
            asked = (*words, *PLAIN, f"memory_gb={limit}", *changes, *few)
            try:
                peak = setting.call(folder, folder / "cache", *asked).usage.max_rss_bytes
            except RuntimeError as error:  # such as a layer that a step does not support
                setting.say(f"{network}, {step}: {str(error)[-500:]}")
                continue
            peaks[step] = peak
            setting.say(f"{network}, {step}: {peak / 1e9:.2f} of {limit} GB")
        rows.append({"network": network, "limit_bytes": limit * 1e9, "peaks": peaks})
        shutil.rmtree(folder)
    return {"rows": rows}


def make_large_maps(folder: Path) -> tuple[str, ...]:
    """Write four convolutions with maps of 1,000 x 1,000, and noise; return the words for them."""
    random = np.random.default_rng(0)
    nodes, weights, before, inputs = [], [], "images", 3
    for layer in range(4):
        values = random.normal(size=(CHANNELS, inputs, 3, 3)).astype(np.float32) / (3 * CHANNELS)
        weights.append(numpy_helper.from_array(values, f"w{layer}"))
        pads = {"pads": [1, 1, 1, 1]}
        nodes.append(helper.make_node("Conv", [before, f"w{layer}"], [f"c{layer}"], **pads))
        nodes.append(helper.make_node("Relu", [f"c{layer}"], [f"r{layer}"]))
        before, inputs = f"r{layer}", CHANNELS
    nodes.append(helper.make_node("GlobalAveragePool", [before], ["pooled"]))
    nodes.append(helper.make_node("Flatten", ["pooled"], ["output"]))
    ends = [
        helper.make_tensor_value_info("images", TensorProto.FLOAT, ["n", 3, SIDE, SIDE]),
        helper.make_tensor_value_info("output", TensorProto.FLOAT, ["n", CHANNELS]),
    ]
    graph = helper.make_graph(nodes, "large_maps", ends[:1], ends[1:], weights)
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), folder / "large.onnx")
    np.save(folder / "x.npy", random.integers(0, 256, (8, SIDE, SIDE, 3), dtype=np.uint8))
    source = f"data.root={folder / 'x.npy'}"
    return "data=arrays", source, "data.labels=none", f"model.path={folder / 'large.onnx'}"


def render(record: Record) -> str:
    """Return the section in Markdown."""
    steps = list(STEPS)
    rows = [
        [row["network"], f"{row['limit_bytes'] / 1e9:g}", *cells(row)] for row in record["rows"]
    ]
    return "\n\n".join(
        [
            "Peak resident memory of whole runs of `backend=onnx` in GB, with the share of "
            "`memory_gb`: of the largest process, with all imports. The first run converts the "
            "network, in a process of its own whose memory `memory_gb` does not set; the cache "
            "serves the other columns.",
            table(["network", "`memory_gb`", *steps], rows),
        ]
    )


def cells(row: Record) -> Sequence[str]:
    """Return the peak of each step, and its share of the limit."""
    peaks = (row["peaks"].get(step) for step in STEPS)
    return [f"{p / 1e9:.2f} ({p / row['limit_bytes']:.0%})" if p else "" for p in peaks]
