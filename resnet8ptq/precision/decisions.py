"""The decisions for one network: the bits of layers, the nodes in float, and ranges."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from resnet8ptq.config.schema import QuantizationConfig


@dataclass(frozen=True)
class Decisions:
    """The choices for one network, made before a backend quantizes it.

    Attributes:
        bits: bits by the short name of a layer or of a product of attention; `FLOAT_BITS` stands
            for float. All other layers have the bits of the dtype. None if the bits are still to be
            chosen.
        in_float: names of further nodes that stay in float.
        ranges: activation ranges by ONNX tensor name, from a calibration table, fine-tuning or a
            correction. They take precedence over calibration.
    """

    bits: Mapping[str, int] | None = field(default_factory=dict)
    in_float: Sequence[str] = ()
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, config: QuantizationConfig) -> "Decisions":
        """Return the bits and nodes of the settings; where these are `auto`, later steps choose."""
        plan = config.precision.plan
        excluded = config.nodes_to_exclude
        bits = plan or {}
        if plan == "auto":
            bits = None
        if excluded == "auto":
            excluded = ()
        return cls(bits=bits, in_float=excluded)
