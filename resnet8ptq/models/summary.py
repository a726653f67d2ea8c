"""Summarizes a network's file: inputs, outputs, operators, and requirements for a run.

A separate process reads an ONNX file, or exports another format to ONNX, and the cache keeps the
graph. The network is not quantized; only a torch module needs a sample.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import onnx

from resnet8ptq.config.schema import ModelConfig
from resnet8ptq.core import cache, code, isolation, machine
from resnet8ptq.core.confinement import MAX_SECONDS
from resnet8ptq.core.console import print_table, say, stdout, waiting
from resnet8ptq.core.descriptor import Backend, find_backends
from resnet8ptq.core.errors import ModelError, errors_as
from resnet8ptq.graph.attention import left_by_attention
from resnet8ptq.graph.layers import RECURRENT, is_grouped
from resnet8ptq.graph.links import Links, find_all
from resnet8ptq.models.batch_axis import static_tensors
from resnet8ptq.models.contract import Contract, Tensor, ask_for_values, picture_size, read_contract
from resnet8ptq.models.conversion import CRASHED
from resnet8ptq.models.folding import count_unfolded_norms
from resnet8ptq.models.gates import onnx as gate
from resnet8ptq.models.network_path import hash_network, locate
from resnet8ptq.models.normalization import opset
from resnet8ptq.models.sources import formats, read_network
from resnet8ptq.models.sources.contract import Sample
from resnet8ptq.models.sources.onnx import read_graph
from resnet8ptq.tasks.scoring.outputs import count_scores, is_vector

FOLDED = {"BatchNormalization", "Identity", "Dropout"}  # removed before quantization


@dataclass(frozen=True)
class Summary:
    """The facts about a network that its graph shows.

    Attributes:
        contract: inputs and outputs; sizes that the file leaves free are None.
        opset: opset of an ONNX file, or of the export from another format.
        operators: number of nodes by operator, without nodes that depend only on shapes and
            constants.
        layers: number of convolutions, matrix products and LSTMs with constant weights.
        depthwise: number of grouped convolutions.
        parameters: number of values in all constants.
        quantized: the operators that each backend quantizes by default. Operators in `FOLDED` are
            folded (see `unfolded_norms`), the rest stays in float. Backends that cannot take the
            network's inputs or run its operators are missing, and those without a list of
            operators.
        final: the operator that computes the first output; empty if none does.
        converted: the backends whose own converter quantizes the whole network.
        left: number of nodes by operator that stay in float by default because of attention; the
            converters of `converted` quantize these nodes.
        inner_layers: number of layers inside operators such as If or Loop, by that operator; only
            the converters of `converted` may quantize such layers.
        lacking: the operators that a backend cannot run, by backend, see `Backend.lacks`.
        unfolded_norms: number of BatchNormalization nodes that stay, as `count_unfolded_norms`
            counts them.
    """

    path: Path
    format: str
    contract: Contract
    opset: int
    operators: dict[str, int]
    layers: int
    depthwise: int
    parameters: int
    quantized: dict[str, frozenset[str]]
    final: str
    converted: tuple[str, ...] = ()
    left: dict[str, int] = field(default_factory=dict)
    inner_layers: dict[str, int] = field(default_factory=dict)
    lacking: dict[str, list[str]] = field(default_factory=dict)
    unfolded_norms: int = 0

    def treatment(self, operator: str, backend: str) -> str:
        """Return how a backend computes an operator by default.

        The text is `8 bits`, `dynamic` (8 bits with method=dynamic or mixed, else float), `float`,
        `folded`, or `-` for a backend that `quantized` lacks. If only some of the nodes are
        quantized or folded, the text has the counts, such as `8 bits: 25 of 33` with attention, or
        `folded: 2 of 3`.
        """
        if backend not in self.quantized:
            return "-"
        count = self.operators.get(operator, 0)

        # A framework's own converter quantizes the whole network, so no nodes stay in float
        if operator in FOLDED:
            stay = self.unfolded_norms if operator == "BatchNormalization" else 0
            if not stay or backend in self.converted:
                return "folded"
            return f"folded: {count - stay} of {count}" if stay < count else "float"
        if operator in find_backends()[backend].dynamic_operators:
            return "dynamic"
        if operator not in self.quantized[backend]:
            return "float"
        left = self.left.get(operator, 0)
        if not left or backend in self.converted:
            return "8 bits"
        return f"8 bits: {count - left} of {count}" if left < count else "float"


def summarize(
    path: Path, cache_root: Path, config: ModelConfig | None = None, sample: Sample = None
) -> Summary:
    """Return the summary of a network's file or folder.

    Args:
        config: the settings of the network; None for the defaults.
        sample: a sample [1, ...] for a torch module, which does not declare its inputs.

    Raises:
        ModelError: the file is not a model, or its reader refuses it or fails; or the separate
            process crashed, or took too much memory or time; or see `hash_network`.
    """
    config = config or ModelConfig()
    file_format = None if config.module else formats.find_format(path)
    if file_format is not None:
        format_name = file_format.name
        words = file_format.takes.split(" ", 1)[1]  # drop the article
    elif config.module is not None:
        format_name = ""
        words = f"torch module {config.module}"
    else:
        raise ModelError(f"model.path: {path} is not a model; {formats.EXPECTED}")

    # Read the contract, and the operator of the first output
    proto = _export_graph(path, cache_root, config, sample)
    graph = proto.graph
    contract = read_contract(graph)
    last = Links(graph).producers.get(graph.output[0].name)
    final = ""
    if last is not None:
        final = last.op_type

    # Find the backends that take the network
    static = static_tensors(graph)
    dtypes = [tensor.dtype for tensor in contract.inputs]
    operators = dict(_count_operators(graph.node, static).most_common())
    converted = []
    quantized = {}
    lacking = {}
    for backend in with_known_operators():
        if format_name in backend.converts:
            converted.append(backend.name)
        elif not backend.lacks.isdisjoint(operators):
            lacking[backend.name] = sorted(backend.lacks.intersection(operators))
            continue
        if _takes(dtypes, backend, backend.name in converted):
            quantized[backend.name] = backend.find_operators()

    # Count the layers and parameters
    weights = list(gate.find_weights(graph))
    tensors = find_all(graph, onnx.TensorProto)
    return Summary(
        path=path,
        format=words,
        contract=contract,
        opset=opset(proto),
        operators=operators,
        layers=len(weights),
        depthwise=sum(map(is_grouped, graph.node)),
        parameters=sum(math.prod(tensor.dims) for tensor in tensors),
        quantized=quantized,
        final=final,
        converted=tuple(converted),
        left=dict(_count_operators(left_by_attention(graph), static)),
        inner_layers=dict(Counter(gate.find_inner_layers(graph))),
        lacking=lacking,
        unfolded_norms=count_unfolded_norms(graph),
    )


def _count_operators(nodes: Iterable[onnx.NodeProto], static: set[str]) -> Counter[str]:
    """Return the number of nodes by operator, without those whose outputs are all `static`."""
    counts: Counter[str] = Counter()
    for node in nodes:
        if not static.issuperset(node.output):
            counts[node.op_type] += 1
    return counts


def load_graph(path: Path, cache_root: Path, config: ModelConfig | None = None) -> onnx.GraphProto:
    """Return the graph of a network's file, exported to ONNX.

    Raises:
        ModelError: see `summarize`.
    """
    return _export_graph(path, cache_root, config or ModelConfig(), None).graph


@dataclass(frozen=True)
class NetworkFile:
    """The located file of a network, or of a module's weights.

    The file is read only when a step needs its content.
    """

    path: Path
    config: ModelConfig
    cache_root: Path

    @classmethod
    def find(cls, config: ModelConfig, data_name: str, cache_root: Path) -> "NetworkFile":
        """Locate the network, see `network_path.locate`."""
        path = locate(config, data_name)
        named = config if config.module is not None else replace(config, path=str(path))
        return cls(path, named, cache_root)

    @cached_property
    def sha256(self) -> str:
        """The hash of all sources of the network."""
        return hash_network(self.config, self.path)

    @property
    def format(self) -> str:
        """The name of the file's format; `module` for a module."""
        return formats.format_name(self.path, self.config.module is not None)

    @cached_property
    def contract(self) -> Contract:
        """The inputs and outputs; empty for a module, whose inputs only samples show.

        Raises:
            ModelError: see `summarize`.
        """
        if self.config.module is not None:
            return Contract((), ())
        return read_contract(load_graph(self.path, self.cache_root, self.config))

    def find_picture_size(self) -> tuple[int, int] | None:
        """Return height and width of the input pictures, see `contract.picture_size`."""
        return picture_size(self.contract, self.config.inputs or {})

    def find_input_names(self) -> list[str]:
        """Return the names of the inputs."""
        return [tensor.name for tensor in self.contract.inputs]


