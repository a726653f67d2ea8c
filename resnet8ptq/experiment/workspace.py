"""The inputs of the steps that prepare a network, and their decisions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from resnet8ptq.calibration import table
from resnet8ptq.calibration.statistics import Ranges
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.corrections.layers import CorrectionSettings
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation.evaluator import Evaluator, Quantized
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.experiment.samples import Samples
from resnet8ptq.experiment.settings import Settings
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.grid import ActivationScheme, WeightScheme
from resnet8ptq.precision.plan import Plan, Selection


@dataclass(frozen=True)
class Decisions:
    """The network to quantize, and the choices for it; each step returns new ones.

    Attributes:
        trained: the FP32 network, fine-tuned with `method=qat`; corrections take it as input.
        network: `trained` after the corrections.
        learned: activation ranges of fine-tuning, by ONNX tensor name.
        ranges: activation ranges that take precedence over calibration.
        bits: the bits of the weights of each layer, chosen by `precision.plan=auto`.
        in_float: the nodes that stay in float, chosen by `nodes_to_exclude=auto`.
        params, metrics: params and metrics of the choices, by MLflow name.
        seconds: seconds of all steps; None if no step had work.
    """

    trained: Fp32Model
    network: Fp32Model
    learned: Ranges | None = None
    ranges: Ranges | None = None
    bits: Mapping[str, int] | None = None
    in_float: Sequence[str] | None = None
    params: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None

    def apply(self, config: RunConfig) -> RunConfig:
        """Return the settings with the choices in place of `auto`: quantizers read them there."""
        if self.bits is not None:
            precision = replace(config.precision, plan=dict(self.bits))
            config = replace(config, precision=precision)
        if self.in_float is not None:
            config = replace(config, nodes_to_exclude=list(self.in_float))
        return config


@dataclass(frozen=True)
class Workspace:
    """The inputs of each step.

    Attributes:
        samples: the samples; the steps choose on `samples.tuning`.
        folder: the run's folder, for tables and figures of the steps.
        scratch: folder of corrected networks, which must exist until quantization ends.
    """

    settings: Settings
    evaluator: Evaluator
    samples: Samples
    folder: Path
    scratch: Path
    run: Recorder

    @property
    def config(self) -> RunConfig:
        """The settings of the run, before any decision."""
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

    def decided(self, decisions: Decisions) -> Settings:
        """Return the settings with the decisions in place of `auto`."""
        return self.settings.vary(decisions.apply(self.config))

    def plan(self, decisions: Decisions) -> Plan:
        """Return the grids of the weights."""
        config, resolved = decisions.apply(self.config), self.settings.quantizer.resolve()
        return Plan.of(config.precision, WeightScheme.of(config, resolved.weight_bits == 7))

    def setting(self, decisions: Decisions, images: Split) -> CorrectionSettings:
        """Return the settings of the corrections."""
        config = decisions.apply(self.config)
        return CorrectionSettings(
            self.plan(decisions),
            Selection.of(config),
            images,
            config.calib,
            self.evaluator.runtime,
            self.activations,
            config.float_output,
        )

    def quantize(self, decisions: Decisions, folder: Path) -> Quantized:
        """Quantize the prepared network into `folder`."""
        quantizer, images = self.decided(decisions).quantizer, self.samples.calibrating.split
        network, ranges = decisions.network, decisions.ranges
        return self.evaluator.quantize(quantizer, network, images, folder, ranges)

    def provenance(self, decisions: Decisions) -> table.Provenance:
        """Return the origin of calibrated ranges."""
        path, images = decisions.network.onnx_path, self.samples.calibrating.split
        return table.provenance(self.config.calib, path, images)


Step = Callable[[Workspace, Decisions], Decisions]
