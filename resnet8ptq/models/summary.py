"""Summarizes a network's file: inputs, outputs, operators, and requirements for a run.

An ONNX file is only parsed; other formats are exported first. Both happen in a separate process,
and the cache keeps the graph. Nothing is run or quantized.
"""

import math
from collections import Counter
from collections.abc import Sequence
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
from resnet8ptq.models.gates import onnx as gate
from resnet8ptq.models.network_path import digest, locate
from resnet8ptq.models.normalization import opset
from resnet8ptq.models.sources import formats, read_network
from resnet8ptq.models.sources.contract import Sample
from resnet8ptq.models.sources.onnx import read_graph

FOLDED = {"BatchNormalization", "Identity", "Dropout"}  # gone before quantization


@dataclass(frozen=True)
class Summary:
    """The facts about a network that are known without running it.

    Attributes:
        contract: inputs and outputs; sizes that the file leaves free are None.
        opset: opset of an ONNX file, or of the export from another format.
        operators: number of nodes by operator, without nodes that only compute shapes.
        layers: number of convolutions and matrix products with constant weights.
        parameters: number of values in all constants.
        quantized: the operators that each backend quantizes by default. Operators in `FOLDED` are
            folded, all others stay in float. Backends that cannot take the network's inputs are
            missing.
        converted: the backends whose own converter quantizes the whole network.
        left: number of nodes by operator that stay in float by default because of attention; such
            a converter quantizes them.
        inner_layers: number of layers inside If or Loop, by that operator; no backend quantizes
            them.
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

    def treatment(self, operator: str, backend: str) -> str:
        """Return how a backend computes an operator.

        It is `8 bits`, `dynamic` (8 bits with method=dynamic, else float), `float`, `folded` or
        `-`; with attention also a text such as `8 bits: 25 of 33`.
        """
        if backend not in self.quantized:
            return "-"
        if operator in FOLDED:
            return "folded"
        if operator in find_backends()[backend].dynamic_operators:
            return "dynamic"
        if operator not in self.quantized[backend]:
            return "float"
        count = self.operators.get(operator, 0)
        left = self.left.get(operator, 0)
        if not left or backend in self.converted:
            return "8 bits"
        return f"8 bits: {count - left} of {count}" if left < count else "float"


def summarize(
    path: Path, cache_root: Path, config: ModelConfig | None = None, sample: Sample = None
) -> Summary:
    """Read a network's file or folder.

    Args:
        config: the settings of the network; None: of its file alone.
        sample: a sample [1, ...], for files that do not declare the inputs.

    Raises:
        ModelError: not a model, unsafe, or nothing to quantize.
    """
    config = config or ModelConfig()
    file_format = None if config.module else formats.find_format(path)
    if file_format is None and config.module is None:
        raise ModelError(f"model.path: {path} is not a model; {formats.EXPECTED}")
    words = file_format.takes.split(" ", 1)[1] if file_format else f"torch module {config.module}"
    proto = _export(path, cache_root, config, sample)
    graph = proto.graph
    static = static_tensors(proto.graph)
    computing = [node.op_type for node in graph.node if not static.issuperset(node.output)]
    contract = read_contract(graph)
    left = [n.op_type for n in left_by_attention(graph) if not static.issuperset(n.output)]
    final = Links(graph).producers.get(graph.output[0].name)

    # The backends that take the network
    format_name = file_format.name if file_format else ""
    dtypes = [tensor.dtype for tensor in contract.inputs]
    converted = []
    quantized = {}
    for backend in with_known_operators():
        if format_name in backend.converts:
            converted.append(backend.name)
        if _takes(dtypes, backend, backend.name in converted):
            quantized[backend.name] = backend.find_operators()
    return Summary(
        path=path,
        format=words,
        contract=contract,
        opset=opset(proto),
        operators=dict(Counter(computing).most_common()),
        layers=sum(1 for _ in gate.find_weights(graph)),
        depthwise=sum(map(is_grouped, graph.node)),
        parameters=sum(math.prod(t.dims) for t in find_all(graph, onnx.TensorProto)),
        quantized=quantized,
        final="" if final is None else final.op_type,
        converted=tuple(converted),
        left=dict(Counter(left)),
        inner_layers=dict(Counter(gate.find_inner_layers(graph))),
    )


def load_graph(path: Path, cache_root: Path, config: ModelConfig | None = None) -> onnx.GraphProto:
    """Return the graph of a network's file, exported to ONNX.

    Raises:
        ModelError: not a model, or unsafe.
    """
    return _export(path, cache_root, config or ModelConfig(), None).graph


@dataclass(frozen=True)
class NetworkFile:
    """The located file of a network, or the weights of a module; read only if a step asks for it.

    Reading takes a second. The inputs of a module are unknown until a run has samples.
    """

    path: Path
    config: ModelConfig
    cache_root: Path

    @classmethod
    def find(cls, config: ModelConfig, data_name: str, cache_root: Path) -> "NetworkFile":
        """Locate the network, see `network_path.locate`; its path becomes part of the settings."""
        path = locate(config, data_name)
        named = config if config.module is not None else replace(config, path=str(path))
        return cls(path, named, cache_root)

    @cached_property
    def sha256(self) -> str:
        """The hash of all sources of the network."""
        return digest(self.config, self.path)

    @property
    def format(self) -> str:
        """The name of its format; `module` for a module."""
        return formats.format_name(self.path, self.config.module is not None)

    @cached_property
    def contract(self) -> Contract:
        """The inputs and outputs; raises `ModelError`: not a model, or unsafe."""
        if self.config.module is not None:
            return Contract((), ())
        return read_contract(load_graph(self.path, self.cache_root, self.config))

    def find_picture_size(self) -> tuple[int, int] | None:
        """Return height and width of the input pictures; None if free, or not of pictures."""
        return picture_size(self.contract, self.config.inputs or {})

    def find_input_names(self) -> list[str]:
        """Return the names of the inputs."""
        return [tensor.name for tensor in self.contract.inputs]


def _export(path: Path, cache_root: Path, config: ModelConfig, sample: Sample) -> onnx.ModelProto:
    is_module = config.module is not None  # the user's own code, which may download
    name = formats.format_name(path, is_module)
    key: cache.Key = {
        "model": digest(config, path),
        "format": name,
        "shape": "" if sample is None or not is_module else f"{sample.shape} {sample.dtype}",
        "code": code.behind(__name__),
        **machine.versions(),
    }

    def make(folder: Path) -> None:
        crashed = ModelError(f"{path}: {CRASHED}")
        arguments = path, name, sample if is_module else None, config
        with waiting("Reading the network"):
            exported = isolation.call(
                _read, *arguments, crashed=crashed, network=is_module, seconds=MAX_SECONDS
            )
        (folder / "network.onnx").write_bytes(exported)

    return onnx.load(cache.entry(cache_root, "inspections", key, make) / "network.onnx")


def _read(path: Path, name: str, sample: Sample, config: ModelConfig) -> bytes:
    """Return the graph with inferred shapes; an ONNX file is not converted."""
    import warnings

    warnings.simplefilter("ignore")  # TensorFlow's and tf2onnx's own deprecations
    with errors_as(ModelError, f"{path}: cannot be read"):
        if name == "onnx":
            proto = read_graph(path, config.inputs or {}).proto
        else:
            proto = read_network(path, sample, replace(config, inputs=None)).proto
        return bytes(onnx.shape_inference.infer_shapes(proto).SerializeToString())


def with_known_operators() -> list[Backend]:
    """Return the backends whose operators are known, in the order of tables."""
    return [backend for backend in find_backends().values() if backend.operators]


def _takes(dtypes: Sequence[str], backend: Backend, converted: bool) -> bool:
    """Return whether a backend takes inputs of these dtypes; its own converter takes any dtype."""
    single = dtypes == ["float32"] or (converted and len(dtypes) == 1)
    return single or not backend.single_input


def requirements(summary: Summary) -> list[str]:
    """Return the requirements for a run with the network, one text for each."""
    contract = summary.contract
    lines = [f"samples that are {_describe(tensor)}" for tensor in contract.inputs]
    if len(contract.inputs) > 1:
        line = "an array for each input (data=arrays, or data=table with data.tokenizer)"
        setting = ask_for_values(contract.inputs[1:])
        same = f", or values that are the same for every sample: {setting}"
        lines.append(line + same if formats.takes_values(summary.path) else line)
    if [value.shape for value in contract.inputs] == [value.shape for value in contract.outputs]:
        lines.append("no labels, or labels of anomalies: input and output have the same shape")
    elif len(contract.outputs) == 1 and len(contract.outputs[0].shape) == 1:
        kind = "probabilities" if summary.final == "Softmax" else "logits or values"
        size = contract.outputs[0].shape[0] or "?"
        lines.append(f"labels of {size} classes, if these are classes: {kind}")
    else:
        lines.append(
            "no labels: its outputs are compared with FP32, value by value; or, if it is a "
            "detector, boxes (data=coco)"
        )

    # What cannot be quantized everywhere
    if recurrent := [name for name in RECURRENT if name in summary.operators]:
        lines.append(f"method=dynamic with backend=onnx, to quantize {', '.join(recurrent)}")
    for name, count in summary.inner_layers.items():
        lines.append(f"an export without {name}, to quantize the {count} layers inside it")
    if contract.batch is not None:
        lines.append(f"batches of {contract.batch}, if this fixed size cannot be freed")
    names = [backend.name for backend in with_known_operators()]
    if missing := [name for name in names if name not in summary.quantized]:
        lines.append(f"another backend than {missing[0]}, which takes one input of float32")
    return lines


def _describe(tensor: Tensor) -> str:
    sizes = ", ".join(map(str, tensor.shape)).replace("None", "any size")
    text = f"[{sizes}] {tensor.dtype}"
    if len(tensor.shape) != 3:
        return text
    colours = {1: "grey", 3: "RGB or BGR"}
    first, second, third = tensor.shape
    for channels, *sides, layout in (
        (first, second, third, "NCHW"),
        (third, first, second, "NHWC"),
    ):
        if channels in colours:
            height, width = (size or "any size" for size in sides)
            kind = f"{height} x {width} in {colours[channels]}"
            return f"{text}, as pictures of {kind} are ({layout})"
    return text


def print_summary(summary: Summary, settings: Sequence[str] = ()) -> None:
    """Print a summary as tables on stdout, then lines about the settings of the run."""
    console = stdout(None, 130)
    say(
        console,
        f"{summary.path}: {summary.format}, opset {summary.opset}, "
        f"{sum(summary.operators.values())} nodes, {summary.layers} layers with weights, "
        f"{summary.parameters:,} parameters",
    )
    tensors = [
        (kind[:-1], tensor.name, str(list(tensor.shape)).replace("None", "?"), tensor.dtype)
        for kind in ("inputs", "outputs")
        for tensor in getattr(summary.contract, kind)
    ]
    print_table(console, ("", "name", "shape (without batch)", "dtype"), tensors)
    backends = [backend.name for backend in with_known_operators()]
    operators = [
        (name, count, *(summary.treatment(name, backend) for backend in backends))
        for name, count in summary.operators.items()
    ]
    print_table(console, ("operator", "nodes", *backends), operators)
    for title, lines in (("It takes:", requirements(summary)), ("With these settings:", settings)):
        if lines:
            say(console, title)
        for line in lines:
            say(console, f"  - {line}")
