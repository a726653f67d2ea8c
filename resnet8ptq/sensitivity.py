"""Layer sensitivity: what quantizing one weight layer, or all but one, does to the output.

Measured on training images that did not calibrate, never on test images: layers are chosen by it.
"""

import csv
import io
import logging
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from resnet8ptq import cache, data, evaluate, files, model, plots
from resnet8ptq.backends import BACKENDS
from resnet8ptq.config import DtypeConfig, RunConfig
from resnet8ptq.errors import UnsupportedError
from resnet8ptq.metrics import Comparison, Scores
from resnet8ptq.model import Fp32Model
from resnet8ptq.nodes import weight_layers
from resnet8ptq.results import RunResult
from resnet8ptq.terminal import track
from resnet8ptq.tracking import Run

log = logging.getLogger(__name__)

COLUMNS = ("rank", "layer", "SQNR dB", "accuracy lost", "correct", "saved kB")


@dataclass(frozen=True)
class Figures:
    """One artifact, reloaded from disk and run over the held-out images: outputs [n, classes]."""

    scores: Scores
    size_bytes: int


@dataclass(frozen=True)
class Layer:
    """What happens when one layer alone is quantized, or alone is left in float.

    Attributes:
        name: short; `node` is the name in the ONNX graph, for `nodes_to_exclude`.
        sqnr_db: of the output, over all images and classes; see `metrics.Comparison`.
        accuracy_lost: the FP32 network's accuracy minus this one's, a fraction.
        saved_bytes: the FP32 artifact's size minus this one's.
    """

    name: str
    node: str
    sqnr_db: float
    accuracy_lost: float
    correct: int
    size_bytes: int
    saved_bytes: int


@dataclass(frozen=True)
class SensitivityResult(RunResult):
    """The layers, most sensitive first.

    Attributes:
        layers: lowest SQNR first where one layer is quantized; where one is left in float,
            highest first, since the others then do without the harm it does.
        whole: the same figures with every layer quantized.
        output: what the SQNR is taken of, `logits` or `probabilities`.
        images: how many held-out images.
        fp32_correct, fp32_size_bytes: of the same network in FP32, in the same framework.
    """

    mode: str = ""
    layers: tuple[Layer, ...] = ()
    whole: Layer | None = None
    output: str = ""
    images: int = 0
    fp32_correct: int = 0
    fp32_size_bytes: int = 0

    def summary(self) -> str:
        """Return the outcome in one line."""
        if not self.layers:
            return f"{self.status}: {self.reason}"
        first = self.layers[0]
        done = "quantized alone" if self.mode == "one_at_a_time" else "left in float"
        return f"most sensitive: {first.name}, {first.sqnr_db:.1f} dB {done}"

    def to_metrics(self) -> dict[str, float]:
        """Return every figure under its MLflow name; accuracies are fractions."""
        if self.whole is None:
            return {}
        metrics: dict[str, float] = {
            "images": self.images,
            "fp32_correct": self.fp32_correct,
            "fp32_size_bytes": self.fp32_size_bytes,
        }
        for layer in (*self.layers, self.whole):
            for key in ("sqnr_db", "accuracy_lost", "correct", "saved_bytes"):
                metrics[f"{key}_{layer.name}"] = getattr(layer, key)
        # The SQNR of an output that did not change is infinite, which no store can keep.
        return {key: float(value) for key, value in metrics.items() if math.isfinite(value)}


def run_analysis(config: RunConfig, folder: Path, run: Run) -> SensitivityResult:
    """Quantize layer by layer, rank the layers, and record; print the table.

    Args:
        config: what to run; `analysis` says how.
        folder: the run's own folder, existing; all its files land there.
        run: the open MLflow run that records it.

    Raises:
        PtqError: anything that went wrong, in one line.
    """
    try:
        resolved = BACKENDS[config.backend.name](config).resolve()
    except UnsupportedError as reason:
        run.log_config(config)
        result = SensitivityResult("unsupported", str(reason))
        run.log_result(result)
        return result

    config = replace(config, data=data.settle(config.data))
    run.log_config(config)
    dataset = data.load(config.data.name, config.data.root)
    fp32 = model.load(config.model, dataset, cache.folder(config.cache_dir))
    calibration = data.draw_calibration(dataset, config.calib.samples_per_class, config.seed)
    held_out = data.draw_held_out(dataset, calibration, config.held_out_images, config.seed)
    digests = {"calibration_digest": calibration.digest, "held_out_digest": held_out.digest}

    with tempfile.TemporaryDirectory() as scratch:
        network, output = cut_softmax(fp32, Path(scratch, "logits.onnx"))

        def measure(variant: RunConfig) -> Figures:
            quantizer = BACKENDS[variant.backend.name](variant)
            artifact = quantizer.quantize(network, calibration.split, Path(scratch))
            predictor = quantizer.load(artifact.path)
            scores, _ = evaluate.evaluate(predictor, held_out, variant.evaluate.batch_size)
            scores = replace(scores, logits=scores.probabilities)  # the output of the cut network
            return Figures(scores, artifact.size_bytes)

        result = _analyse(config, network, measure)
    result = replace(result, output=output, resolved={**resolved, "sqnr_of": output, **digests})

    write(folder, config, result)
    print_table(result, _title(config))
    run.log_result(result)
    return result


