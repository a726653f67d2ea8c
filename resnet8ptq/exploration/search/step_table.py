"""The table of the search's steps, with settings, reason, cost and rules.

The search (`searching`) tries the steps by rank. It adds the diagnosis, the budgets of bytes and
the confirmations itself. A diagnosis also suggests changes from here, and `advise` lists the steps
for a network. The cost of a step is a guess, which the search uses until it has measured a step of
that kind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from resnet8ptq.config.schema import DTYPES, RunConfig
from resnet8ptq.core import machine
from resnet8ptq.core.descriptor import Search, find_search
from resnet8ptq.experiment.network_properties import (
    ATTENTION,
    BESIDE,
    DEPTHWISE,
    POOLS,
    PRODUCTS,
    RECURRENT,
    SILU,
    UNEQUAL,
)
from resnet8ptq.exploration.search.changes import (
    Change,
    calibrate,
    calibrate_with,
    change,
    leave_in_float,
)

GOALS = ("fastest", "smallest", "best")
# Properties that are known after a diagnosis
WEIGHTS = "weights cost more"
ACTIVATIONS = "activations cost more"
START = "start"
ANSWERS = "answers"
FALLBACKS = ("weights_in_8_bits", "weights_in_16_bits")  # the last resorts before FP32


@dataclass(frozen=True)
class StepKind:
    """A row of the table.

    Attributes:
        name: the kind of step; several rows may have one name.
        rank: position in the order. Steps of rank 0 to 9 are tried before the search may end,
            because the best of them is not known beforehand.
        settings: the settings in one line. `{max_drop}` stands for half of the limit, and `{exact}`
            for a dtype whose products this CPU sums exactly. `{start}` stands for the settings of
            the plain run, and `{slim}` for `slim=true` if the plain run has it.
        why: the reason to try the step, in one line; `{finding}` stands for a finding of the
            diagnosis.
        cost: expected time, relative to the plain run.
        needs: properties (`Seen.properties`), one of which must hold; empty for any network.
        capability: an attribute of the backend's `Search` that must hold; empty for any backend.
        goals: the goals for which the step is tried.
        moved: earlier positions, by the property that moves the step.
        reasons: other reasons, by the property that gives them.
        plain: whether the step starts from the default settings; other steps change the static
            model closest to FP32.
        only_8_bits: whether the step does not apply with 16-bit activations.
        free: whether the step changes neither the bytes nor the speed of a model.
        part: see `searching.Step.part`.
        drops_corrections: whether the step switches off the corrections of the model that it
            changes.
        needs_classes: whether the task must be classification.
    """

    name: str
    rank: int
    settings: str
    why: str
    cost: float = 1.0
    needs: tuple[str, ...] = ()
    capability: str = ""
    goals: tuple[str, ...] = GOALS
    moved: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    plain: bool = False
    only_8_bits: bool = False
    free: bool = False
    part: float = 1.0
    drops_corrections: bool = False
    needs_classes: bool = False

    @property
    def is_start(self) -> bool:
        """Whether the step is tried before the search may end, see `rank`."""
        return self.rank < 10

    def find_rank(self, properties: Sequence[str]) -> int:
        """Return the position for a network and its loss with these properties."""
        rank = self.rank
        for name in properties:
            rank = min(rank, self.moved.get(name, rank))
        return rank

    def find_reason(self, properties: Sequence[str]) -> str:
        """Return the reason for a network and its loss with these properties."""
        for name in properties:
            if name in self.reasons:
                return self.reasons[name]
        return self.why

    @property
    def change(self) -> Change:
        """The settings as a change, with the gaps of `settings` unfilled."""
        return change(self.settings)


def _calibrate_by(method: str) -> StepKind:
    """Return the row of a calibration method."""
    return StepKind(
        name="calibrations",
        rank=21,
        settings=f"calib={method}",
        why="another calibration method on the collected statistics",
        cost=0.8,
        only_8_bits=method == "mse",  # mse minimizes the error of 8 bits
        free=True,
    )


_NOT_FASTEST = ("smallest", "best")

STEPS = (
    StepKind(
        name=START,
        rank=0,
        settings="",  # `start` adds the backend's settings
        why="plain 8 bits",
        plain=True,
    ),
    StepKind(
        name="dynamic",
        rank=1,
        settings="method=dynamic dtype={exact} per_channel=true slim=true",
        why="weights lie in matrix products: ranges of activations sample by sample",
        needs=(PRODUCTS, RECURRENT),
        capability="dynamic",
        reasons={RECURRENT: "recurrent layers: only ranges of activations sample by sample fit"},
        plain=True,
        only_8_bits=True,
    ),
    StepKind(
        name="mixed",
        rank=2,
        settings="method=mixed {start}",
        why="both kinds of layers: dynamic products and LSTMs beside static convolutions",
        needs=(BESIDE,),
        capability="mixed",
        plain=True,
        only_8_bits=True,
    ),
    StepKind(
        name="equalization",
        rank=20,
        settings="corrections.equalization=true",
        why="channels of very different ranges share a scale: layers can be equalized",
        needs=(UNEQUAL,),  # in other networks, equalization may increase the loss
        free=True,
    ),
    _calibrate_by("minmax"),
    _calibrate_by("percentile"),
    _calibrate_by("mse"),
    StepKind(
        name="operators",
        rank=30,
        settings="op_types=[Conv,Gemm,MatMul,Add,Relu,Clip,Softmax,MaxPool]",
        why="an average pool takes the range of its input, which is too large for its output",
        needs=(POOLS,),
        capability="chooses_operators",
        only_8_bits=True,
    ),
    StepKind(
        name=ANSWERS,
        rank=40,
        settings="",  # the settings come from the findings
        why="the diagnosis found: {finding}",
    ),
    StepKind(
        name="smooth_quant",
        rank=50,
        settings="corrections.smooth_quant=true",
        why="outliers in few channels before matrix products",
        cost=2,
        needs=(ATTENTION, PRODUCTS),
        free=True,
    ),
    StepKind(
        name="bias_correction",
        rank=51,
        settings="corrections.bias_correction=true",
        why="rounding shifts the mean of the channels",
        cost=2,
        reasons={DEPTHWISE: "rounding shifts the mean of the channels, most in depthwise layers"},
        free=True,
    ),
    StepKind(  # comes before layers in float, because it costs no speed
        name="learned_rounding",
        rank=60,
        settings=(
            "corrections.adaround=true corrections.adaround_iterations=500 "
            "corrections.bias_correction=true"
        ),
        why="the rounding of the weights can be learned",
        cost=30,
        reasons={WEIGHTS: "rounding the weights costs more than the activations: learn it"},
        free=True,
        part=0.25,
    ),
    StepKind(  # comes earlier where activations cost more, which learned weights cannot reduce
        name="float_layers",
        rank=61,
        settings="nodes_to_exclude=auto max_drop={max_drop}",
        why="the layers that add most noise may suffice: as few as possible in float",
        cost=8,
        moved={SILU: 31, ACTIVATIONS: 52},
        reasons={ACTIVATIONS: "rounding the activations costs more: some layers in float"},
        part=0.25,
    ),
    StepKind(
        name="weights_in_8_bits",
        rank=70,
        settings="method=weight_only dtype=w8 weight_only.block_size=null {slim}",
        why="weights alone in 8 bits, activations in float: most networks lose little",
        capability="weights_alone",
        moved={PRODUCTS: 10, RECURRENT: 10, ACTIVATIONS: 53},
        plain=True,
        only_8_bits=True,
    ),
    StepKind(
        name="weights_in_4_bits",
        rank=71,
        settings="method=weight_only dtype=w4",
        why="weights of matrix products in blocks of 4 bits, activations in float",
        needs=(ATTENTION, PRODUCTS),
        capability="weights_in_blocks",
        goals=_NOT_FASTEST,
        plain=True,
        only_8_bits=True,
    ),
    StepKind(
        name="learned_blocks",
        rank=72,
        settings=(
            "corrections.reconstruction=true corrections.reconstruction_iterations=500 "
            "corrections.bias_correction=true corrections.adaround=false method=static"
        ),
        why="rounding and ranges can be learned block by block",
        cost=90,
        goals=("best",),
        part=0.25,
    ),
    StepKind(  # ONNX Runtime computes these layers in float on this CPU
        name="wide_activations",
        rank=73,
        settings="dtype=w8a16 calib=minmax",
        why="8 bits do not suffice for the activations: 16, which are slow on a CPU",
        cost=100,
        capability="wide_activations",
        goals=_NOT_FASTEST,
        only_8_bits=True,
        drops_corrections=True,  # the converter does not support them
    ),
    StepKind(
        name="weights_in_16_bits",
        rank=79,
        settings="dtype=fp16 method=weight_only",
        why="weights in 16-bit floats: half of the bytes, and next to nothing is lost",
        capability="float16_weights",
        goals=("fastest", "smallest"),  # this step would always win with goal=best
        plain=True,
        only_8_bits=True,
    ),
    StepKind(
        name="fine_tuning",
        rank=80,
        settings="method=qat",
        why="nothing without training suffices: three epochs on the training samples",
        cost=150,
        only_8_bits=True,
        part=0.5,  # training stops after whole epochs
        drops_corrections=True,
        needs_classes=True,
    ),
)

# Plainer settings for a start that fails, in the order in which they are tried: the setting to
# replace, the replacement, and the reason.
PLAINER = (
    ("slim=true", "slim=false", "the file with all its parts"),
    ("format=auto", "format=qdq", "the plainer file format"),
    ("float_output=true", "float_output=false", "the output in 8 bits"),
    ("per_channel=true", "per_channel=false", "one scale per tensor"),
    ("op_types=null", "op_types=[Conv,Gemm,MatMul]", "only the operators with weights"),
)


@dataclass(frozen=True)
class Seen:
    """The state of the search before a kind of step.

    Attributes:
        backend: the value of `backend=`.
        exact_sums: whether this CPU sums 8-bit products exactly.
        limit: the largest loss that passes.
        properties: properties of the network, see `network_properties`, and of the loss: whether
            `WEIGHTS` or `ACTIVATIONS` cost more.
        settings: settings of the user and of the model that the step changes, by key.
        findings: the names of findings of a diagnosis, each with the change against it.
        classifies: whether the task is classification; True if it is not known yet.
    """

    backend: str
    exact_sums: bool
    limit: float
    properties: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[tuple[str, Change], ...] = ()
    classifies: bool = True

    @property
    def search(self) -> Search:
        """The start and the abilities of the backend."""
        return find_search(self.backend)

    @property
    def is_wide(self) -> bool:
        """Whether activations have 16 bits."""
        return self.is_set("dtype", "w8a16")

    def is_set(self, key: str, value: str) -> bool:
        """Return whether a setting of the user or of the model to change has this value."""
        return self.settings.get(key) == f"{key}={value}"


@dataclass(frozen=True)
class Proposal:
    """A change to try, the reason, and the expected time relative to the plain run."""

    change: Change
    why: str
    cost: float = 1.0


def order(properties: Sequence[str], goal: str) -> list[str]:
    """Return the names of the kinds of steps for a goal, in the order in which they are tried."""
    rows = [row for row in STEPS if goal in row.goals]
    rows.sort(key=lambda row: row.find_rank(properties))
    return list(dict.fromkeys(row.name for row in rows))


def find_rows(name: str) -> list[StepKind]:
    """Return the rows of a kind of step; empty for the search's own kinds, such as a diagnosis."""
    return [row for row in STEPS if row.name == name]


