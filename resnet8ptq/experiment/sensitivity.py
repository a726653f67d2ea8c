"""Layer sensitivity: what quantizing one weight layer, or all but one, does to the output.

Measured on training images that did not calibrate, never on test images: layers are chosen by it.
"""

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import onnx

from resnet8ptq.backends.registry import make_quantizer
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import cache
from resnet8ptq.core.console import track
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.data import locate
from resnet8ptq.data.draw import draw_calibration, draw_held_out
from resnet8ptq.evaluation.trial import Bench, Trial, as_fp32
from resnet8ptq.experiment import sensitivity_table
from resnet8ptq.experiment.fit import fit
from resnet8ptq.experiment.ranking import Layer, SensitivityResult
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.graph.layers import weight_layers
from resnet8ptq.graph.logits import end_at_logits
from resnet8ptq.models import model
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.tasks.classification import Comparison, Scores


def run_analysis(config: RunConfig, folder: Path, run: Recorder) -> SensitivityResult:
    """Quantize layer by layer, rank the layers, and record; print the table.

    Args:
        config: what to run; `analysis` says how.
        folder: the run's own folder, existing; all its files land there.
        run: the open MLflow run that records it.

    Raises:
        PtqError: anything that went wrong, in one line.
    """
    runtime = cache.runtime(config.cache_dir, config.threads)
    try:
        # What is asked for by name must be one that the framework takes.
        resolved = make_quantizer(vary(config, "a layer"), runtime).resolve()
    except UnsupportedError as reason:
        run.log_config(config)
        result = SensitivityResult("unsupported", str(reason))
        run.log_result(result)
        return result

    config = replace(config, data=locate.settle(config.data))
    run.log_config(config)
    dataset = locate.read(config.data, config.preprocess, runtime.cache_root)
    fp32 = model.load(config.model, dataset, runtime.cache_root)
    dataset = fit(dataset, fp32)
    held_out = draw_held_out(dataset, config.held_out_images)
    calibration = draw_calibration(dataset, config.calib.samples_per_class, config.seed, [held_out])
    digests = {"calibration_digest": calibration.digest, "held_out_digest": held_out.digest}
    logits = fp32.final == "logits"
    bench = Bench(fp32.sha256, runtime, config.evaluate.batch_size, logits)

    with tempfile.TemporaryDirectory() as scratch:
        network, output = cut_softmax(fp32, Path(scratch, "logits.onnx"))

        def measured(variant: RunConfig) -> Trial:
            return bench.run(variant, network, calibration.split, held_out, Path(scratch))

        result = _analyse(config, network, measured)
    params = {**resolved.to_params(), "sqnr_of": output, **digests}
    result = replace(result, output=output, resolved=params)

    sensitivity_table.write(folder, config, result)
    sensitivity_table.print_table(result, sensitivity_table.describe(config))
    run.log_result(result)
    return result


def cut_softmax(fp32: Fp32Model, path: Path) -> tuple[Fp32Model, str]:
    """Return the network up to its logits, written to `path`, and the name of its output.

    Where the network does not end in a softmax, it comes back as it is.
    """
    proto = onnx.load(fp32.onnx_path)
    if not end_at_logits(proto):
        return fp32, fp32.final
    onnx.save(proto, path)
    return replace(fp32, onnx_path=path), "logits"


def vary(config: RunConfig, node: str) -> RunConfig:
    """Return the settings that quantize this layer alone, or leave it alone in float."""
    if config.analysis.mode == "one_at_a_time":
        return replace(config, nodes_to_quantize=[node])
    return replace(config, nodes_to_exclude=[node])


def rank_layers(
    config: RunConfig,
    nodes: Mapping[str, str],
    reference: Trial,
    measured: Callable[[RunConfig], Trial],
) -> list[Layer]:
    """Quantize each layer alone, or leave it alone in float; return the most sensitive first.

    Args:
        config: `analysis.mode` says which of the two.
        nodes: the layers' nodes in the ONNX graph, by short name.
        reference: of the FP32 network, in the same framework.
        measured: quantizes as it is told, and runs the held-out images.
    """
    layers = []
    for name, node in track(nodes.items(), "Quantizing layer by layer", "layers"):
        layers.append(_compare(name, node, measured(vary(config, node)), reference))
    left_out = config.analysis.mode == "all_but_one"
    return sorted(layers, key=lambda layer: layer.sqnr_db, reverse=left_out)


def _compare(name: str, node: str, trial: Trial, reference: Trial) -> Layer:
    scores, fp32 = (_as_logits(found.evaluation.scores) for found in (trial, reference))
    sqnr_db = Comparison(scores, fp32).sqnr_db  # None: the outputs are equal
    size_bytes = trial.artifact.size_bytes
    return Layer(
        name=name,
        node=node,
        sqnr_db=math.inf if sqnr_db is None else sqnr_db,
        accuracy_lost=(fp32.correct - scores.correct) / scores.total,
        correct=scores.correct,
        size_bytes=size_bytes,
        saved_bytes=reference.artifact.size_bytes - size_bytes,
    )


def _as_logits(scores: Scores) -> Scores:
    """Return the scores with whatever the network puts out as its logits."""
    return scores if scores.logits is not None else replace(scores, logits=scores.probabilities)


def _analyse(
    config: RunConfig, network: Fp32Model, measured: Callable[[RunConfig], Trial]
) -> SensitivityResult:
    reference = measured(as_fp32(config))
    nodes = weight_layers(onnx.load(network.onnx_path).graph)
    names = {name: node.name for name, node in nodes.items()}
    return SensitivityResult(
        "ok",
        mode=config.analysis.mode,
        layers=tuple(rank_layers(config, names, reference, measured)),
        whole=_compare("all_layers", "", measured(config), reference),
        images=reference.evaluation.scores.total,
        fp32_correct=reference.evaluation.scores.correct,
        fp32_size_bytes=reference.artifact.size_bytes,
    )
