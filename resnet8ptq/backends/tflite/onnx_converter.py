"""Converts an ONNX graph to a float .tflite file, by onnx2tf in a separate environment.

The inputs and outputs of the file have the graph's shapes, with batch size 1. Inside the file,
onnx2tf moves the channels to the last axis; the transpositions that it adds remain in the file.
"""

import itertools
import logging
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from resnet8ptq.backends.tflite import contents, environment, predictor
from resnet8ptq.core import cache, confinement, files, isolation
from resnet8ptq.core.console import waiting
from resnet8ptq.core.errors import ParityError, UnsupportedError, errors_as
from resnet8ptq.core.machine import Runtime
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.links import input_names
from resnet8ptq.graph.passes import (
    Writer,
    input_of,
    remove_unused,
    rename,
    replace_node,
    rewrite,
    values_of,
)
from resnet8ptq.graph.session import open_runner
from resnet8ptq.models.batch_axis import in_full_batches
from resnet8ptq.models.conversion import PARITY_BYTES, compare_outputs
from resnet8ptq.models.model import Fp32Model

log = logging.getLogger(__name__)

FILE = "float.tflite"
PARITY_SAMPLES = 100

# onnx2tf derives the name of its file from that of the source
_SOURCE = "network.onnx"
_WRITTEN = "network_float32.tflite"
_CODE = (
    "import sys, onnx2tf\n"
    "source, folder, *inputs = sys.argv[1:]\n"
    "onnx2tf.convert(input_onnx_file_path=source, output_folder_path=folder,"
    " keep_shape_absolutely_input_names=inputs, tflite_backend='flatbuffer_direct',"
    " verbosity='error', non_verbose=True)\n"
)


def check_input(model: Fp32Model) -> None:
    """Raise `UnsupportedError` unless the only input is float32 with fixed sizes.

    The batch size must be free or 1; `prepare_graph` sets it to 1.
    """
    contract = model.contract
    [tensor] = contract.inputs
    if None in tensor.shape:
        raise UnsupportedError(
            f"backend=tflite: got input {tensor} with a free size, expected fixed sizes; try "
            "backend=onnx"
        )

    # The files of onnx2tf take one sample of floats
    if tensor.dtype != "float32" or contract.batch not in (None, 1):
        got = tensor.dtype
        if tensor.dtype == "float32":
            got = f"{contract.batch} samples"
        raise UnsupportedError(
            f"backend=tflite: got {got} for input {tensor.name}, expected one sample of float32; "
            "try backend=onnx"
        )


