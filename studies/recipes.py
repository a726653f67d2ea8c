"""Recipes judged on several networks: `python -m studies.recipes [key=value ...]`.

    python -m studies.recipes                                  all networks, draws and recipes
    python -m studies.recipes networks=shapes,mnist seeds=1,2  some of them
    python -m studies.recipes report=true                      only the tables

A recommended recipe must work on networks that were not used to choose it. Each network is
quantized by each recipe with each calibration draw, and scored on held-out samples for the choice
and on test samples for the report. The measurements are kept in recipes.csv and not repeated.
SHARED names the folder of networks and data (`resnet8`, `ic02`, `kws`, ...), RETRAINED one with
files of `studies.train_cifar10`; a network whose files are missing is left out.
"""

import csv
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose, initialize_config_dir

from benchmarks.setting import REPO, Record
from benchmarks.tables import table
from resnet8ptq.config import loading
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import command, files
from resnet8ptq.core.errors import PtqError
from resnet8ptq.data.sampling import draw_calibration, draw_held_out
from resnet8ptq.evaluation.evaluator import Evaluator
from resnet8ptq.experiment import preparation
from resnet8ptq.experiment.network_and_data import load_data_and_network, make_task
from resnet8ptq.experiment.samples import SamplesByRole
from resnet8ptq.experiment.settings import resolve
from resnet8ptq.experiment.workspace import Workspace

RECORD = REPO / "studies" / "recipes.csv"
SHARED = os.environ.get("SHARED", "")
_COCO = ("data=folder", f"data.root={SHARED}/coco/images", "data.labels=none")
_OTHERS = f"model.path={SHARED}/networks"
NETWORKS: dict[str, tuple[str, ...]] = {
    "resnet8": ("data=cifar10",),
    "shapes": ("data=shapes",),
    "ic02": ("benchmark=ic02", f"benchmark.folder={SHARED}"),
    "kws": ("benchmark=kws", f"benchmark.folder={SHARED}"),
    "vww": ("benchmark=vww", f"benchmark.folder={SHARED}"),
    "mnist": (
        *("data=arrays", f"data.root={SHARED}/mnist"),
        *(f"model.path={SHARED}/mnist/mnist.onnx", "preprocess=raw"),
    ),
    "mobilenet_v1": (
        *_COCO,
        *("preprocess=keras_mobilenet", "preprocess.size=224"),
        f"{_OTHERS}/mobilenet_v1_0.25_224.h5",
    ),
    "mobilenet_v2": (
        *_COCO,
        *("preprocess=symmetric", "preprocess.size=128"),
        f"{_OTHERS}/mobilenet_v2_128_0.5.onnx",
    ),
}
for _file in sorted(Path(os.environ.get("RETRAINED") or "/nonexistent").glob("*.h5")):
    NETWORKS[_file.stem] = ("data=cifar10", f"model.path={_file}")
# Where the last layer is a convolution, float_output needs ONNX Runtime's QDQ format.
_LAST_IS_CONVOLUTION = ("mobilenet_v1", "mobilenet_v2")

