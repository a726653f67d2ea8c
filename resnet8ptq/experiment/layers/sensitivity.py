"""Layer sensitivity: how the output changes when one layer, or all but one, is quantized.

Sensitivity is measured on training samples that did not calibrate, never on test samples, because
it serves to choose layers.
"""

import tempfile
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import onnx

from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core.console import track
from resnet8ptq.experiment.layers.ranking import LayerSensitivity, SensitivityResult
from resnet8ptq.experiment.network_and_data import fit_settings
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.experiment.settings import Settings
from resnet8ptq.experiment.subject import open_subject
from resnet8ptq.experiment.workspace import Prepared, Workspace
from resnet8ptq.graph.session import end_at_logits
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.plan import find_quantized_layers, find_quantized_products
from resnet8ptq.tasks.scoring.outputs import LOGITS

_NAMED = {"one_at_a_time": "nodes_to_quantize", "all_but_one": "nodes_to_exclude"}


def analyse(settings: Settings, folder: Path, run: Recorder) -> SensitivityResult:
    """Quantize layer by layer, rank the layers, print the table, and write the files.

    The arguments are those of `dispatch.run_or_analyse`.

    Raises:
        UnsupportedError: the framework does not support the settings, or cannot leave chosen layers
            in float.
        PtqError: see `open_subject`; or quantization fails.
    """
    config = settings.config
    mode = settings.config.analysis.mode
    # Refuse a framework that takes no names of layers, before any work
    resolved = settings.vary(**{_NAMED[mode]: ["a layer"]}).quantizer.resolve()
    evaluator, samples = open_subject(settings, run)
    if config.method == "weight_only":  # this method quantizes only some of the layers
        settings = fit_settings(settings, evaluator.network)
        evaluator = evaluator.with_quantizer(settings.quantizer)
        config = settings.config
    with tempfile.TemporaryDirectory() as scratch:
        work = Workspace(
            settings, evaluator, samples, folder=folder, scratch=Path(scratch), run=run
        )
        result = Layers(work, work.unprepared).analyse()
    params = {**resolved.to_params(), "sqnr_of": result.output, **samples.digests}
    result = replace(result, resolved=params)

    # The table imports matplotlib, which a run that only excludes layers does not need.
    from resnet8ptq.experiment.layers import sensitivity_table

    sensitivity_table.write_sensitivity(folder, config, result)
    sensitivity_table.print_table(result, sensitivity_table.describe(config))
    return result


def cut_softmax(network: Fp32Model, path: Path) -> Fp32Model:
    """Return the network without its final softmax, written to `path`.

    Without a final softmax, or with several outputs, the network is unchanged.
    """
    proto = onnx.load(network.onnx_path)
    if not end_at_logits(proto):
        return network
    onnx.save(proto, path)
    conversion = replace(network.conversion, final=LOGITS)
    return replace(network, onnx_path=path, conversion=conversion)


class Layers:
    """Quantizes a network layer by layer, without its final softmax."""

    def __init__(self, work: Workspace, prepared: Prepared) -> None:
        """Cut the softmax from the FP32 network, and from the corrected one if different.

        Args:
            work: the run, whose `analysis.mode` sets whether one layer is quantized or all but one,
                and whose tuning samples are measured.
        """
        fp32 = cut_softmax(work.fp32, work.scratch / "fp32_logits.onnx")
        self.network = fp32
        if prepared.network is not work.fp32:
            self.network = cut_softmax(prepared.network, work.scratch / "logits.onnx")
        self.evaluator = replace(work.evaluator, network=fp32, before_softmax=True)
        self.work = work
        self.decisions = prepared.decisions

    @property
    def config(self) -> RunConfig:
        """The settings of the run."""
        return self.work.config

    @cached_property
    def nodes(self) -> dict[str, str]:
        """The layers' nodes in the ONNX graph, by short name, in the order of the graph.

        The layers include attention's quantized products. With `analysis.mode=one_at_a_time`,
        `+analysis=sensitivity` also quantizes the products that `attention=weights` leaves in
        float.
        """
        graph = onnx.load(self.network.onnx_path).graph
        selection = self.work.settings.quantizer.select(self.decisions)
        wider = selection
        analysis = self.config.analysis
        if analysis.name and analysis.mode == "one_at_a_time" and selection.attention == "weights":
            wider = replace(selection, attention="products")
        layers = find_quantized_layers(graph, selection) | find_quantized_products(graph, wider)
        order = {node.name: index for index, node in enumerate(graph.node)}
        nodes = {name: node.name for name, node in layers.items()}
        return dict(sorted(nodes.items(), key=lambda item: order[item[1]]))

    @cached_property
    def fp32_size_bytes(self) -> int:
        """Size of the FP32 artifact."""
        return self.evaluator.baseline(self.work.samples.held_out).size_bytes

    def analyse(self) -> SensitivityResult:
        """Return the ranking, and the metrics of the network that the settings quantize."""
        fp32 = self.evaluator.baseline_scores(self.work.samples.held_out)
        return SensitivityResult(
            "ok",
            mode=self.config.analysis.mode,
            metric=self.evaluator.task.metric,
            layers=tuple(self.rank()),
            whole=self._measure("all_layers"),
            output=self.evaluator.network.final,
            samples=fp32.total,
            fp32_value=fp32.value,
            fp32_size_bytes=self.fp32_size_bytes,
        )

    def rank(self) -> list[LayerSensitivity]:
        """Quantize each layer alone, or all others; return the most sensitive first."""
        layers = []
        for name, node in track(self.nodes.items(), "Quantizing layer by layer", "layers"):
            layers.append(self._measure(name, node))
        left_out = self.config.analysis.mode == "all_but_one"
        return sorted(layers, key=lambda layer: layer.sqnr_db, reverse=left_out)

    def _measure(self, name: str, node: str = "") -> LayerSensitivity:
        """Quantize only this layer, or all but this one; without `node`, those of the settings."""
        evaluator = self.evaluator
        decisions = self.decisions
        if node and self.config.analysis.mode == "one_at_a_time":
            alone = self.work.settings.vary(nodes_to_quantize=[node])
            evaluator = evaluator.with_quantizer(alone.quantizer)
        elif node:
            decisions = replace(decisions, in_float=[node])

        # Quantize, and measure on the tuning samples
        samples = self.work.samples
        with tempfile.TemporaryDirectory(dir=self.work.scratch) as folder:
            quantized = evaluator.quantize(
                self.network, decisions, samples.calibrating.split, Path(folder)
            )
            compared = self.evaluator.compare(quantized.path, samples.held_out)
        comparison = compared.comparison
        return LayerSensitivity(
            name=name,
            node=node,
            sqnr_db=compared.sqnr_db,
            value=comparison.model.value,
            lost=comparison.loss(),
            size_bytes=quantized.size_bytes,
            saved_bytes=self.fp32_size_bytes - quantized.size_bytes,
        )