def convert(model: Fp32Model, samples: Split, runtime: Runtime) -> bytes:
    """Return the network as the content of a float .tflite file; the cache keeps it.

    Args:
        samples: samples on which the file must return the network's outputs; up to
            `PARITY_SAMPLES` of them are compared.

    Raises:
        UnsupportedError: onnx2tf cannot be installed or cannot convert the network, its file
            returns different outputs, or `check_input` refuses the input.
        QuantizationError: see `environment.find_interpreter`.
        ConfigError: see `cache.entry`.
    """
    check_input(model)
    key: cache.Key = {"network": files.sha256(model.onnx_path), **cache.made_with(__name__)}

    def make(folder: Path) -> None:
        failed = f"backend=tflite: {environment.CONVERTER} cannot convert the network"
        with errors_as(UnsupportedError, failed):
            graph = prepare_graph(onnx.load(model.onnx_path))
            written = _call(graph, runtime.cache_root)

            # The file must return the network's outputs, in the network's order of axes
            affordable = max(PARITY_BYTES // samples.sample_bytes, 1)
            count = min(PARITY_SAMPLES, affordable, len(samples))
            batch = np.concatenate([*samples.take(np.arange(count)).batches(count)])
            run = in_full_batches(open_runner(str(model.onnx_path)), model.contract.batch)
            try:
                content = _check(written, expected=run(batch), batch=batch, final=model.final)
            except ParityError as error:
                raise UnsupportedError(f"backend=tflite: {error}") from None
        (folder / FILE).write_bytes(content)

    entry = cache.entry(runtime.cache_root, kind="tflite", key=key, make=make)
    return (entry / FILE).read_bytes()


def prepare_graph(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph with batch size 1, dense layers, and inputs and outputs whose names stay.

    The function changes `proto`, which must not be used afterwards.
    """
    graph = proto.graph
    default = [entry for entry in proto.opset_import if not entry.domain]
    del proto.opset_import[:]
    proto.opset_import.extend(default)  # onnx2tf refuses others, even unused
    del graph.value_info[:]

    # onnx2tf would change other names, and with them the input's layout
    names: dict[str, str] = {}
    for value in (*graph.input, *graph.output):
        # The first axis is the batch
        value.type.tensor_type.shape.dim[0].dim_value = 1
        plain = re.sub(r"\W", "_", value.name)
        while plain in names.values():
            plain += "_"
        names[value.name] = plain
    inferred = onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
    return rewrite(inferred, [rename(names), _to_dense_layers, remove_unused])


def _to_dense_layers(model: ir.Model) -> None:
    """Turn each MatMul with a constant matrix on the right into a Gemm between two Reshapes.

    A MatMul would become TFLite's matrix product, which has one scale for all channels and no bias.
    A Gemm becomes TFLite's dense layer, which can have a scale for each channel and a bias. If the
    MatMul's only reader is an Add of a constant [channels], the Gemm includes it. Inner graphs stay
    unchanged.
    """
    for node in list(model.graph):
        if node.op_type != "MatMul":
            continue
        weights = input_of(node, 1)
        if not weights.is_initializer() or values_of(weights).ndim != 2:
            continue

        # An Add of a vector becomes the bias
        channels, length = values_of(weights).shape
        last = node
        bias = list[ir.Value]()
        add = _only_reader(node)
        if add is not None and add.op_type == "Add" and add.graph is model.graph:
            bias = _find_vectors(add, length)
            last = add if bias else node
        [output] = last.outputs

        # A Gemm takes rows; after a loop, the batch size is not inferred
        shape = []
        for size in output.shape or ():
            shape.append(size if isinstance(size, int) else -1)
        write = Writer(last)
        rows = f"{output.name}__rows"
        product = f"{output.name}__product"
        flat = write.constant(f"{rows}_shape", np.array([-1, channels]))
        whole = write.constant(f"{product}_shape", np.array(shape, np.int64))
        matrix = write("Reshape", [node.inputs[0], flat], rows)
        made = write("Gemm", [matrix, weights, *bias], product)
        name = str(output.name)
        replace_node(last, write("Reshape", [made, whole], name, f"{name}__shape"))


def _only_reader(node: ir.Node) -> ir.Node | None:
    """Return the only node that reads a node's first output.

    Returns None if no node or several nodes read the output, or if the graph returns it.
    """
    readers = node.outputs[0].consumers()
    if node.outputs[0].is_graph_output() or len(readers) != 1:
        return None
    return readers[0]


def _find_vectors(node: ir.Node, length: int) -> list[ir.Value]:
    """Return the constant inputs of a node that are vectors of this length."""
    vectors = []
    for value in node.inputs:
        if value is not None and value.is_initializer() and values_of(value).shape == (length,):
            vectors.append(value)
    return vectors


def _call(proto: onnx.ModelProto, cache_root: Path) -> bytes:
    """Return the content of onnx2tf's file for a graph, made in a separate process by `_run`."""
    python = environment.find_interpreter(cache_root)
    if not confinement.limits_writes():
        log.warning("the converter can write files elsewhere: the kernel has no Landlock")
    name = environment.CONVERTER
    crashed = UnsupportedError(f"backend=tflite: {name} ended while it converted the network")
    inputs = input_names(proto.graph)
    with waiting(f"Converting by {name}"):
        content = proto.SerializeToString()
        return isolation.call(_run, python, content, inputs, crashed=crashed)


def _run(python: Path, content: bytes, inputs: Sequence[str]) -> bytes:
    """Return the content of the file that onnx2tf makes of an ONNX file's content.

    Where the kernel has Landlock, onnx2tf can write to its temporary folder only.

    Args:
        python: the interpreter of onnx2tf's environment.
        inputs: names of the network's inputs, whose shapes stay.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parent = os.getpid()
        source = folder / _SOURCE
        source.write_bytes(content)

        def confine() -> None:
            confinement.die_with(parent)
            confinement.write_only_to(folder)

        # Run the converter in its own environment, and read the file that it writes
        here = dict.fromkeys(("HOME", "TMPDIR"), name)  # libraries write files there
        words = [str(python), "-I", "-c", _CODE, str(source), name, *inputs]
        done = environment.run_program(words, env=here, before=confine)
        written = folder / _WRITTEN
        if done.returncode or not written.is_file():
            raise UnsupportedError(
                f"backend=tflite: {environment.CONVERTER} cannot convert the network "
                f"({environment.last_line(done)}); try backend=onnx"
            )
        return written.read_bytes()


def _check(
    content: bytes, expected: Sequence[NDArray[Any]], batch: NDArray[Any], final: str
) -> bytes:
    """Return the file with its outputs in the network's order of axes.

    Args:
        expected: the network's outputs [n, ...] for `batch`.
        final: see `Fp32Model.final`.

    Raises:
        ParityError: the file returns different outputs, or another number of them.
    """
    label = environment.CONVERTER
    run = predictor.open_run(content, 1)
    some = run(batch[:1])
    if len(some) != len(expected):
        raise ParityError(f"{label}: returns {len(some)} outputs, the network {len(expected)}")

    # onnx2tf may return an output with its channels on the last axis
    model = contents.read_model(content)
    for number, (output, wanted) in enumerate(zip(some, expected, strict=True)):
        axes = _find_axes(output, wanted[:1])
        if axes is not None and axes != tuple(range(output.ndim)):
            contents.transpose_output(model, number, axes)
    aligned = contents.write_model(model)
    outputs = list(predictor.open_run(aligned, 1)(batch))
    compare_outputs(outputs, expected=list(expected), final=final, label=label)
    return aligned


def _find_axes(output: NDArray[Any], wanted: NDArray[Any]) -> tuple[int, ...] | None:
    """Return the permutation of axes that brings an output closest to `wanted`.

    Returns None if no permutation has the shape of `wanted`.
    """
    nearest: tuple[int, ...] | None = None
    least = np.inf
    for axes in itertools.permutations(range(output.ndim)):
        moved = output.transpose(axes)
        if moved.shape != wanted.shape:
            continue
        distance = np.abs(moved - wanted).max(initial=0)
        if nearest is None or distance < least:
            nearest = axes
            least = distance
    return nearest
