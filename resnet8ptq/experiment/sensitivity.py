"""Layer sensitivity: what quantizing one weight layer, or all but one, does to the output.

Measured on training images that did not calibrate, never on test images: layers are chosen by it.
"""

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from resnet8ptq.backends.registry import BACKENDS
from resnet8ptq.calibration.statistics import Range
from resnet8ptq.config.schema import DtypeConfig, RunConfig
from resnet8ptq.core import cache
from resnet8ptq.core.console import track
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.data import locate
from resnet8ptq.data.dataset import Split
from resnet8ptq.data.draw import draw_calibration, draw_held_out
from resnet8ptq.evaluation import evaluate
from resnet8ptq.experiment import sensitivity_table
from resnet8ptq.experiment.ranking import Layer, SensitivityResult
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.graph.layers import weight_layers
from resnet8ptq.models import model
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.tasks.classification import Comparison, Scores


@dataclass(frozen=True)
class Figures:
    """One artifact, reloaded from disk and run over the held-out images: outputs [n, classes]."""

    scores: Scores
    path: Path
    size_bytes: int


def run_analysis(config: RunConfig, folder: Path, run: Recorder) -> SensitivityResult:
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

    config = replace(config, data=locate.settle(config.data))
    run.log_config(config)
    dataset = locate.load(config.data.name, config.data.root)
    fp32 = model.load(config.model, dataset, cache.folder(config.cache_dir))
    held_out = draw_held_out(dataset, config.held_out_images)
    calibration = draw_calibration(dataset, config.calib.samples_per_class, config.seed, [held_out])
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
