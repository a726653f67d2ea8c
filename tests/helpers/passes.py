"""Every pass of the package that rewrites an ONNX graph, and small graphs that are hard to rewrite.

A new pass gets an entry in `PASSES`; `tests/graph/test_passes.py` walks them.
"""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from resnet8ptq.backends.onnx import dynamic, rewriting, weight_only
from resnet8ptq.backends.onnx.slim import slim
from resnet8ptq.backends.openvino.rewriting import avoid_faults
from resnet8ptq.backends.tflite import onnx_converter
from resnet8ptq.corrections import equalization
from resnet8ptq.graph import passes, session, weights
from resnet8ptq.graph.layers import weight_layers
from resnet8ptq.graph.links import Links
from resnet8ptq.models import batch_axis, branches, folding, normalization
from resnet8ptq.models.sources.onnx import to_supported
from resnet8ptq.precision.plan import Selection

SAMPLES = np.random.default_rng(0).normal(size=(8, 4, 6, 6)).astype(np.float32)
Proto = onnx.ModelProto


@dataclass(frozen=True)
class Traits:
    """The unusual parts of a graph.

    Attributes:
        inner: the operator with an inner graph: `If`, `Loop`, `Scan`; or empty.
        reads: the outer tensor that the inner graph reads.
        shadowing: whether the inner graph has a tensor with the name of an outer one.
        outputs: tensors that are outputs of the graph, and have another reader.
        constant_output: whether the weights of the last layer are an output too.
        shared: whether two convolutions share weights and bias.
        product: the last layer.
        folds: shape of a constant that is multiplied behind the last layer; None: none.
        final: whether a Softmax follows.
    """

    inner: str
    reads: str
    shadowing: bool
    outputs: tuple[str, ...]
    constant_output: bool
    shared: bool
    product: str
    folds: tuple[int, ...] | None
    final: bool


TRAITS = st.builds(
    Traits,
    inner=st.sampled_from(["", "If", "Loop", "Scan"]),
    reads=st.sampled_from(["first", "w1", "offset", "x"]),
    shadowing=st.booleans(),
    outputs=st.lists(st.sampled_from(["first", "second", "product"]), unique=True).map(tuple),
    constant_output=st.booleans(),
    shared=st.booleans(),
    product=st.sampled_from(["Gemm", "scaled Gemm", "MatMul"]),
    folds=st.sampled_from([None, (), (4,), (1, 4), (4, 1), (1, 1)]),
    final=st.booleans(),
)