def propose(name: str, seen: Seen) -> list[Proposal]:
    """Return the changes of a kind of step that apply in a state; empty without any."""
    proposals = []
    for row in find_rows(name):
        if _applies(row, seen):
            proposals += _propose(row, seen)
    return proposals


def _applies(row: StepKind, seen: Seen) -> bool:
    if row.needs and set(row.needs).isdisjoint(seen.properties):
        return False
    if row.capability and not getattr(seen.search, row.capability):
        return False
    if row.only_8_bits and seen.is_wide:
        return False
    return seen.classifies or not row.needs_classes


def _propose(row: StepKind, seen: Seen) -> list[Proposal]:
    why = row.find_reason(seen.properties)
    # The settings of the start and of the answers are not in the table
    if row.name == START:
        if seen.is_wide:
            why = "8-bit weights, 16-bit activations"
        return [Proposal(start(seen), why, row.cost)]
    if row.name == ANSWERS:
        answers = []
        for finding, answer in seen.findings:
            answers.append(Proposal(answer, why.format(finding=finding), row.cost))
        return answers

    # Fill the gaps in the row's settings
    exact = "u8s8" if seen.exact_sums else "uint8"
    slim = ""
    if "slim=true" in seen.search.start:
        slim = "slim=true"
    filled = row.settings.format(
        max_drop=f"{seen.limit / 2:g}", exact=exact, start=start(seen).words, slim=slim
    )
    words = filled.split()
    if row.drops_corrections:
        for key in seen.settings:
            if key.startswith("corrections.") and seen.is_set(key, "true"):
                words.append(f"{key}=false")

    # Leave out a step that changes nothing, which would repeat a run
    changes_nothing = all(seen.is_set(*word.split("=", 1)) for word in words)
    if changes_nothing and not row.plain:
        return []
    return [Proposal(Change(tuple(words)), why, row.cost)]


