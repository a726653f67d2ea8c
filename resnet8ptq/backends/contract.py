"""What stands between the pipeline and a framework."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.calibration.statistics import Range, Ranges
from resnet8ptq.config.schema import QuantizationConfig
from resnet8ptq.core.errors import QuantizationError, UnsupportedError
from resnet8ptq.data.dataset import Split
from resnet8ptq.models.model import Fp32Model

# A network on a batch: each of its outputs.
Run = Callable[[NDArray[np.float32]], Sequence[NDArray[np.float32]]]
Takes = Mapping[str, tuple[Sequence[object], str]]  # by key: the values taken, and why no other


@dataclass(frozen=True)
class Resolved:
    """What the settings come to in a framework; the defaults are those of dtype=fp32.

    Attributes:
        execution: `integer` where the artifact is meant for integer kernels, `simulated` where it
            computes in float what those would, `float` for dtype=fp32. A run logs what came of it,
            see `describe_execution`.
        weight_bits, activation_bits: 8, or 7 with a reduced range; None where they are float, or
            the framework has no say in it.
        weight_scheme, activation_scheme: `symmetric` or `affine`.
        file_format: of the artifact.
        engine: torch's.
    """

    weight_dtype: str = "float32"
    activation_dtype: str = "float32"
    execution: str = "float"
    weight_bits: int | None = None
    activation_bits: int | None = None
    weight_scheme: str | None = None
    activation_scheme: str | None = None
    file_format: str | None = None
    engine: str | None = None

    def to_params(self) -> dict[str, str]:
        """Return what is known, by MLflow name; none is that of a config key."""
        return {key: str(value) for key, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Artifact:
    """A model file as it would be deployed.

    Attributes:
        quantized_layers: convolutions and matrix products that run on quantized weights and
            activations; 0 for FP32.
        ranges: activation ranges by ONNX tensor name, as calibration chose them.
        details: what the framework did, by name; logged beside the settings.
    """

    path: Path
    quantized_layers: int = 0
    ranges: dict[str, Range] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Size of the file on disk."""
        return self.path.stat().st_size