def build(traits: Traits) -> Proto:
    """Return a network [N, 4, 6, 6] -> [N, 4, 4], with the tensors that `Traits` names."""
    random = np.random.default_rng(1)
    # Rows of samples have no constant for each.
    rows = [-1, 4, 36] if traits.product == "MatMul" else [-1, 144]
    folds = (1, 4) if traits.folds == (4, 1) and traits.product != "MatMul" else traits.folds
    second = "w1" if traits.shared else "w2"
    constants = {
        "w1": random.normal(size=(4, 4, 1, 1)) * 0.5,
        "b1": random.normal(size=4) * 0.1,
        "w2": random.normal(size=(4, 4, 1, 1)) * 0.5,
        "offset": random.normal(size=(1, 4, 1, 1)),
        "dense": random.normal(size=(rows[-1], 4)) * 0.1,
        "bias": random.normal(size=4) * 0.1,
        "gain": np.array(1.5),
        "scale": random.uniform(0.5, 1, folds or ()),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["first"]),
        helper.make_node("Relu", ["first"], ["relu"]),
        *_around(traits),
        helper.make_node("Conv", ["inner" if traits.inner else "relu", second, "b1"], ["second"]),
        helper.make_node("Add", ["second", "offset"], ["sum"]),
        helper.make_node("Mul", ["sum", "gain"], ["gained"]),
        helper.make_node("Reshape", ["gained", "shape"], ["flat"]),
        *_product(traits),
    ]
    last = "product"
    if folds is not None:
        nodes.append(helper.make_node("Mul", [last, "scale"], ["folded"]))
        last = "folded"
    if traits.final:
        nodes.append(helper.make_node("Softmax", [last], ["probabilities"], axis=-1))
        last = "probabilities"
    if last in traits.outputs:
        nodes.append(helper.make_node("Neg", [last], ["other"]))
        last = "other"
    names = [last, *traits.outputs, *(["dense"] if traits.constant_output else [])]
    stored = [numpy_helper.from_array(v.astype(np.float32), name) for name, v in constants.items()]
    integers = {"shape": rows, "count": [2], "zero": [0]}
    stored += [numpy_helper.from_array(np.array(v, np.int64), name) for name, v in integers.items()]
    stored.append(numpy_helper.from_array(np.array(True), "always"))
    image, scores = ["N", 4, 6, 6], ["N", 4, 4] if traits.product == "MatMul" else ["N", 4]
    sizes = {"first": image, "second": image, "dense": [rows[-1], 4]}
    gives = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes.get(name, scores))
        for name in names
    ]
    takes = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4, 6, 6])]
    graph = helper.make_graph(nodes, "network", takes, gives, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _product(traits: Traits) -> list[onnx.NodeProto]:
    if traits.product == "MatMul":
        return [helper.make_node("MatMul", ["flat", "dense"], ["product"])]
    scaled = {"alpha": 0.5, "beta": 2.0} if traits.product == "scaled Gemm" else {}
    return [helper.make_node("Gemm", ["flat", "dense", "bias"], ["product"], **scaled)]


def _around(traits: Traits) -> list[onnx.NodeProto]:
    """Return the nodes from `relu` to `inner`: relu plus the mean of an outer tensor."""
    own = "gain" if traits.shadowing else "own"
    mean = helper.make_node("ReduceMean", [traits.reads], ["mean"], keepdims=0)
    taken = helper.make_tensor_value_info(own, TensorProto.FLOAT, None)
    free = helper.make_tensor_value_info("given", TensorProto.FLOAT, None)
    if traits.inner == "If":
        half = numpy_helper.from_array(np.array(0.5, np.float32), own)
        steps = [helper.make_node("Add", ["relu", "mean"], ["added"])]
        steps.append(helper.make_node("Mul", ["added", own], ["given"]))
        then = helper.make_graph([mean, *steps], "then", [], [free], [half])
        other = helper.make_graph(
            [helper.make_node("Neg", ["relu"], ["given"])], "else", [], [free]
        )
        return [
            helper.make_node("Sub", ["x", "x"], ["nothing"]),
            helper.make_node("ReduceMean", ["nothing"], ["level"], keepdims=0),
            helper.make_node("Exp", ["level"], ["one"]),
            helper.make_node("Cast", ["one"], ["condition"], to=TensorProto.BOOL),
            helper.make_node("If", ["condition"], ["inner"], then_branch=then, else_branch=other),
        ]
    step = helper.make_node("Add", [own, "mean"], ["given"])
    if traits.inner == "Scan":
        body = helper.make_graph([mean, step], "rows", [taken], [free])
        return [helper.make_node("Scan", ["relu"], ["inner"], body=body, num_scan_inputs=1)]
    if traits.inner == "Loop":
        index = helper.make_tensor_value_info("index", TensorProto.INT64, [])
        going = helper.make_tensor_value_info("going", TensorProto.BOOL, [])
        still = helper.make_tensor_value_info("still", TensorProto.BOOL, [])
        keep = helper.make_node("Identity", ["going"], ["still"])
        ends = [index, going, taken], [still, free]
        body = helper.make_graph([keep, mean, step], "turns", *ends)
        inputs = ["count", "always", "relu"]
        return [helper.make_node("Loop", inputs, ["inner"], body=body)]
    return []


def normalize(raw: Proto) -> Proto:
    """Return a graph as the readers of networks hand it on: normalized, with named nodes."""
    proto = to_supported(passes.name_inner_tensors(copy.deepcopy(raw)), Path("network.onnx"), None)
    normalization.name_nodes(proto.graph)
    return proto


def prepare(traits: Traits) -> Proto:
    """Return the folded network that backends quantize."""
    proto = batch_axis.fix_sizes(normalize(build(traits)), SAMPLES[:1], None)
    normalization.copy_shared_weights(proto.graph)
    return _preprocess(passes.rewrite(proto, [normalization.avoid_quantizer_names]))


def _in_place(change: Callable[[onnx.GraphProto], object]) -> Callable[[Proto], Proto]:
    def run(proto: Proto) -> Proto:
        changed = copy.deepcopy(proto)
        change(changed.graph)
        return changed

    return run


def _whole(change: Callable[[Proto], object]) -> Callable[[Proto], Proto]:
    """Return the result of a pass that changes a model in place, or returns another."""

    def run(proto: Proto) -> Proto:
        changed = copy.deepcopy(proto)
        returned = change(changed)
        return returned if isinstance(returned, Proto) else changed

    return run


def _rewriting(*several: passes.Pass) -> Callable[[Proto], Proto]:
    return lambda proto: passes.rewrite(copy.deepcopy(proto), several)


def _preprocess(proto: Proto) -> Proto:
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "before.onnx"), Path(folder, "after.onnx")
        onnx.save(proto, before)
        failure = folding.fold_batch_norms(before, after).failure
        assert failure is None, failure
        return onnx.load(after)


