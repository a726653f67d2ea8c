"""What a network's file is: inputs, outputs, operators, and what it takes to run it here.

An ONNX file is only parsed; of the other formats the graph is exported first. Both take a process
of their own, and the graph is kept in the cache. Nothing is run or quantized.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import onnx

from resnet8ptq.config.schema import ModelConfig
from resnet8ptq.core import cache, code, isolation, machine
from resnet8ptq.core.errors import ModelError, PtqError
from resnet8ptq.core.text import one_line
from resnet8ptq.graph.layers import RECURRENT, attribute
from resnet8ptq.models import sources
from resnet8ptq.models.batch import static_tensors
from resnet8ptq.models.contract import (
    Contract,
    Tensor,
    ask_for_values,
    picture_size,
    read_contract,
)
from resnet8ptq.models.conversion import CRASHED
from resnet8ptq.models.gates import onnx as gate
from resnet8ptq.models.locate import digest, locate
from resnet8ptq.models.normalization import opset
from resnet8ptq.models.sources import Module, Shape

# What torch's FX quantization and TFLite's converter have integer kernels for, as ONNX calls it.
_SHARED = {
    *("Conv", "Gemm", "Add", "Mul", "Relu", "Clip", "Sigmoid", "LeakyRelu", "Concat", "Flatten"),
    *("MaxPool", "AveragePool", "GlobalAveragePool", "ReduceMean", "Reshape", "Transpose"),
    *("Squeeze", "Unsqueeze"),
}
_TORCH = _SHARED | {"MatMul", "HardSwish", "Elu"}
_TFLITE = _SHARED | {
    *("MatMul", "ConvTranspose", "Sub", "Softmax", "LogSoftmax", "Tanh", "HardSwish", "PRelu"),
    *("Slice", "Split", "Gather", "Pad", "Resize", "ReduceMax", "ReduceSum", "ArgMax"),
    *("DepthToSpace", "SpaceToDepth", "Minimum", "Maximum"),
}
FOLDED = {"BatchNormalization", "Identity", "Dropout"}  # gone before quantization
BACKENDS = ("onnx", "torch", "tflite")
TFLITE_FORMATS = ("keras", "saved_model")  # that its converter takes


@dataclass(frozen=True)
class Inspection:
    """What is known of a network without running it.

    Attributes:
        format: what the file is, as messages call it.
        contract: what it takes and returns; sizes that the file leaves free are None.
        opset: of an ONNX file; of other formats, as exported.
        operators: how often each is in the graph, but for those that shapes are computed by.
        layers: of these, convolutions and matrix products with constant weights.
        depthwise: of the convolutions, those in groups.
        parameters: numbers in the graph, weights and all other constants.
        quantized: the operators that each backend quantizes by default, as far as their names
            tell; the others stay in float, but for those in `FOLDED`. A backend that does not take
            the format is left out.
        final: the operator that makes the first output.
        inner_layers: layers in graphs of other operators, by those (If, Loop): no backend
            quantizes them.
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
    inner_layers: dict[str, int] = field(default_factory=dict)

    def treatment(self, operator: str, backend: str) -> str:
        """Return what a backend makes of an operator.

        `8 bits`, `dynamic` (8 bits with method=dynamic, else float), `float`, `folded` or `-`.
        """
        if backend not in self.quantized:
            return "-"
        if operator in FOLDED:
            return "folded"
        if backend == "onnx" and operator in RECURRENT:
            return "dynamic"
        return "8 bits" if operator in self.quantized[backend] else "float"


def inspect(
    path: Path, cache_root: Path, shape: Shape = None, module: Module | None = None
) -> Inspection:
    """Read a network's file or folder.

    Args:
        shape: of a sample; where the file does not say what the network takes, this does.
        module: the class of a torch network whose weights `path` is.

    Raises:
        ModelError: no model, unsafe, or nothing to quantize.
    """
    found = None if module else sources.find_format(path)
    if found is None and module is None:
        raise ModelError(f"model.path: {path} is not a model; {sources.TAKES}")
    name = found.name if found else "module"
    proto = _export(path, name, cache_root, shape, module)
    graph = proto.graph
    constants = list(gate.find_all(graph, onnx.TensorProto))
    takes = [each for each in BACKENDS if each != "tflite" or name in TFLITE_FORMATS]
    quantized = {backend: quantized_operators(backend) for backend in takes}
    makers = {output: node.op_type for node in graph.node for output in node.output}
    return Inspection(
        path=path,
        format=found.takes.split(" ", 1)[1] if found else f"torch module {module and module.name}",
        contract=read_contract(graph),
        opset=opset(proto),
        operators=dict(Counter(_operators(graph)).most_common()),
        layers=sum(1 for _ in gate.find_weights(graph)),
        depthwise=sum(n.op_type == "Conv" and attribute(n, "group", 1) > 1 for n in graph.node),
        parameters=sum(math.prod(tensor.dims) for tensor in constants),
        quantized=quantized,
        final=makers.get(graph.output[0].name, ""),
        inner_layers=dict(Counter(gate.find_inner_layers(graph))),
    )


def find_picture_size(
    config: ModelConfig, data_name: str, cache_root: Path
) -> tuple[int, int] | None:
    """Return height and width of the pictures that the network takes, before any are read.

    Returns:
        None where it leaves one free or takes no pictures, or where it is a module.

    Raises:
        ModelError: no model, or unsafe.
    """
    if config.module is not None:
        return None
    path = locate(config, data_name)
    found = sources.find_format(path)
    name = found.name if found else ""
    proto = _export(path, name, cache_root, None, None)
    return picture_size(read_contract(proto.graph), config.inputs or {})