def cut_softmax(fp32: Fp32Model, path: Path) -> tuple[Fp32Model, str]:
    """Return the network up to its logits, written to `path`, and the name of its output.

    A softmax squeezes what quantization did to the logits. Where the network does not end in one,
    it comes back as it is.
    """
    proto = onnx.load(fp32.onnx_path)
    graph = proto.graph
    last = graph.node[-1]
    if last.op_type != "Softmax" or last.output[0] != graph.output[0].name:
        return fp32, "probabilities"
    graph.node.remove(last)
    graph.output[0].name = last.input[0]  # softmax keeps type and shape
    known = [value for value in graph.value_info if value.name != last.input[0]]
    del graph.value_info[:]
    graph.value_info.extend(known)
    onnx.checker.check_model(proto)
    onnx.save(proto, path)
    return replace(fp32, onnx_path=path), "logits"


def _analyse(
    config: RunConfig, network: Fp32Model, measure: Callable[[RunConfig], Figures]
) -> SensitivityResult:
    one_at_a_time = config.analysis.mode == "one_at_a_time"
    reference = measure(replace(config, dtype=DtypeConfig("fp32")))

    def compare(name: str, node: str, variant: RunConfig) -> Layer:
        found = measure(variant)
        correct = found.scores.correct
        sqnr_db = Comparison(found.scores, reference.scores).sqnr_db  # None: the outputs are equal
        return Layer(
            name=name,
            node=node,
            sqnr_db=math.inf if sqnr_db is None else sqnr_db,
            accuracy_lost=(reference.scores.correct - correct) / found.scores.total,
            correct=correct,
            size_bytes=found.size_bytes,
            saved_bytes=reference.size_bytes - found.size_bytes,
        )

    layers = []
    nodes = weight_layers(onnx.load(network.onnx_path).graph)
    for name, node in track(nodes.items(), "Quantizing layer by layer", "layers"):
        if one_at_a_time:
            variant = replace(config, nodes_to_quantize=[node.name])
        else:
            variant = replace(config, nodes_to_exclude=[node.name])
        layers.append(compare(name, node.name, variant))
    return SensitivityResult(
        "ok",
        mode=config.analysis.mode,
        layers=tuple(sorted(layers, key=lambda layer: layer.sqnr_db, reverse=not one_at_a_time)),
        whole=compare("all_layers", "", config),
        images=reference.scores.total,
        fp32_correct=reference.scores.correct,
        fp32_size_bytes=reference.size_bytes,
    )


def write(folder: Path, config: RunConfig, result: SensitivityResult) -> None:
    """Write `config.yaml`, `sensitivity.csv` and `sensitivity.png`, each whole or not at all."""
    files.write_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(config)))
    files.write_text(folder / "sensitivity.csv", to_csv(result))
    assert result.whole is not None  # only measured analyses come here
    figure = plots.sensitivity(
        [layer.name for layer in result.layers],
        [layer.sqnr_db for layer in result.layers],
        [100 * layer.accuracy_lost for layer in result.layers],
        [layer.saved_bytes / 1000 for layer in result.layers],
        whole_sqnr_db=result.whole.sqnr_db,
        output=result.output,
        title=_title(config),
    )
    plots.save(figure, folder / "sensitivity.png")


def to_csv(result: SensitivityResult) -> str:
    """Return one line a layer, most sensitive first; sizes in bytes, accuracy as a fraction."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    figures = ("accuracy_lost", "correct", "size_bytes", "saved_bytes")
    writer.writerow(["rank", "layer", "node", f"{result.output}_sqnr_db", *figures, "images"])
    for rank, layer in enumerate(result.layers, 1):
        values = [layer.sqnr_db, *(getattr(layer, key) for key in figures)]
        writer.writerow([rank, layer.name, layer.node, *values, result.images])
    return text.getvalue()


def print_table(result: SensitivityResult, title: str, console: Console | None = None) -> None:
    """Print the ranking and what to make of it to stdout."""
    console = console or Console(soft_wrap=False)
    if not console.is_terminal:
        console.width = 130  # a pipe has no width; rich would fold the columns at 80
    table = Table(title=title, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "layer" else "right", no_wrap=True)
    for rank, layer in enumerate(result.layers, 1):
        table.add_row(str(rank), *_cells(layer))
    if result.whole is not None:
        table.add_section()
        table.add_row("", *_cells(result.whole))
    console.print(table)
    for note in _notes(result):
        console.print(note, highlight=False, markup=False)


def _cells(layer: Layer) -> Sequence[str]:
    return (
        layer.name,
        f"{layer.sqnr_db:.1f}",
        f"{layer.accuracy_lost:+.2%}",
        str(layer.correct),
        f"{layer.saved_bytes / 1000:.1f}",
    )


def _notes(result: SensitivityResult) -> list[str]:
    rank = {
        "one_at_a_time": "each layer quantized alone; lowest SQNR first",
        "all_but_one": "each layer alone left in float; highest SQNR first, as it then helps most",
    }[result.mode]
    return [
        f"SQNR of the {result.output} against FP32: {rank}.",
        f"{result.images:,} held-out training images, {result.fp32_correct} right in FP32; a "
        "difference of a few images is noise: the ranking is by SQNR.",
        f"saved: against the FP32 file of the same framework, {result.fp32_size_bytes / 1000:.1f} "
        "kB; what conversion itself adds to the file, or leaves out, is part of it.",
    ]


def _title(config: RunConfig) -> str:
    granularity = "per channel" if config.per_channel else "per tensor"
    mode = config.analysis.mode.replace("_", " ")
    parts = (config.data.name, config.backend.name, config.dtype.name, config.calib.name)
    return " · ".join([*parts, granularity, mode])