def _shift_weights(graph: onnx.GraphProto) -> None:
    """Write each layer's own weights and bias again, by the functions of `graph.weights`."""
    links = Links(graph)
    for node in weight_layers(graph).values():
        weights.write_weights(links, node, weights.read_weights(links, node))
        if node.op_type != "MatMul":
            weights.write_bias(links, node, weights.read_bias(links, node))


def _rename_all(proto: Proto) -> Proto:
    graph = proto.graph
    names = [name for node in graph.node for name in (*node.input, *node.output) if name]
    kept = {value.name for value in (*graph.input, *graph.output)}
    renamed = {name: f"{name}_renamed" for name in names if name not in kept}
    return passes.rewrite(proto, [passes.rename(renamed)])


def _products(proto: Proto) -> Proto:
    gemms = {node.name for node in proto.graph.node if node.op_type == "Gemm"}
    return _rewriting(weight_only.write_as_products(gemms))(proto)


# A pass of the name, before or after `normalize`: each takes a model and returns another one.
RAW: dict[str, Callable[[Proto], Proto]] = {
    "passes.name_inner_tensors": _whole(passes.name_inner_tensors),
    "normalization.cast_constants": _rewriting(normalization.cast_constants),
    "normalization.write_scalers": _rewriting(normalization.write_scalers),
    "normalize": normalize,
}
PASSES: dict[str, Callable[[Proto], Proto]] = {
    "branches.take_branches": _whole(lambda p: branches.take_branches(p, _feeds())),
    "batch_axis.fix_sizes": lambda p: batch_axis.fix_sizes(p, SAMPLES[:1], None),
    "dynamic.transpose_weights": _rewriting(dynamic.transpose_weights),
    "equalization.equalize": lambda p: equalization.equalize(p, Selection()),
    "folding.fold_into_layers": _in_place(folding.fold_into_layers),
    "folding.fold_batch_norms": _preprocess,
    "normalization.avoid_quantizer_names": _rewriting(normalization.avoid_quantizer_names),
    "normalization.copy_shared_weights": _in_place(normalization.copy_shared_weights),
    "normalization.simplify_gemms": _in_place(normalization.simplify_gemms),
    "normalization.write_ceil_mode": _whole(normalization.write_ceil_mode),
    "normalization.write_explicitly": _whole(normalization.write_explicitly),
    "normalization.write_paddings": _whole(normalization.write_paddings),
    "onnx_converter._to_dense_layers": lambda p: _whole(onnx_converter.prepare_graph)(_single(p)),
    "openvino.avoid_faults": _whole(avoid_faults),
    "passes.rename": _whole(_rename_all),
    "passes.remove_unused": _rewriting(passes.remove_unused),
    "passes.sort": _rewriting(passes.sort),
    "rewriting.add_readers": _rewriting(rewriting.add_readers),
    "rewriting.keep_sums_apart": _rewriting(rewriting.keep_sums_apart),
    "rewriting.leave_output_in_float": _rewriting(rewriting.leave_output_in_float),
    "rewriting.protect_float_layers": _rewriting(rewriting.protect_float_layers),
    "rewriting.raise_opset_for_bits": _whole(lambda p: rewriting.raise_opset_for_bits(p, 4)),
    "session.end_at_logits": _whole(session.end_at_logits),
    "slim": slim,
    "weight_only.write_as_products": _products,
    "weights.write_weights": _in_place(_shift_weights),
}
# Parts of a graph that run at once and are never written: their outputs have no declared type.
PARTS: dict[str, Callable[[Proto], Proto]] = {
    "session.between": lambda p: session.between(p, "", [v.name for v in p.graph.output]),
    "session.expose": lambda p: session.expose(p, ["relu", "sum"]),
    "session.keep_apart": lambda p: session.keep_apart(p, ["relu", "sum"]),
}


def _feeds() -> list[dict[str, np.ndarray]]:
    return [{"x": np.zeros((size, 4, 6, 6), np.float32)} for size in (1, 2, 3)]


def _single(proto: Proto) -> Proto:
    """Return a graph in which every output has a known shape, for one sample."""
    fixed = batch_axis.fix_sizes(proto, SAMPLES[:1], None)
    return onnx.shape_inference.infer_shapes(fixed)
