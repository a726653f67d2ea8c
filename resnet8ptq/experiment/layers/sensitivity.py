"""Layer sensitivity: what quantizing one weight layer, or all but one, does to the output.

Measured on training images that did not calibrate, never on test images: layers are chosen by it.
"""

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import onnx

from resnet8ptq.backends.registry import make_quantizer
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import cache
from resnet8ptq.core.console import track
from resnet8ptq.evaluation.evaluate import targets_of
from resnet8ptq.evaluation.trial import Trial, as_fp32
from resnet8ptq.experiment.layers.ranking import Layer, SensitivityResult
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.experiment.subject import open_subject
from resnet8ptq.graph.logits import end_at_logits
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.selection import Selection, find_quantized_layers
from resnet8ptq.tasks.contract import LOGITS, Comparison, Scores, Targets, Task


def analyse(config: RunConfig, folder: Path, run: Recorder) -> SensitivityResult:
    """Quantize layer by layer, rank the layers, and print the table; see `analyses`."""
    runtime = cache.runtime(config.cache_dir, config.threads)
    # What is asked for by name must be one that the framework takes.
    resolved = make_quantizer(vary(config, "a layer"), runtime).resolve()
    subject = open_subject(config, run)
    held_out, task = subject.held_out, subject.task

    with tempfile.TemporaryDirectory() as scratch:
        network, output = cut_softmax(subject.fp32, Path(scratch, "logits.onnx"))
        bench = subject.bench(output)

        def measured(variant: RunConfig) -> Trial:
            return bench.run(variant, network, subject.calibration.split, held_out, Path(scratch))

        judge = Judge(task, targets_of(held_out), measured(as_fp32(config)))
        result = _analyse(config, judge, network, measured)
    params = {**resolved.to_params(), "sqnr_of": output, **subject.digests}
    result = replace(result, output=output, resolved=params)

    # It draws, which a run that only excludes layers does not.
    from resnet8ptq.experiment.layers import sensitivity_table

    sensitivity_table.write(folder, subject.config, result)
    sensitivity_table.print_table(result, sensitivity_table.describe(subject.config))
    return result


def cut_softmax(fp32: Fp32Model, path: Path) -> tuple[Fp32Model, str]:
    """Return the network up to its logits, written to `path`, and what it returns then.

    Where the network does not end in a softmax, it comes back as it is.
    """
    proto = onnx.load(fp32.onnx_path)
    if not end_at_logits(proto):
        return fp32, fp32.final
    onnx.save(proto, path)
    return replace(fp32, onnx_path=path), LOGITS


def vary(config: RunConfig, node: str) -> RunConfig:
    """Return the settings that quantize this layer alone, or leave it alone in float."""
    if config.analysis.mode == "one_at_a_time":
        return replace(config, nodes_to_quantize=[node])
    return replace(config, nodes_to_exclude=[node])


@dataclass(frozen=True)
class Judge:
    """Compares what was measured on the held-out images."""

    task: Task
    targets: Targets
    reference: Trial

    def compare(self, trial: Trial) -> Comparison:
        """Compare an artifact with that of the FP32 network, `reference`."""
        return self.task.compare(self._score(trial), self._reference)

    @cached_property
    def _reference(self) -> Scores:
        return self._score(self.reference)  # once: a detector's take a second

    def _score(self, trial: Trial) -> Scores:
        outputs = trial.evaluation.outputs
        if outputs.logits is None:  # whatever the network puts out stands for them
            outputs = replace(outputs, logits=outputs.values[0])
        return self.task.score(outputs, self.targets)


def rank_layers(
    config: RunConfig,
    judge: Judge,
    nodes: Mapping[str, str],
    measured: Callable[[RunConfig], Trial],
) -> list[Layer]:
    """Quantize each layer alone, or leave it alone in float; return the most sensitive first.

    Args:
        config: `analysis.mode` says which of the two.
        judge: compares them with the FP32 network in the same framework.
        nodes: the layers' nodes in the ONNX graph, by short name.
        measured: quantizes as it is told, and runs the held-out images.
    """
    layers = []
    for name, node in track(nodes.items(), "Quantizing layer by layer", "layers"):
        layers.append(_compare(judge, name, node, measured(vary(config, node))))
    left_out = config.analysis.mode == "all_but_one"
    return sorted(layers, key=lambda layer: layer.sqnr_db, reverse=left_out)


def _compare(judge: Judge, name: str, node: str, trial: Trial) -> Layer:
    found = judge.compare(trial)
    sqnr_db = found.sqnr_db  # None: the outputs are equal
    return Layer(
        name=name,
        node=node,
        sqnr_db=math.inf if sqnr_db is None else sqnr_db,
        value=found.model.value,
        lost=judge.task.metric.drop(found.delta, found.baseline.value),
        size_bytes=trial.size_bytes,
        saved_bytes=judge.reference.size_bytes - trial.size_bytes,
    )


def _analyse(
    config: RunConfig, judge: Judge, network: Fp32Model, measured: Callable[[RunConfig], Trial]
) -> SensitivityResult:
    fp32 = judge.compare(judge.reference)
    graph = onnx.load(network.onnx_path).graph
    layers = find_quantized_layers(graph, Selection.of(config))
    names = {name: node.name for name, node in layers.items()}
    return SensitivityResult(
        "ok",
        mode=config.analysis.mode,
        metric=judge.task.metric,
        layers=tuple(rank_layers(config, judge, names, measured)),
        whole=_compare(judge, "all_layers", "", measured(config)),
        images=fp32.model.total,
        fp32_value=fp32.model.value,
        fp32_size_bytes=judge.reference.size_bytes,
    )