def _operators(graph: onnx.GraphProto) -> Iterator[str]:
    static = static_tensors(graph)
    return (node.op_type for node in graph.node if not static.issuperset(node.output))


def _export(
    path: Path, name: str, cache_root: Path, shape: Shape, module: Module | None
) -> onnx.ModelProto:
    config = (
        ModelConfig(module=module.name, module_args=module.arguments) if module else ModelConfig()
    )
    key: cache.Key = {
        "model": digest(config, path),
        "format": name,
        "shape": str(shape) if module else "",
        "code": code.behind(__name__),
        **machine.versions(),
    }

    crashed = ModelError(f"{path}: {CRASHED}")

    def make(folder: Path) -> None:
        network = module is not None  # the user's own code, which may download
        exported = isolation.call(
            _read, path, name, shape, module, crashed=crashed, network=network
        )
        (folder / "network.onnx").write_bytes(exported)

    return onnx.load(cache.entry(cache_root, "inspections", key, make) / "network.onnx")


def _read(path: Path, name: str, shape: Shape, module: Module | None) -> bytes:
    """Return the graph, with the shapes that follow from it; an ONNX file's as it is."""
    import warnings

    warnings.simplefilter("ignore")  # TensorFlow's and tf2onnx's own deprecations
    try:
        if name == "onnx":
            proto = gate.read(path)
        else:
            proto = sources.read(path, shape if module else None, module).proto
        return bytes(onnx.shape_inference.infer_shapes(proto).SerializeToString())
    except PtqError:
        raise
    except Exception as error:  # TensorFlow's, torch's and ONNX's own
        raise ModelError(f"{path}: cannot be read ({one_line(error)})") from None


def quantized_operators(backend: str) -> frozenset[str]:
    """Return the operators that a backend has integer kernels for, as ONNX calls them."""
    if backend != "onnx":
        return frozenset({"torch": _TORCH, "tflite": _TFLITE}[backend])
    from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

    return frozenset({*QDQRegistry, *QLinearOpsRegistry})


def needs(inspection: Inspection) -> list[str]:
    """Return what running a network here takes, a sentence each."""
    contract = inspection.contract
    found = [f"samples that are {_describe(each)}" for each in contract.inputs]
    if len(contract.inputs) > 1:
        asked = ask_for_values(contract.inputs[1:])
        found.append(f"one input, and values for the others, the same for every sample: {asked}")
    if [each.shape for each in contract.inputs] == [each.shape for each in contract.outputs]:
        found.append("no labels, or of anomalies: it returns the shape that it takes")
    elif len(contract.outputs) == 1 and len(contract.outputs[0].shape) == 1:
        kind = "probabilities" if inspection.final == "Softmax" else "logits or values"
        size = contract.outputs[0].shape[0] or "?"
        found.append(f"labels of {size} classes, if these are classes: {kind}")
    else:
        found.append(
            "no labels: what it returns is compared with FP32, value by value; or, if it is a "
            "detector, boxes (data=coco)"
        )
    if recurrent := [name for name in RECURRENT if name in inspection.operators]:
        found.append(f"method=dynamic with backend=onnx, to quantize {', '.join(recurrent)}")
    for name, count in inspection.inner_layers.items():
        found.append(f"an export without {name}, to quantize the {count} layers inside it")
    if contract.batch is not None:
        found.append(f"batches of {contract.batch}, if this fixed size cannot be freed")
    if missing := [backend for backend in BACKENDS if backend not in inspection.quantized]:
        found.append(f"another backend than {missing[0]}, which does not take this format")
    return found


def _describe(tensor: Tensor) -> str:
    sizes = ", ".join(map(str, tensor.shape)).replace("None", "any size")
    text = f"[{sizes}] {tensor.dtype}"
    if len(tensor.shape) != 3:
        return text
    colours = {1: "grey", 3: "RGB or BGR"}
    for channels, plane in ((tensor.shape[0], tensor.shape[1:]), (tensor.shape[2], tensor.shape)):
        if channels in colours:
            height, width = (size or "any size" for size in plane[:2])
            layout = "NCHW" if plane is not tensor.shape else "NHWC"
            return (
                f"{text}, as pictures of {height} x {width} in {colours[channels]} are ({layout})"
            )
    return text


def print_inspection(inspection: Inspection, settings: Sequence[str] = ()) -> None:
    """Print what was found, as tables on stdout.

    Args:
        settings: what is to be said of those of the run.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    say = partial(console.print, soft_wrap=True)
    say(
        Text(
            f"{inspection.path}: {inspection.format}, opset {inspection.opset}, "
            f"{sum(inspection.operators.values())} nodes, {inspection.layers} layers with weights, "
            f"{inspection.parameters:,} parameters"
        )
    )
    tensors = Table("", "name", "shape (without batch)", "dtype")
    for kind in ("inputs", "outputs"):
        for tensor in getattr(inspection.contract, kind):
            shape = str(list(tensor.shape)).replace("None", "?")
            tensors.add_row(kind[:-1], Text(tensor.name), Text(shape), tensor.dtype)
    console.print(tensors)
    operators = Table("operator", "nodes", *BACKENDS)
    for name, count in inspection.operators.items():
        treated = (inspection.treatment(name, backend) for backend in BACKENDS)
        operators.add_row(Text(name), str(count), *treated)
    console.print(operators)
    for title, lines in (("It takes:", needs(inspection)), ("With these settings:", settings)):
        if lines:
            console.print(title)
        for line in lines:
            say(Text(f"  - {line}"))
