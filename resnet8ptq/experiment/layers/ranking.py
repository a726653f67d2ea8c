"""The results of a sensitivity analysis: the layers and their ranking."""

import math
from dataclasses import dataclass

from resnet8ptq.evaluation.result import RunResult
from resnet8ptq.tasks.scoring.metric import Metric


@dataclass(frozen=True)
class LayerSensitivity:
    """The result with one layer quantized, with all but one, or with all layers.

    Attributes:
        name: the layer's short name; `all_layers` for all layers.
        node: the layer's name in the ONNX graph; empty for all layers.
        sqnr_db: SQNR of the outputs, see `Compared.sqnr_db`.
        value: the task's metric.
        lost: the loss of `value` against FP32, see `Metric.loss`.
        saved_bytes: the FP32 artifact's size minus this artifact's size.
    """

    name: str
    node: str
    sqnr_db: float
    value: float
    lost: float
    size_bytes: int
    saved_bytes: int


@dataclass(frozen=True, kw_only=True)
class SensitivityResult(RunResult):
    """The result of a sensitivity analysis.

    Attributes:
        layers: the layers, most sensitive first: by the lowest SQNR with one layer quantized, or by
            the highest with one layer in float.
        whole: the same metrics of the whole network, quantized by the settings.
        mode: `one_at_a_time` or `all_but_one`.
        output: the kind of the compared outputs: `logits`, `probabilities` or `values`.
        samples: number of scored held-out items, see `Scores.total`.
        fp32_value, fp32_size_bytes: metric and size of FP32 in the same framework.
    """

    layers: tuple[LayerSensitivity, ...]
    whole: LayerSensitivity
    mode: str
    metric: Metric
    output: str
    samples: int
    fp32_value: float
    fp32_size_bytes: int

    def summary(self) -> str:
        """Return the outcome in one line."""
        first = self.layers[0]
        done = "quantized alone" if self.mode == "one_at_a_time" else "left in float"
        return f"most sensitive: {first.name}, {first.sqnr_db:.1f} dB {done}"

    def to_metrics(self) -> dict[str, float]:
        """Return the finite metrics under their MLflow names."""
        name = self.metric.name
        metrics: dict[str, float] = {
            "sensitivity/images": self.samples,
            f"sensitivity/fp32_{name}": self.fp32_value,
            "sensitivity/fp32_size_bytes": self.fp32_size_bytes,
        }
        for layer in (*self.layers, self.whole):
            short = layer.name.replace("/", ".")  # a slash would open a group for each layer
            metrics |= {
                f"sensitivity/sqnr_db/{short}": layer.sqnr_db,
                f"sensitivity/{name}/{short}": layer.value,
                f"sensitivity/{name}_lost/{short}": layer.lost,
                f"sensitivity/saved_bytes/{short}": layer.saved_bytes,
            }
        # The SQNR of an output that did not change is infinite, which no store can keep.
        return {key: float(value) for key, value in metrics.items() if math.isfinite(value)}