def start(seen: Seen) -> Change:
    """Return the settings of the plain run of a backend.

    The backend's descriptor has the settings for 8 bits; `reduce_range=true` joins them if the
    backend's 16-bit sums saturate on this CPU. With 16-bit activations, only `calib` and
    `per_channel` are set.
    """
    if seen.is_wide:
        return Change(("calib=minmax", "per_channel=true"))
    settings = seen.search.start
    saturates = seen.search.sums_in_16_bits and not seen.exact_sums
    if saturates:
        settings = (*settings, *REDUCE_RANGE.settings)
    return Change(settings)


# The faults that `exploration.tensors.findings` reports; `answer` has settings against most.
CLIPPED = "clipped activation"
SATURATED = "saturated sum"
INEXACT_KERNEL = "inexact kernel"
UNLIKE_CHANNELS = "channels of very different scale"
OUTLIER_WEIGHT = "outlier weight"
OUTLIER_ACTIVATION = "outlier in an activation"
OUTLIER_CHANNEL = "outlier channel"
UNLIKE_INPUTS = "joined inputs of very different scale"
FIXED_SCALE = "fixed scale"
UNUSED_RANGE = "unused range"
DEAD_CHANNEL = "dead channel"
WRONG_WEIGHTS = "wrong weights"
WRONG_SCALE = "wrong scale"
WRONG_BIAS = "wrong bias"
CHANNEL_ORDER = "wrong order of channels"
UNEXPLAINED = "unexplained error"