def _export_graph(
    path: Path, cache_root: Path, config: ModelConfig, sample: Sample
) -> onnx.ModelProto:
    """Return the network as an ONNX model, which a separate process makes and the cache keeps."""
    is_module = config.module is not None  # a module is the user's code, which may download files
    name = formats.format_name(path, is_module)
    if not is_module:
        sample = None  # a file declares its inputs

    # The shape of the sample decides how a module is exported
    shape = ""
    if sample is not None:
        shape = f"{sample.shape} {sample.dtype}"
    key: cache.Key = {
        "model": hash_network(config, path),
        "format": name,
        "shape": shape,
        "code": code.behind(__name__),
        **machine.versions(),
    }

    def make(folder: Path) -> None:
        crashed = ModelError(f"{path}: {CRASHED}")
        arguments = path, name, sample, config
        with waiting("Reading the network"):
            exported = isolation.call(
                _read_graph, *arguments, crashed=crashed, network=is_module, seconds=MAX_SECONDS
            )
        (folder / "network.onnx").write_bytes(exported)

    return onnx.load(cache.entry(cache_root, "inspections", key, make) / "network.onnx")


def _read_graph(path: Path, name: str, sample: Sample, config: ModelConfig) -> bytes:
    """Return the serialized graph with inferred shapes.

    The opset of an ONNX file stays.
    """
    import warnings

    warnings.simplefilter("ignore")  # TensorFlow and tf2onnx call deprecated functions
    with errors_as(ModelError, f"{path}: cannot be read"):
        if name == "onnx":
            proto = read_graph(path, config.inputs or {}).proto
        else:
            proto = read_network(path, sample, replace(config, inputs=None)).proto
        return bytes(onnx.shape_inference.infer_shapes(proto).SerializeToString())


