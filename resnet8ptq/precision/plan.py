"""The plan: the bits of each layer's weights."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from resnet8ptq.config.schema import PrecisionConfig
from resnet8ptq.precision.grid import WeightScheme
from resnet8ptq.precision.selection import check_known, split_plan


@dataclass(frozen=True)
class Plan:
    """The scheme of each layer's weights.

    Attributes:
        default: of layers that `bits` does not name.
        bits: by a layer's short name, see `graph.layers.weight_layers`; one of `limits.BITS`.
            Without the layers that stay in float, see `selection.split_plan`.
        undecided: the bits are not chosen yet (`plan: auto`).
    """

    default: WeightScheme
    bits: Mapping[str, int] = field(default_factory=dict)
    undecided: bool = False

    @classmethod
    def of(cls, config: PrecisionConfig, default: WeightScheme) -> "Plan":
        """Return the plan of the settings; with `plan: auto` it is undecided."""
        return cls(default, split_plan(config)[0], config.plan == "auto")

    @property
    def is_narrow(self) -> bool:
        """True if a layer may have fewer than 8 bits."""
        return self.undecided or min(self.default.bits, *self.bits.values(), 8) < 8

    @property
    def most_bits(self) -> int:
        """The most bits that a layer's weights may have; 7 with a reduced range."""
        bits = max(self.default.bits, *self.bits.values(), 8 * self.undecided)
        return 7 if bits == 8 and self.default.reduce_range else bits

    def describe(self) -> str:
        """Return the types of the weights, such as `int4, int8`."""
        types = {self.default.dtype, *(self.scheme(name).dtype for name in self.bits)}
        return ", ".join(sorted(types))

    def to_params(self, layers: Collection[str], config: PrecisionConfig) -> dict[str, str]:
        """Return the plan as MLflow params.

        `planned_bits` is the plan as a setting, without the layers that have the dtype's bits.

        Args:
            layers: short names of the quantized layers.
            config: the settings of this plan.
        """
        assert isinstance(config.plan, Mapping)
        usual = self.default.bits
        other = ", ".join(f"{name}: {bits}" for name, bits in config.plan.items() if bits != usual)
        schemes = [self.scheme(name) for name in layers]
        bits = {7 if s.reduce_range and s.bits == 8 else s.bits for s in schemes}
        return {
            "planned_bits": f"{{{other}}}",
            "weight_dtype": ", ".join(sorted({scheme.dtype for scheme in schemes})),
            "weight_bits": ", ".join(map(str, sorted(bits))),
        }

    def scheme(self, layer: str) -> WeightScheme:
        """Return the scheme of a layer's weights."""
        bits = self.bits.get(layer, self.default.bits)
        if bits == self.default.bits:
            return self.default
        symmetric = bits < 8 or self.default.symmetric
        return replace(self.default, dtype=f"int{bits}", symmetric=symmetric)

    def narrow(self, layers: Collection[str]) -> dict[str, WeightScheme]:
        """Return the schemes of `layers` below 8 bits; raise `ConfigError` for an unknown layer."""
        check_known("precision.plan", self.bits, [*layers], "layers")
        schemes = {name: self.scheme(name) for name in layers}
        return {name: scheme for name, scheme in schemes.items() if scheme.bits < 8}