@dataclass(frozen=True)
class Predictor:
    """A loaded artifact.

    Attributes:
        predict: returns each output [n, ...], in the network's order, for network inputs [n, ...].
        open_logits: loads a copy that is cut before the final softmax; None without a softmax.
    """

    predict: Run
    open_logits: Callable[[], Run | None]

    def logits(self, batch: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """Return what the final softmax takes [n, classes], dequantized; None without a softmax.

        The logarithm of quantized probabilities would not do: those come in steps of about 1/256.
        """
        return None if self._to_logits is None else self._to_logits(batch)[0]

    @cached_property
    def _to_logits(self) -> Run | None:
        return self.open_logits()


@dataclass(frozen=True)
class Node:
    """What one node of a loaded artifact takes, as the framework has optimized the graph.

    Attributes:
        operator: as the framework calls it.
        kind: `integer`: takes 8-bit tensors; `conversion`: between those and float, and between
            float types; `unfused`: float, where an integer kernel was meant; `float`; `other`.
        ms: for a batch: the mean of the middle half of the runs.
    """

    name: str
    operator: str
    kind: str
    ms: float


class Profiler(Protocol):
    """A loaded artifact whose nodes are timed."""

    def predict(self, batch: NDArray[np.float32]) -> Sequence[NDArray[np.float32]]:
        """Run a batch; see `Predictor`."""
        ...

    def nodes(self, runs: int) -> list[Node]:
        """Return what each node took in the last `runs` of them; asked for once, at the end."""
        ...


Key = tuple[str, str, str]  # of a node: name, operator, kind


def to_nodes(times: Sequence[Mapping[Key, float]]) -> list[Node]:
    """Return nodes from their times in each run, in milliseconds, in the order that they ran in."""
    keys = list(dict.fromkeys(key for run in times for key in run))
    table = np.sort([[run.get(key, 0.0) for key in keys] for run in times], axis=0)  # [runs, nodes]
    cut = len(times) // 4
    middle = table[cut : len(times) - cut].mean(axis=0)
    return [Node(*key, ms) for key, ms in zip(keys, middle.tolist(), strict=True)]


class Quantizer(Protocol):
    """One framework, set up for one run.

    Attributes:
        widths: bits that a layer's weights may take in its files; `FLOAT_BITS` where layers can be
            left in float.
    """

    widths: ClassVar[tuple[int, ...]]

    @property
    def level_pools(self) -> tuple[str, ...]:
        """Return the average pools, as ONNX calls them, that return levels of their input.

        What other ones return has a range of its own.
        """
        ...

    def resolve(self) -> Resolved:
        """Return what the settings come to in this framework, before any work.

        Raises:
            UnsupportedError: the framework cannot do this combination; the message says why.
        """
        ...

    def fit(self, model: Fp32Model) -> QuantizationConfig:
        """Return the settings with what depends on the network decided, before any work.

        Raises:
            UnsupportedError: the framework cannot quantize this network so; the message says why.
        """
        ...

    def quantize(
        self, model: Fp32Model, calibration: Split, folder: Path, ranges: Ranges | None = None
    ) -> Artifact:
        """Write the quantized model into `folder`; for dtype=fp32, the network as it is.

        Args:
            model: the network; its ONNX file, or for a converter of its own the Keras file.
            calibration: images that tell the activation ranges.
            folder: existing; the artifact is the only file written there.
            ranges: made elsewhere (a calibration table, fine-tuning), by ONNX tensor name; they
                win over what calibration finds. No calibration pass is run where they suffice.

        Raises:
            QuantizationError: the framework failed, or quantized nothing.
        """
        ...

    def load(self, path: Path, threads: int) -> Predictor:
        """Load an artifact from disk, to run on so many threads."""
        ...

    def count_kernels(self, path: Path) -> tuple[int, int]:
        """Return how many convolutions and matrix products run on integers, and how many in float.

        As the runtime executes the artifact: what the file means for integers, it may leave in
        float, see `describe_execution`.
        """
        ...

    def profile(self, path: Path, threads: int) -> AbstractContextManager[Profiler]:
        """Return what loads an artifact as `load` does, to time its nodes.

        Raises:
            UnsupportedError: before anything is loaded: the framework times no nodes, or their
                times would say nothing.
        """
        ...


def describe_execution(meant: str, on_integers: int, in_float: int) -> str:
    """Return how an artifact is executed.

    >>> describe_execution("integer", 3, 6)
    'mixed, 6 of 9 in float'

    Args:
        meant: as `Resolved` has it.
        on_integers, in_float: see `Quantizer.count_kernels`.
    """
    if meant != "integer" or not in_float:
        return meant
    kind = "mixed" if on_integers else "float"
    return f"{kind}, {in_float} of {on_integers + in_float} in float"


def refuse_others(config: QuantizationConfig, takes: Takes) -> None:
    """Refuse settings that a framework does not have.

    Raises:
        UnsupportedError: for the first of them; names key, value and reason.
    """
    for key, (values, reason) in takes.items():
        given = attrgetter(key)(config)
        if given not in values:
            shown = str(given).lower() if isinstance(given, bool) else given
            raise UnsupportedError(f"{key.removesuffix('.name')}={shown}: {reason}")


def check_same(whole: Run, small: Run, batches: Iterable[NDArray[np.float32]]) -> None:
    """Run a file and its slim copy on batches of samples.

    Raises:
        QuantizationError: one bit of one output differs.
    """
    for batch in batches:
        pairs = zip(whole(batch), small(batch), strict=True)
        if not all(np.array_equal(one, other) for one, other in pairs):
            raise QuantizationError("slim: the slimmed file predicts differently")