def with_known_operators() -> list[Backend]:
    """Return the backends with a list of operators, in the order of tables."""
    return [backend for backend in find_backends().values() if backend.operators]


def _takes(dtypes: Sequence[str], backend: Backend, converted: bool) -> bool:
    """Return whether a backend takes inputs of these dtypes.

    A backend of a single input takes float32, or with its own converter any dtype.
    """
    if not backend.single_input:
        return True
    return len(dtypes) == 1 and (converted or dtypes[0] == "float32")


def requirements(summary: Summary) -> list[str]:
    """Return a text for each requirement of a run with the network."""
    contract = summary.contract
    lines = [f"samples that are {_describe(tensor)}" for tensor in contract.inputs]
    if len(contract.inputs) > 1:
        line = "an array for each input (data=arrays, or data=table with data.tokenizer)"
        if formats.takes_values(summary.path):
            setting = ask_for_values(contract.inputs[1:])
            line += f", or values that are the same for every sample: {setting}"
        lines.append(line)
    lines.append(_require_labels(summary))

    # Name the parts that not every backend quantizes
    recurrent = [name for name in RECURRENT if name in summary.operators]
    if recurrent:
        lines.append(f"method=dynamic with backend=onnx, to quantize {', '.join(recurrent)}")
    for name, count in summary.inner_layers.items():
        lines.append(f"an export without {name}, to quantize the {count} layers inside it")

    # Name the restrictions of the file and of backends
    if contract.batch is not None:
        lines.append(f"batches of {contract.batch}, if this fixed size cannot be freed")
    for name, operators in summary.lacking.items():
        lines.append(f"a backend other than {name}, which lacks {', '.join(operators)}")
    for backend in with_known_operators():
        if backend.name not in summary.quantized and backend.name not in summary.lacking:
            lines.append(f"a backend other than {backend.name}, which takes only one float32 input")
            break
    return lines


