"""Layer sensitivity: what quantizing one weight layer, or all but one, does to the output.

Measured on training images that did not calibrate, never on test images: layers are chosen by it.
"""

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from resnet8ptq import cache, data, evaluate, model, sensitivity_table
from resnet8ptq.backends import BACKENDS
from resnet8ptq.calibration import Range
from resnet8ptq.config import DtypeConfig, RunConfig
from resnet8ptq.data import Split
from resnet8ptq.errors import UnsupportedError
from resnet8ptq.metrics import Comparison, Scores
from resnet8ptq.model import Fp32Model
from resnet8ptq.nodes import weight_layers
from resnet8ptq.results import RunResult
from resnet8ptq.terminal import track
from resnet8ptq.tracking import Run


@dataclass(frozen=True)
class Figures:
    """One artifact, reloaded from disk and run over the held-out images: outputs [n, classes]."""

    scores: Scores
    path: Path
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

        def measured(variant: RunConfig) -> Figures:
            return measure(variant, network, calibration.split, held_out, Path(scratch))

        result = _analyse(config, network, measured)
    result = replace(result, output=output, resolved={**resolved, "sqnr_of": output, **digests})

    sensitivity_table.write(folder, config, result)
    sensitivity_table.print_table(result, sensitivity_table.describe(config))
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


def measure(
    config: RunConfig,
    network: Fp32Model,
    calibration: Split,
    held_out: Split,
    folder: Path,
    ranges: Mapping[str, Range] | None = None,
) -> Figures:
    """Quantize as `config` says, reload the artifact from disk and run the held-out images.

    Args:
        network: cut before its softmax where the SQNR of the logits is asked for.
        folder: existing; the artifact stays there.
        ranges: see `interfaces.Quantizer.quantize`.
    """
    quantizer = BACKENDS[config.backend.name](config)
    artifact = quantizer.quantize(network, calibration, folder, ranges)
    scores = evaluate.evaluate(config, artifact.path, held_out).scores
    scores = replace(scores, logits=scores.probabilities)  # whatever the network puts out
    return Figures(scores, artifact.path, artifact.size_bytes)


def rank_layers(
    config: RunConfig,
    nodes: Mapping[str, str],
    reference: Figures,
    measured: Callable[[RunConfig], Figures],
) -> list[Layer]:
    """Quantize each layer alone, or leave it alone in float; return the most sensitive first.

    Args:
        config: `analysis.mode` says which of the two.
        nodes: the layers' nodes in the ONNX graph, by short name.
        reference: of the FP32 network, in the same framework.
        measured: quantizes as it is told and measures; see `measure`.
    """
    one_at_a_time = config.analysis.mode == "one_at_a_time"
    layers = []
    for name, node in track(nodes.items(), "Quantizing layer by layer", "layers"):
        if one_at_a_time:
            variant = replace(config, nodes_to_quantize=[node])
        else:
            variant = replace(config, nodes_to_exclude=[node])
        layers.append(_compare(name, node, measured(variant), reference))
    return sorted(layers, key=lambda layer: layer.sqnr_db, reverse=not one_at_a_time)


def _compare(name: str, node: str, found: Figures, reference: Figures) -> Layer:
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


def _analyse(
    config: RunConfig, network: Fp32Model, measured: Callable[[RunConfig], Figures]
) -> SensitivityResult:
    reference = measured(replace(config, dtype=DtypeConfig("fp32")))
    nodes = weight_layers(onnx.load(network.onnx_path).graph)
    names = {name: node.name for name, node in nodes.items()}
    return SensitivityResult(
        "ok",
        mode=config.analysis.mode,
        layers=tuple(rank_layers(config, names, reference, measured)),
        whole=_compare("all_layers", "", measured(config), reference),
        images=reference.scores.total,
        fp32_correct=reference.scores.correct,
        fp32_size_bytes=reference.size_bytes,
    )