_ONNX = (
    *("backend=onnx", "dtype=u8s8", "reduce_range=true", "per_channel=true", "float_output=true"),
    *("format=qoperator", "slim=true", "calib=percentile"),
)
_ALL_BITS = "reduce_range=false"
_TORCH = ("backend=torch", "dtype=int8", "per_channel=true", "calib=percentile")
_TFLITE = ("backend=tflite", "dtype=int8", "per_channel=true")
# Where torch quantizes an average pool, it takes the range of its input, which is much too large.
_POOLS_IN_FLOAT = "op_types=[Conv,Gemm,MatMul,Add,Relu,Clip,Softmax,MaxPool]"
_BIAS = "corrections.bias_correction=true"
_ADAROUND = ("corrections.adaround=true", "corrections.adaround_iterations=500", _BIAS)
_BLOCKS = ("corrections.reconstruction=true", "corrections.reconstruction_iterations=500", _BIAS)
RECIPES: dict[str, tuple[str, ...]] = {
    "onnx": _ONNX,
    "onnx minmax": (*_ONNX, "calib=minmax"),
    "onnx mse": (*_ONNX, "calib=mse"),
    "onnx bias": (*_ONNX, _BIAS),
    "onnx adaround": (*_ONNX, *_ADAROUND),
    "onnx minmax adaround": (*_ONNX, "calib=minmax", *_ADAROUND),
    "onnx mse adaround": (*_ONNX, "calib=mse", *_ADAROUND),
    # For CPUs with VNNI, where 8-bit weights do not saturate.
    "onnx 8-bit": (*_ONNX, "calib=minmax", _ALL_BITS),
    "onnx 8-bit adaround": (*_ONNX, "calib=minmax", _ALL_BITS, *_ADAROUND),
    "onnx minmax blocks": (*_ONNX, "calib=minmax", *_BLOCKS),
    "onnx mse blocks": (*_ONNX, "calib=mse", *_BLOCKS),
    "torch": _TORCH,
    "torch bias": (*_TORCH, _BIAS),
    "torch adaround": (*_TORCH, *_ADAROUND),
    "torch minmax adaround": (*_TORCH, "calib=minmax", *_ADAROUND),
    "torch mse adaround": (*_TORCH, "calib=mse", *_ADAROUND),
    "torch pools mse": (*_TORCH, _POOLS_IN_FLOAT, "calib=mse"),
    "torch pools adaround": (*_TORCH, _POOLS_IN_FLOAT, *_ADAROUND),
    "torch pools minmax adaround": (*_TORCH, _POOLS_IN_FLOAT, "calib=minmax", *_ADAROUND),
    "torch pools mse adaround": (*_TORCH, _POOLS_IN_FLOAT, "calib=mse", *_ADAROUND),
    "torch pools mse blocks": (*_TORCH, _POOLS_IN_FLOAT, "calib=mse", *_BLOCKS),
    "tflite": _TFLITE,
    "tflite bias": (*_TFLITE, _BIAS),
    "tflite adaround": (*_TFLITE, *_ADAROUND),
    "tflite percentile": (*_TFLITE, "calib=percentile"),
    "tflite mse": (*_TFLITE, "calib=mse"),
    "tflite percentile adaround": (*_TFLITE, "calib=percentile", *_ADAROUND),
    "tflite mse adaround": (*_TFLITE, "calib=mse", *_ADAROUND),
    "tflite mse blocks": (*_TFLITE, "calib=mse", *_BLOCKS),
}
SIDES = ("held_out", "test")


@dataclass
class Arguments:
    """The key=value arguments of `python -m studies.recipes`; lists with commas."""

    networks: str = ""
    recipes: str = ""
    seeds: str = "1,2,3,4,5"
    threads: int = 2
    report: bool = False


class _Nowhere:
    """Stands in for an MLflow run; records nothing."""

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        """Record nothing."""

    log_params = log_datasets = log_config = log_step


def main() -> int:
    """Measure the rows that the record lacks, then print the tables."""
    arguments = command.parse_words(sys.argv[1:], Arguments, __doc__ or "")
    loading.register_schemas()
    networks = arguments.networks.split(",") if arguments.networks else list(NETWORKS)
    recipes = arguments.recipes.split(",") if arguments.recipes else list(RECIPES)
    rows = read()
    known = {(row["network"], row["recipe"], row["seed"]) for row in rows}
    with initialize_config_dir(str(REPO / "conf"), version_base=None):
        for seed in [] if arguments.report else arguments.seeds.split(","):
            for network in networks:
                for recipe in recipes:
                    if (network, recipe, seed) in known:
                        continue
                    rows += list(measure(network, recipe, seed, arguments.threads))
                    write(rows)
    asked = [row for row in rows if row["network"] in networks and row["recipe"] in recipes]
    print(render(asked))
    return 0


def framework_of(recipe: str) -> str:
    """Return the backend of a recipe: its name's first word."""
    return recipe.split()[0]