def _require_labels(summary: Summary) -> str:
    """Return a line about the labels that fit the outputs of a network."""
    inputs = summary.contract.inputs
    outputs = summary.contract.outputs
    maps = (
        "masks (data.masks=FOLDER, or integers [N, height, width]) or target pictures "
        "(data.targets=FOLDER)"
    )
    if [tensor.shape for tensor in inputs] == [tensor.shape for tensor in outputs]:
        line = "no labels, or labels of anomalies"
        if len(inputs[0].shape) == 3:
            line += f", or {maps}"
        return f"{line}: input and output have the same shape"
    scores = [tensor for tensor in outputs if is_vector(tensor.shape)]
    if len(outputs) == 1 and scores:
        size = count_scores(outputs[0].shape) or "?"
        if size == 1:
            return "labels 0 and 1, or values: it returns one value"
        kind = "probabilities" if summary.final == "Softmax" else "logits or values"
        return f"labels of {size} classes, if these are classes: {kind}"

    # A map has two axes besides that of its classes or channels; so have raw outputs of detectors
    line = "no labels: its outputs are compared with FP32, value by value"
    has_maps = any(len(one.shape) == 3 for one in outputs if not is_vector(one.shape))
    if has_maps:
        line += f"; or, if it returns a map of the picture, {maps}"
    if len(outputs) > 1 or not has_maps:
        line += "; or, if it is a detector, boxes (data=coco)"
    if scores:
        kept = " or ".join(f"[{tensor.name}]" for tensor in scores)
        line += f"; or labels of classes, if model.outputs={kept} keeps one output"
    return line


def _describe(tensor: Tensor) -> str:
    """Return shape and dtype of an input and, if it may take pictures, their size and colours."""
    sizes = ", ".join(map(str, tensor.shape)).replace("None", "any size")
    text = f"[{sizes}] {tensor.dtype}"
    if len(tensor.shape) != 3:
        return text
    colours = {1: "grey", 3: "RGB or BGR"}
    first, second, third = tensor.shape
    for layout, channels, height, width in (
        ("NCHW", first, second, third),
        ("NHWC", third, first, second),
    ):
        if channels in colours:
            size = f"{height or 'any size'} x {width or 'any size'}"
            return f"{text}, as pictures of {size} in {colours[channels]} are ({layout})"
    return text


def print_summary(summary: Summary, settings: Sequence[str] = ()) -> None:
    """Print a summary on stdout: facts, tables, requirements.

    Args:
        settings: lines about the settings of the run, printed last.
    """
    console = stdout(None, 130)
    say(
        console,
        f"{summary.path}: {summary.format}, opset {summary.opset}, "
        f"{sum(summary.operators.values())} nodes, {summary.layers} layers with weights, "
        f"{summary.parameters:,} parameters",
    )

    # List the inputs and outputs, then the operators by backend
    contract = summary.contract
    tensors = []
    for role, described in (("input", contract.inputs), ("output", contract.outputs)):
        for tensor in described:
            shape = str(list(tensor.shape)).replace("None", "?")
            tensors.append((role, tensor.name, shape, tensor.dtype))
    print_table(console, ("", "name", "shape (without batch)", "dtype"), tensors)

    # Each backend has a column of treatments
    backends = [backend.name for backend in with_known_operators()]
    operators = []
    for name, count in summary.operators.items():
        treatments = [summary.treatment(name, backend) for backend in backends]
        operators.append((name, count, *treatments))
    print_table(console, ("operator", "nodes", *backends), operators)
    for title, lines in (("It takes:", requirements(summary)), ("With these settings:", settings)):
        if lines:
            say(console, title)
        for line in lines:
            say(console, f"  - {line}")
