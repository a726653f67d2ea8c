"""The inputs of the steps that prepare a network, and their common result."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from resnet8ptq.backends.contract import Quantizer, Resolved
from resnet8ptq.backends.registry import make_quantizer
from resnet8ptq.calibration import table
from resnet8ptq.calibration.statistics import Ranges
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.corrections.layers import CorrectionSettings
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation.evaluator import Evaluator, Quantized
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.experiment.samples import Samples
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.grid import ActivationScheme, WeightScheme
from resnet8ptq.precision.plan import Plan, Selection


@dataclass(frozen=True)
class Preparation:
    """The network to quantize, and the settings for it; each step returns a new one.

    Attributes:
        config: the run's settings, with the steps' choices in place of `auto`.
        trained: the FP32 network, fine-tuned with `method=qat`; corrections take it as input.
        network: `trained` after the corrections.
        learned: activation ranges of fine-tuning, by ONNX tensor name.
        ranges: activation ranges that take precedence over calibration.
        params, metrics: params and metrics of the choices, by MLflow name.
        seconds: seconds of all steps; None if no step had work.
    """

    config: RunConfig
    trained: Fp32Model
    network: Fp32Model
    learned: Ranges | None = None
    ranges: Ranges | None = None
    params: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None


@dataclass(frozen=True)
class Workspace:
    """The inputs of each step.

    Attributes:
        samples: the samples; the steps choose on `samples.tuning`.
        folder: the run's folder, for tables and figures of the steps.
        scratch: folder of corrected networks, which must exist until quantization ends.
    """

    config: RunConfig
    evaluator: Evaluator
    samples: Samples
    folder: Path
    scratch: Path
    run: Recorder

    @property
    def fp32(self) -> Fp32Model:
        """The FP32 network."""
        return self.evaluator.network

    @cached_property
    def quantizer(self) -> Quantizer:
        """The quantizer, with the settings of the run."""
        return make_quantizer(self.config, self.evaluator.runtime)

    @cached_property
    def resolved(self) -> Resolved:
        """The settings as the framework resolves them."""
        return self.quantizer.resolve()

    @property
    def activations(self) -> ActivationScheme:
        """The grid of the activations."""
        symmetric = bool(self.config.symmetric.activations)
        bits = self.resolved.activation_bits or 8
        return ActivationScheme(bits, symmetric, self.quantizer.level_pools)

    def plan(self, config: RunConfig) -> Plan:
        """Return the grids of the weights."""
        return Plan.of(config.precision, WeightScheme.of(config, self.resolved.weight_bits == 7))

    def setting(self, config: RunConfig, images: Split) -> CorrectionSettings:
        """Return the settings of the corrections."""
        return CorrectionSettings(
            self.plan(config),
            Selection.of(config),
            images,
            config.calib,
            self.evaluator.runtime,
            self.activations,
            config.float_output,
        )

    def quantize(self, prepared: Preparation, folder: Path) -> Quantized:
        """Quantize the prepared network into `folder`."""
        images = self.samples.calibrating.split
        return self.evaluator.quantize(
            prepared.config, prepared.network, images, folder, prepared.ranges
        )

    def provenance(self, prepared: Preparation) -> table.Provenance:
        """Return the origin of calibrated ranges."""
        path, images = prepared.network.onnx_path, self.samples.calibrating.split
        return table.provenance(prepared.config.calib, path, images)


Step = Callable[[Workspace, Preparation], Preparation]
