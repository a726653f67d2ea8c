"""The inputs of the steps that prepare a network, and their result."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from resnet8ptq.calibration import table
from resnet8ptq.calibration.statistics import Ranges
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.corrections.layers import CorrectionSettings
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation.evaluator import Evaluator, Quantized
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.experiment.samples import SamplesByRole
from resnet8ptq.experiment.settings import Settings
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.decisions import Decisions
from resnet8ptq.precision.grid import ActivationScheme, WeightScheme
from resnet8ptq.precision.plan import Plan


@dataclass(frozen=True)
class Prepared:
    """The network to quantize, and the decisions for it.

    Attributes:
        trained: the FP32 network, fine-tuned with `method=qat`; corrections take it as input.
        network: `trained` after the corrections.
        learned: activation ranges of fine-tuning, by ONNX tensor name.
        params, metrics: params and metrics of the decisions, by MLflow name.
        seconds: seconds of all steps; None if they changed neither the network nor the params.
    """

    trained: Fp32Model
    network: Fp32Model
    decisions: Decisions
    learned: Ranges = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None

    def decide(self, **decided: Any) -> "Prepared":
        """Return the same network, with these attributes of `Decisions` changed."""
        return replace(self, decisions=replace(self.decisions, **decided))


@dataclass(frozen=True)
class Workspace:
    """The inputs of each step.

    A step reads the settings, the samples and FP32 here, and earlier decisions in `Prepared`.
    A step that needs other settings takes a copy, see `vary`.

    Attributes:
        samples: the samples by role; choices by accuracy use `samples.tuning`.
        evaluator: quantizes, runs and scores; it has the FP32 network.
        folder: folder for tables and figures of the steps; in a run, the run's folder.
        scratch: folder of corrected networks, which must exist until quantization ends.
    """

    settings: Settings
    evaluator: Evaluator
    samples: SamplesByRole
    folder: Path
    scratch: Path
    run: Recorder

    @property
    def config(self) -> RunConfig:
        """The settings of the run; in a copy by `vary`, the changed ones."""
        return self.settings.config

    @property
    def fp32(self) -> Fp32Model:
        """The FP32 network."""
        return self.evaluator.network

    @property
    def activations(self) -> ActivationScheme:
        """The grid of the activations."""
        quantizer = self.settings.quantizer
        symmetric = bool(self.config.symmetric.activations)
        bits = quantizer.resolve().activation_bits or 8
        return ActivationScheme(bits, symmetric, quantizer.level_pools)

    @property
    def unprepared(self) -> Prepared:
        """The FP32 network with the decisions in the settings."""
        return Prepared(self.fp32, self.fp32, Decisions.of(self.config))

    def plan(self, decisions: Decisions) -> Plan:
        """Return the scheme of each layer's weights; 7 bits replace 8 if the framework uses 7."""
        seven_bits = self.settings.quantizer.resolve().weight_bits == 7
        return Plan.of(decisions, WeightScheme.of(self.config, seven_bits))

    def correction_settings(self, decisions: Decisions, samples: Split) -> CorrectionSettings:
        """Return the settings of the corrections for these decisions, with their samples."""
        return CorrectionSettings(
            weights=self.plan(decisions),
            selection=self.settings.quantizer.select(decisions),
            samples=samples,
            calib=self.config.calib,
            runtime=self.evaluator.runtime,
            activations=self.activations,
            float_output=self.config.float_output,
            searches=self.config.nodes_to_exclude == "auto",
        )

    def quantize(self, prepared: Prepared, folder: Path) -> Quantized:
        """Quantize the prepared network; write the artifact into `folder`."""
        samples = self.samples.calibrating.split
        return self.evaluator.quantize(prepared.network, prepared.decisions, samples, folder)

    def vary(self, config: RunConfig | None = None, /, **changes: Any) -> "Workspace":
        """Return the inputs with other settings; see `Settings.vary`."""
        settings = self.settings.vary(config, **changes)
        evaluator = self.evaluator.with_quantizer(settings.quantizer)
        return replace(self, settings=settings, evaluator=evaluator)

    def provenance(self, network: Fp32Model) -> table.Provenance:
        """Return the origin of the ranges that this run calibrates on `network`."""
        samples = self.samples.calibrating.split
        return table.provenance(self.config.calib, network.onnx_path, samples)


Step = Callable[[Workspace, Prepared], Prepared]
