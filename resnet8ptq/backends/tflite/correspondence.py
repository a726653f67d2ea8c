"""Maps the tensors of a converted .tflite file to those of the ONNX graph, by their values.

Converters rename, transpose and reshape tensors, and fuse operators. The range of a tensor does not
depend on the order of its values, so two tensors match if they have the same values in any order.
The sorted values are compared at 65 positions.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from resnet8ptq.backends.tflite.predictor import open_interpreter
from resnet8ptq.graph.layers import float_inputs, float_tensors
from resnet8ptq.graph.session import expose, open_runner

SAMPLES = 4
TOLERANCE = 1e-3  # fraction of the largest value, as kernels sum in different orders

_POINTS = np.linspace(0, 1, 65)  # positions among a tensor's sorted values
_TIE = 1e-6  # fraction of the largest value

# For each tensor and sample: the number of values, then the sorted values at `_POINTS`.
Sketches = dict[Any, list[NDArray[np.float64]]]


def find_onnx_names(content: bytes, onnx_path: Path, batch: NDArray[Any]) -> dict[int, list[str]]:
    """Return the ONNX names of a file's float tensors, by their index in the file.

    A tensor has several names, in graph order, if several ONNX tensors have its values, such as
    before and after a Reshape. A tensor whose values no ONNX tensor has is left out.

    Args:
        content: a float file for one sample at a time.
        batch: network inputs [n, ...]; more samples distinguish more tensors.
    """
    graph = _of_graph(onnx_path, batch)
    names_of = {}
    for index, sketch in _of_file(content, batch).items():
        names = _nearest(sketch, graph)
        if names:
            names_of[index] = names
    return names_of


def _nearest(sketch: list[NDArray[np.float64]], known: Sketches) -> list[str]:
    """Return the names of the nearest tensors, ties included; empty if none is near enough.

    Args:
        sketch: the sketches of a tensor of the file, one for each sample.
        known: the sketches of the graph's tensors.
    """
    size = sketch[0][0]
    wanted = np.stack(sketch)[:, 1:]  # [samples, positions]
    scale = np.abs(wanted).max() or 1.0
    distances = {}
    for name, other in known.items():
        if other[0][0] == size:
            values = np.stack(other)[:, 1:]
            distances[name] = float(np.abs(values - wanted).max() / scale)

    # Tensors that differ by less than kernels do are ties
    nearest = min(distances.values(), default=np.inf)
    if not nearest <= TOLERANCE:
        return []
    return [name for name, distance in distances.items() if distance <= nearest + _TIE]


def _of_graph(onnx_path: Path, batch: NDArray[Any]) -> Sketches:
    proto = onnx.load(onnx_path)
    inputs = float_inputs(proto.graph)
    names = float_tensors(proto)
    run = open_runner(expose(proto, names), 1)

    # Run sample by sample, as the file does
    sketches: Sketches = {}
    for number in range(len(batch)):
        sample = batch[number : number + 1]
        for name, values in zip([*inputs, *names], [sample, *run(sample)], strict=True):
            _add(sketches, name, values)
    return sketches


def _of_file(content: bytes, batch: NDArray[Any]) -> Sketches:
    interpreter = open_interpreter(content, 1, keeps_all=True)
    [input_] = interpreter.get_input_details()

    # The tensors of the file are named by their index
    floats = []
    for tensor in interpreter.get_tensor_details():
        if tensor["dtype"] == np.float32:
            floats.append(tensor["index"])

    # Read all tensors after each sample
    sketches: Sketches = {}
    for number in range(len(batch)):
        interpreter.set_tensor(input_["index"], batch[number : number + 1])
        interpreter.reset_all_variables()  # recurrent operators keep their state
        interpreter.invoke()
        for index in floats:
            _add(sketches, index, interpreter.get_tensor(index))
    return sketches


def _add(sketches: Sketches, name: Any, values: NDArray[Any]) -> None:
    """Add the sketch of a tensor's values on a sample; an empty tensor has none."""
    if values.size:
        positions = np.rint(_POINTS * (values.size - 1)).astype(int)
        points = np.sort(values, axis=None)[positions]
        sketches.setdefault(name, []).append(np.array([values.size, *points], np.float64))