def measure(network: str, recipe: str, seed: str, threads: int) -> Iterator[Record]:
    """Quantize and score; yield nothing where the backend has no such combination."""
    settings = [*NETWORKS[network], *RECIPES[recipe], f"seed={seed}", f"threads={threads}"]
    if network in _LAST_IS_CONVOLUTION and framework_of(recipe) == "onnx":
        settings.append("format=qdq")
    last = {setting.partition("=")[0]: setting for setting in settings}  # the last one counts
    config = loading.parse_config(compose("config", overrides=list(last.values())))
    start = time.perf_counter()
    try:
        scores = score(config)
    except PtqError as error:
        print(f"{network}, {recipe}, seed {seed}: {error}", file=sys.stderr, flush=True)
        return
    row = {"network": network, "recipe": recipe, "seed": seed, **scores}
    print(row, f"{time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    yield row


def score(config: RunConfig) -> Record:
    """Return losses on both sides, bytes, and seconds of the preparation."""
    settings = resolve(config)
    config = settings.config
    data, fp32 = load_data_and_network(settings)
    held_out = draw_held_out(data, min(5000, len(data.train) // 2))
    samples = SamplesByRole(data, draw_calibration(data, None, config.seed, [held_out]))
    task = make_task(config.task, data, fp32, data.test)
    evaluator = Evaluator(settings.quantizer, fp32, task)
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as folder:
        nowhere: Any = _Nowhere()
        work = Workspace(settings, evaluator, samples, Path(folder), Path(scratch), nowhere)
        prepared = preparation.prepare(work)
        quantized = work.quantize(prepared, Path(folder))
        seconds = (prepared.seconds or 0) + quantized.seconds
        measured: Record = {"bytes": quantized.size_bytes, "seconds": round(seconds, 1)}
        for side, split in {"held_out": held_out, "test": data.test}.items():
            compared = evaluator.compare(quantized.path, split).comparison
            drop = compared.loss(fair=True)
            measured[f"{side}_samples"] = len(split)
            measured[f"{side}_fp32"] = round(float(compared.baseline.fair), 6)
            measured[f"{side}_drop"] = round(float(drop), 6)
            p_value = compared.p_value
            measured[f"{side}_p"] = "" if p_value is None else round(float(p_value), 5)
            db = compared.sqnr_db
            measured[f"{side}_sqnr_db"] = "" if db is None else round(float(db), 2)
    return measured


def read() -> list[Record]:
    """Return the earlier measurements."""
    if not RECORD.exists():
        return []
    with RECORD.open(newline="") as file:
        return list(csv.DictReader(file))


def write(rows: list[Record]) -> None:
    """Write the measurements to recipes.csv."""
    names = list(rows[0])
    files.write_text(
        RECORD, files.to_csv([names, *([row[name] for name in names] for row in rows)])
    )


def render(rows: list[Record]) -> str:
    """Return the losses of each recipe on each network, and the recipes' worst cases."""
    drops = {side: means_of(rows, f"{side}_drop") for side in SIDES}
    decibels = means_of(rows, "held_out_sqnr_db")
    worse: dict[str, int] = defaultdict(int)
    for row in rows:
        significant = row["test_p"] != "" and float(row["test_p"]) < 0.05
        worse[row["recipe"]] += significant and float(row["test_drop"]) > 0
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    networks = list(dict.fromkeys(row["network"] for row in rows))
    parts = []
    for side in SIDES:
        lines = []
        for recipe in recipes:
            values = {
                n: 100 * drops[side][recipe, n] for n in networks if (recipe, n) in drops[side]
            }
            cells = [f"{values[n]:+.2f}" if n in values else "" for n in networks]
            worst = max(values, key=lambda n: values[n])
            draws = [str(worse[recipe])] if side == "test" else []
            lines.append([recipe, *cells, f"{values[worst]:+.2f} ({worst})", *draws])
        heads = ["recipe", *networks, "worst mean", *["draws with p < 0.05"] * (side == "test")]
        parts.append(f"{side}: mean drop in points\n\n{table(heads, lines)}")
    parts.append(f"leaving one network out\n\n{leave_one_out(drops['test'], decibels)}")
    return "\n\n".join(parts)


Means = dict[tuple[str, str], float]  # by recipe and network


def means_of(rows: list[Record], column: str) -> Means:
    """Return the mean of a column over the draws."""
    draws: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        if row[column] != "":
            draws[row["recipe"], row["network"]].append(float(row[column]))
    return {key: float(np.mean(values)) for key, values in draws.items()}


def leave_one_out(drops: Means, decibels: Means) -> str:
    """Return, for each network, the recipe that is best on the others, and its results on it.

    The best recipe of a framework has the smallest gap in its worst case: the gap is the SQNR on
    held-out samples below that of the network's best recipe. Only recipes that were measured on
    every network of the framework are compared.
    """
    lines = []
    for framework in dict.fromkeys(framework_of(recipe) for recipe, _ in decibels):
        sqnr_db = {
            (recipe, network): value
            for (recipe, network), value in decibels.items()
            if framework_of(recipe) == framework
        }
        networks = list(dict.fromkeys(network for _, network in sqnr_db))
        recipes = [
            recipe
            for recipe in dict.fromkeys(recipe for recipe, _ in sqnr_db)
            if all((recipe, network) in sqnr_db for network in networks)
        ]
        if not recipes or len(networks) == 1:
            continue
        most = {n: max(sqnr_db[recipe, n] for recipe in recipes) for n in networks}
        for out in networks:
            behind = {
                recipe: max(most[n] - sqnr_db[recipe, n] for n in networks if n != out)
                for recipe in recipes
            }
            best = min(behind, key=lambda recipe: behind[recipe])
            cells = [f"{behind[best]:.1f} dB", f"{most[out] - sqnr_db[best, out]:.1f} dB"]
            drop = 100 * drops[best, out]
            lines.append([framework, str(len(recipes)), out, best, *cells, f"{drop:+.2f}"])
    heads = ["framework", "recipes", "left out", "best on the others", "farthest behind there"]
    return table([*heads, "behind on this one", "its test drop, points"], lines)


if __name__ == "__main__":
    sys.exit(main())