# The changes that a diagnosis may suggest in addition to the rows above.
PER_CHANNEL = change("per_channel=true")
REDUCE_RANGE = change("reduce_range=true")
UINT8 = change("dtype=uint8")
FLOAT_OUTPUT = change("float_output=true")


def _change_of(name: str) -> Change:
    [row] = find_rows(name)
    return row.change


BIAS = _change_of("bias_correction")
LEARN = _change_of("learned_rounding")
EQUALIZE = _change_of("equalization")


def answer(config: RunConfig, finding: str, nodes: Sequence[str]) -> list[Change]:
    """Return the changes of settings against a fault; empty if there are none.

    Args:
        config: the settings with which the file was quantized.
        finding: the name of the fault, such as `CLIPPED`.
        nodes: nodes that avoid the fault if they stay in float.
    """
    # Prepare the changes that depend on the settings
    more = calibrate_with(4 * (config.calib.samples_per_class or 100))
    widest = more if config.calib.name == "minmax" else calibrate("minmax")
    narrower = [] if config.calib.name == "percentile" else [calibrate("percentile")]
    per_channel = [] if config.per_channel else [PER_CHANNEL]
    # With `auto`, the run chooses the nodes itself, and a list would replace its choice
    lists_nodes = config.nodes_to_exclude != "auto"
    in_float = [leave_in_float(config, nodes)] if nodes and lists_nodes else []

    # A fault without an entry has another cause than the settings
    changes = {
        CLIPPED: [widest],
        SATURATED: [REDUCE_RANGE, UINT8],
        INEXACT_KERNEL: [REDUCE_RANGE, UINT8],
        UNLIKE_CHANNELS: [PER_CHANNEL],
        OUTLIER_WEIGHT: [*per_channel, *in_float],
        OUTLIER_ACTIVATION: [*narrower, *in_float],
        OUTLIER_CHANNEL: [*narrower, EQUALIZE, *in_float],
        UNLIKE_INPUTS: in_float,
        FIXED_SCALE: in_float,
        UNUSED_RANGE: [*narrower, *in_float],
        DEAD_CHANNEL: [*per_channel, *in_float],
        UNEXPLAINED: in_float,
    }
    return changes.get(finding, [])


def usual(config: RunConfig, worst: Sequence[str]) -> list[Change]:
    """Return the changes that a diagnosis of these settings tries, even without a finding.

    Args:
        worst: nodes of the layer with the lowest SQNR alone; empty if unknown.
    """
    changes = [] if config.per_channel else [PER_CHANNEL]
    for name in ("percentile", "minmax"):
        if name != config.calib.name:
            changes.append(calibrate(name))
    if DTYPES[config.dtype.name][1] == "int8":
        changes.append(UINT8)
        if not (config.reduce_range or machine.sums_exactly()):
            changes.append(REDUCE_RANGE)
    if worst:
        changes.append(leave_in_float(config, worst))
    if not config.float_output:
        changes.append(FLOAT_OUTPUT)
    return changes


def correct(config: RunConfig) -> list[Change]:
    """Return the corrections to try if weights cost more than activations.

    The list is empty with per-tensor scales, or if rounding is already learned.
    """
    is_learned = config.corrections.adaround or config.corrections.reconstruction
    if is_learned or not config.per_channel:
        return []
    return [BIAS, LEARN]
