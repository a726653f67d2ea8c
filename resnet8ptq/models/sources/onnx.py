"""An ONNX file as the source of the FP32 network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from resnet8ptq.core.errors import ModelError, errors_as
from resnet8ptq.core.records import feed
from resnet8ptq.graph.passes import name_inner_tensors, remove_unused, rewrite
from resnet8ptq.graph.session import Runner, open_session, session_inputs
from resnet8ptq.models import batch_first, branches, normalization, past_tokens, widening
from resnet8ptq.models.batch_axis import in_full_batches
from resnet8ptq.models.contract import (
    INPUT_DTYPES,
    Tensor,
    ask_for_values,
    is_scalar,
    read_contract,
)
from resnet8ptq.models.gates import onnx as gate
from resnet8ptq.models.sources.contract import Network, Sample, is_record
from resnet8ptq.models.sources.formats import takes_values


def read(source: Path, sample: Sample, inputs: Mapping[str, Any] | None = None) -> Network:
    """Read an ONNX file.

    Args:
        sample: a sample, if there is one; only a record can fill several inputs.
        inputs: constant values of inputs by name, such as the size of pictures; values may lack the
            first axes of the input, such as the batch axis.

    Raises:
        ModelError: see `read_graph` and `to_supported`; or ONNX Runtime cannot run the file.
    """
    graph = read_graph(source, inputs or {})
    converted = to_supported(graph.proto, source, sample)
    with errors_as(ModelError, f"{source}: ONNX Runtime cannot run it"):
        predict = _open_original(graph.original, graph.moved)
    fixed = read_contract(converted.graph).batch
    return Network(
        proto=converted,
        predict=in_full_batches(predict, fixed),
        source_opset=normalization.opset(graph.proto),
        moved=graph.moved,
        original_dtype=graph.original_dtype,
        emptied=graph.emptied,
    )


def check(source: Path, inputs: Mapping[str, Any] | None = None) -> None:
    """Refuse a file that `read_graph` or ONNX Runtime refuses.

    Raises:
        ModelError: the file is refused.
    """
    graph = read_graph(source, inputs or {})
    with errors_as(ModelError, f"{source}: ONNX Runtime cannot run it"):
        _open_original(graph.original, graph.moved)


@dataclass(frozen=True)
class ReadGraph:
    """The graph of a file, before it is normalized.

    Attributes:
        proto: the graph, with the batch axis of the inputs in `moved` in front. Each If whose
            condition is constant is replaced by the branch that it takes.
        original: the model that runs for comparison, serialized.
        moved, original_dtype, emptied: see `Network`.
    """

    proto: onnx.ModelProto
    original: bytes
    moved: dict[str, int]
    original_dtype: str
    emptied: list[str]


def read_graph(source: Path, inputs: Mapping[str, Any]) -> ReadGraph:
    """Read the graph of a file.

    Raises:
        ModelError: see `gates.onnx.read_onnx` and `check_layers`; or `inputs` are wrong, or every
            output depends on an ArrayFeatureExtractor.
    """
    proto = gate.read_onnx(source)
    if any(node.op_type in gate.LABELLERS for node in proto.graph.node):
        normalization.keep_scores(proto.graph)
        if not proto.graph.output:
            raise ModelError(
                f"{source}: every output follows an ArrayFeatureExtractor, scikit-learn's "
                "selection of features; expected the selected features as input"
            )
        proto = rewrite(proto, [remove_unused])
    proto = name_inner_tensors(proto)
    for name, values in inputs.items():
        _fix_input(proto.graph, name, values)
    emptied = past_tokens.remove_past(proto.graph)

    # Keep the original, whose outputs are compared
    operators = {node.op_type for node in proto.graph.node}
    original = proto.SerializeToString()
    axes = batch_first.find_inputs(proto.graph)
    original_dtype = ""
    if "Cast" in operators:
        proto = rewrite(proto, [normalization.cast_constants])
    dtype = widening.find_dtype(proto)
    if dtype is not None:
        original_dtype = gate.type_name(dtype)
        proto = widening.to_float32(proto, dtype)
        original = proto.SerializeToString()

    # Make the graph to quantize, with basic operators, decided branches, and the batch axis first
    if gate.SCALER in operators:
        proto = rewrite(proto, [normalization.write_scalers])
    if "Einsum" in operators:
        proto = normalization.store_and_write_products(proto)
    proto = branches.take_branches(proto)
    gate.check_layers(proto, source)
    if axes:
        proto = rewrite(proto, [partial(batch_first.move_inputs, axes=axes)])
    return ReadGraph(proto, original, axes, original_dtype, emptied)


def _open_original(original: bytes, axes: Mapping[str, int]) -> Runner:
    """Load the original as a function of samples whose batch axis is the first.

    Args:
        axes: the batch axis of inputs in the original, by name, if it is not the first.
    """
    session = open_session(original, 0, spins=False, without=[normalization.PAD_FUSION])
    names = session_inputs(session)

    def run(batch: NDArray[Any]) -> list[NDArray[Any]]:
        arrays = {}
        for name, values in feed(batch, names).items():
            if name in axes:
                values = np.moveaxis(values, 0, axes[name])
            arrays[name] = np.ascontiguousarray(values)
        return list(session.run(None, arrays))

    return run


def _fix_input(graph: onnx.GraphProto, name: str, values: Any) -> None:
    """Give an input constant values, in place.

    Raises:
        ModelError: there is no such input, or the values are not finite numbers, do not fit its
            dtype, or have more axes than the input.
    """
    inputs = {value.name: value for value in gate.graph_inputs(graph)}
    if name not in inputs:
        names = ", ".join(inputs)
        raise ModelError(f"model.inputs: got {name!r}, expected {names}")
    declared = inputs[name].type.tensor_type
    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(declared.elem_type)
        constant = np.array(values, dtype)
        if not np.isfinite(constant.astype(np.float64)).all():
            raise ValueError("not finite")
        # NumPy cuts 2.5 to the integer 2
        exact = np.array(values, np.float64)
        if constant.dtype.kind in "iub" and not np.array_equal(constant, exact):
            raise ValueError("not whole")
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ModelError(f"model.inputs.{name}: got {values}, expected numbers") from None

    # Spread the values over the declared shape, if they fit it
    sizes = [dim.dim_value or 1 for dim in declared.shape.dim]  # a free size counts as 1
    missing = len(sizes) - constant.ndim
    if missing < 0:
        raise ModelError(f"model.inputs.{name}: got {values}, expected at most the axes of {name}")
    constant = constant.reshape((1,) * missing + constant.shape)
    if all(size in (1, have) for size, have in zip(constant.shape, sizes, strict=True)):
        constant = np.broadcast_to(constant, sizes)
    graph.initializer.append(numpy_helper.from_array(constant, name))


def to_supported(proto: onnx.ModelProto, source: Path, sample: Sample) -> onnx.ModelProto:
    """Return a normalized copy of a graph, converted to a supported opset.

    Readers of all formats but Keras call this, so that later steps do not depend on the format;
    tf2onnx writes a Keras model in a supported opset.

    Raises:
        ModelError: weights of a layer have NaN or infinity, or an input is a single number; or see
            `raise_opset`, `read_contract` and `check_inputs`.
    """
    for _, weights in gate.find_weights(proto.graph):
        if not np.isfinite(numpy_helper.to_array(weights)).all():
            raise ModelError(f"{source}: NaN or infinity in {weights.name!r}")
    converted = normalization.normalize(normalization.raise_opset(proto, source))
    inputs = read_contract(converted.graph).inputs
    check_inputs(inputs, source, sample)

    # Samples cannot fill an input without a batch axis
    for value, tensor in zip(converted.graph.input, inputs, strict=True):
        if is_scalar(value):
            mend = ""
            if takes_values(source):
                mend = f", or its value: {ask_for_values([tensor])}"
            raise ModelError(
                f"{source}: its input {tensor.name} is a single number; expected an input with a "
                f"batch axis{mend}"
            )
    return converted


def check_inputs(inputs: Sequence[Tensor], source: Path, sample: Sample) -> None:
    """Check that samples can fill the inputs.

    Raises:
        ModelError: the samples are one array and the network does not have exactly one input, or
            the dtype of an input is not one of `INPUT_DTYPES`.
    """
    if len(inputs) != 1 and sample is not None and not is_record(sample):
        mend = ask_for_values(inputs, "data.inputs")
        if takes_values(source):
            mend += f", or one, and values for the others: {ask_for_values(inputs[1:])}"
        raise ModelError(
            f"{source}: has {len(inputs)} inputs ({', '.join(map(str, inputs))}), and the samples "
            f"are one array; expected an array for each (data=arrays), {mend}"
        )
    for tensor in inputs:
        if tensor.dtype not in INPUT_DTYPES:
            raise ModelError(
                f"{source}: its input {tensor.name} is {tensor.dtype}; expected "
                f"{', '.join(INPUT_DTYPES)}"
            )
