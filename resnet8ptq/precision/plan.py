"""How many bits the weights of each layer get."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from resnet8ptq.config.schema import PrecisionConfig
from resnet8ptq.precision.grid import WeightScheme
from resnet8ptq.precision.selection import check_known, split_plan


@dataclass(frozen=True)
class Plan:
    """The scheme of each layer's weights.

    Attributes:
        default: of a layer that `bits` does not name.
        bits: by a layer's short name, see `graph.layers.weight_layers`; of `limits.BITS`. Layers
            that stay in float are left out, see `selection.split_plan`.
        undecided: they are still to be chosen.
    """

    default: WeightScheme
    bits: Mapping[str, int] = field(default_factory=dict)
    undecided: bool = False

    @classmethod
    def of(cls, config: PrecisionConfig, default: WeightScheme) -> "Plan":
        """Return what the settings say; with `plan: auto` it is undecided."""
        return cls(default, split_plan(config)[0], config.plan == "auto")

    @property
    def is_narrow(self) -> bool:
        """Whether a layer may have fewer than 8 bits."""
        return self.undecided or min(self.default.bits, *self.bits.values(), 8) < 8

    @property
    def most_bits(self) -> int:
        """The most that a layer's weights may have; 7 with a reduced range."""
        bits = max(self.default.bits, *self.bits.values(), 8 * self.undecided)
        return 7 if bits == 8 and self.default.reduce_range else bits

    def describe(self) -> str:
        """Return the types of the weights, such as `int4, int8`."""
        types = {self.default.dtype, *(self.scheme(name).dtype for name in self.bits)}
        return ", ".join(sorted(types))

    def to_params(self, layers: Collection[str], config: PrecisionConfig) -> dict[str, str]:
        """Return what the plan comes to, by MLflow name.

        `planned_bits` is the plan as it is typed, without the layers with the bits of the dtype.

        Args:
            layers: those that are quantized, by short name.
            config: whose plan this is.
        """
        assert isinstance(config.plan, Mapping)
        usual = self.default.bits
        other = ", ".join(f"{name}: {bits}" for name, bits in config.plan.items() if bits != usual)
        schemes = [self.scheme(name) for name in layers]
        bits = {7 if each.reduce_range and each.bits == 8 else each.bits for each in schemes}
        return {
            "planned_bits": f"{{{other}}}",
            "weight_dtype": ", ".join(sorted({each.dtype for each in schemes})),
            "weight_bits": ", ".join(map(str, sorted(bits))),
        }

    def scheme(self, layer: str) -> WeightScheme:
        """Return how the weights of a layer are quantized."""
        bits = self.bits.get(layer, self.default.bits)
        if bits == self.default.bits:
            return self.default
        symmetric = bits < 8 or self.default.symmetric
        return replace(self.default, dtype=f"int{bits}", symmetric=symmetric)

    def narrow(self, layers: Collection[str]) -> dict[str, WeightScheme]:
        """Return the schemes of the `layers` with fewer than 8 bits.

        Raises:
            ConfigError: the plan names another layer; lists the nearest.
        """
        check_known("precision.plan", self.bits, [*layers], "layers")
        schemes = {name: self.scheme(name) for name in layers}
        return {name: scheme for name, scheme in schemes.items() if scheme.bits < 8}
