"""Converts a network's file to ONNX, and checks that ONNX Runtime agrees with the original.

`check_torch` compares torch separately, because many runs do not use torch.

The conversion runs in a separate process (see `model.load_network`), so that a file that crashes
the converter does not end the main process.
"""

import json
import logging
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from resnet8ptq.config.schema import ModelConfig
from resnet8ptq.core import memory
from resnet8ptq.core.errors import DataError, ModelError, ParityError, PtqError
from resnet8ptq.core.records import feed
from resnet8ptq.core.text import one_line
from resnet8ptq.data.fields import Fields, lengths
from resnet8ptq.data.preprocessing import RAW
from resnet8ptq.data.preprocessing import Preprocessing as Arithmetic
from resnet8ptq.graph.footprint import tensor_bytes
from resnet8ptq.graph.layers import attribute
from resnet8ptq.graph.links import input_names, output_names
from resnet8ptq.graph.passes import rewrite
from resnet8ptq.graph.session import open_runner
from resnet8ptq.models import batch_axis, batch_first, branches, normalization
from resnet8ptq.models.batch_axis import Outputs, Predict
from resnet8ptq.models.contract import (
    Contract,
    SampleArray,
    is_scalar,
    match_samples,
    read_contract,
)
from resnet8ptq.models.folding import Folding, fold_batch_norms
from resnet8ptq.models.sources import read_network, select_outputs
from resnet8ptq.models.sources.contract import Network, is_record
from resnet8ptq.tasks.scoring.outputs import (
    LOGITS,
    PROBABILITIES,
    VALUES,
    as_rows,
    count_scores,
)

log = logging.getLogger(__name__)

PARITY_SAMPLES = 1000
PARITY_BYTES = 2**24  # most bytes of samples to compare: 27 RGB pictures of 224 x 224 in float32
# Largest accepted difference of a probability, or of a logit relative to the largest one
PARITY_TOLERANCE = 1e-4
# The tolerance relative to the largest value. In a detector of 113 convolutions with ten million
# values, rounding to float32 makes 2e-4.
PARITY_TOLERANCE_OF_VALUES = 1e-3
TIE = 1e-6  # in the same unit; top scores that are closer may swap
AT_ONCE = 100  # most samples in a batch, unless the network's batch size is larger

CRASHED = "reading it crashed the converter, or took too much memory or time"

_OTHER_EXPORTER = (
    "; if torch's exporter is the cause, try torch.onnx.export(module, inputs, 'my.onnx', "
    "dynamo=False) and the path of that file"
)
UNFOLDED = "unfolded.onnx"
FOLDED = "folded.onnx"
RECORD = "conversion.json"
TORCH_RECORD = "torch.json"


@dataclass(frozen=True)
class Conversion:
    """The record of a conversion.

    Attributes:
        parity: the result of `compare_outputs`, by framework and file. ONNX Runtime is compared
            with the original, torch with ONNX Runtime.
        source_opset: opset of the original ONNX file, or of the export from another format.
        opset: opset of the unfolded graph.
        contract: inputs and outputs of the unfolded graph.
        final: kind of the outputs, see `find_final`: `probabilities`, `logits` or `values`.
        preprocessing: the effect of folding, or the reason for its failure.
        without_torch: the reason why torch cannot run a file correctly, by the file's name; empty
            before `check_torch`, or if torch can.
        why_fixed: the reason why the batch size stays fixed; None if it or the length of texts is
            free.
        moved, original_dtype, emptied: see `Network`.
    """

    parity: dict[str, float]
    source_opset: int
    opset: int
    contract: Contract
    final: str
    preprocessing: Folding
    without_torch: dict[str, str] = field(default_factory=dict)
    why_fixed: str | None = None
    moved: dict[str, int] = field(default_factory=dict)
    original_dtype: str = ""
    emptied: list[str] = field(default_factory=list)


def read_record(folder: Path) -> Conversion:
    """Return the record that `convert` wrote into `folder`."""
    record = json.loads((folder / RECORD).read_text())
    record["contract"] = read_contract(onnx.load(folder / UNFOLDED).graph)
    record["preprocessing"] = Folding(**record["preprocessing"])
    return Conversion(**record)


def convert(
    source: Path, folder: Path, samples: SampleArray, config: ModelConfig, steps: Arithmetic = RAW
) -> None:
    """Write `unfolded.onnx`, `folded.onnx` and `conversion.json` into `folder`.

    Backends take one of the two graphs; only backend=tflite may take the user's file. `read_record`
    returns the record. If folding fails, `folded.onnx` is missing, and the record has the reason.

    Args:
        folder: an existing, empty folder.
        samples: stored samples [n, ...] on which ONNX Runtime must agree with the original; a
            field of records fills the input of the same name.

    Raises:
        ModelError: the file is not a model, is unsafe, has NaN or infinity in its weights, does not
            fit the samples or `config`, or cannot be converted.
        ParityError: ONNX Runtime disagrees with the original, or the original returns NaN or
            infinity.
        DataError: the samples cannot be prepared.
    """
    warnings.simplefilter("ignore")  # TensorFlow and tf2onnx call deprecated functions
    try:
        network = read_network(source, samples[:1], config)
        if config.outputs:
            network = select_outputs(network, config.outputs)

        # Make network inputs of the samples, by which the graphs are compared
        matched = match_samples(samples, steps, read_contract(network.proto.graph))
        fields = matched.fields
        # Keep whole records, because the length stays that of all samples unless it can be free
        prepared = matched.prepare(samples, steps) if fields is None else fields.whole(samples)
        try:
            _convert_network(network, folder, prepared, fields)
        except ParityError as error:
            why = _explain(network.proto.graph)
            if not why and (config.module or source.suffix == ".pt2"):
                why = _OTHER_EXPORTER
            raise ParityError(f"{error}{why}") from None
    except DataError:
        raise
    except ModelError as error:
        if str(error).startswith((f"{source}: ", "model.")):
            raise error from None
        raise type(error)(f"{source}: {error}") from None
    except Exception as error:  # Keras, tf2onnx, ONNX and onnx2torch have their own types
        raise ModelError(f"{source}: cannot be converted ({one_line(error)})") from None


def _explain(graph: onnx.GraphProto) -> str:
    """Return why the outputs of one sample vary, and the remedy; empty if unknown."""
    for node in graph.node:
        if node.op_type == "BatchNormalization" and attribute(node, "training_mode", 0):
            return (
                f"; its BatchNormalization {node.name} is in training mode, where the batch "
                "changes a sample's outputs; try an export in eval mode"
            )
        if batch_axis.RANDOM.match(node.op_type):
            return (
                f"; its {node.op_type} {node.name} draws other values each time; try an export "
                "without it"
            )
    return ""


def _convert_network(
    network: Network, folder: Path, samples: SampleArray, fields: Fields | None = None
) -> None:
    """Free a network's batch size if possible, and write its files.

    If the outputs differ with a free batch size, the fixed size is tried, if the network has one.

    Args:
        samples: network inputs [n, ...], or whole records if there are `fields`.
    """
    normalization.name_nodes(network.proto.graph)
    normalization.simplify_gemms(network.proto.graph)

    # Find the batch axis first, then the branches that its size decides, then fix all sizes
    network = batch_first.move_outputs(_find_batch(network, samples), samples)
    network = _take_branches(network, samples)
    network, proto, why_fixed = _fix_sizes(network, samples, fields)
    try:
        _write_files(network, proto, why_fixed, folder, samples, fields)
    except ParityError as error:
        fixed = read_contract(network.proto.graph).batch
        if fixed == read_contract(proto.graph).batch:
            raise
        # A sum over the batch, or a branch, may make a difference on later samples only.
        proto = batch_axis.fix_sizes(network.proto, samples[:1], fixed)
        why_fixed = f"with a free batch, {one_line(error)}"
        _write_files(network, proto, why_fixed, folder, samples, fields)


def _write_files(
    network: Network,
    proto: onnx.ModelProto,
    why_fixed: str | None,
    folder: Path,
    samples: SampleArray,
    fields: Fields | None,
) -> None:
    """Write a graph with constant sizes, its folded form if folding works, and the record of both.

    Raises:
        ParityError: see `compare_outputs`, for each of the graphs.
    """
    outputs = output_names(proto.graph)
    without_batch = []  # indices of the outputs to which `fix_sizes` has added a batch axis
    for node in proto.graph.node:
        if node.name.endswith("__batch_axis") and node.output[0] in outputs:
            without_batch.append(outputs.index(node.output[0]))
    if without_batch:
        network = replace(network, predict=batch_axis.one_by_one(network.predict, without_batch))

    # Write both graphs in the form that quantizers need
    normalization.copy_shared_weights(proto.graph)
    proto = rewrite(proto, [normalization.avoid_quantizer_names])
    onnx.save(proto, folder / UNFOLDED)
    preprocessing = fold_batch_norms(folder / UNFOLDED, folder / FOLDED)
    written = [UNFOLDED] if preprocessing.failure else [UNFOLDED, FOLDED]

    # Compare each file with the original
    run = _run_on(samples, proto, fields)
    contract = read_contract(proto.graph)
    expected = run(network.predict)
    final = find_final(expected, samples)
    parity = {}
    for name in written:
        path = folder / name
        label = f"onnx, {path.stem}"
        parity[label] = compare_outputs(run(open_runner(str(path))), expected, final, label)

    record = Conversion(
        parity=parity,
        source_opset=network.source_opset,
        opset=normalization.opset(proto),
        contract=contract,
        final=final,
        preprocessing=preprocessing,
        why_fixed=why_fixed,
        moved=network.moved,
        original_dtype=network.original_dtype,
        emptied=network.emptied,
    )
    (folder / RECORD).write_text(json.dumps(asdict(record), indent=2))


def check_torch(
    path: Path, samples: SampleArray, steps: Arithmetic = RAW, final: str = VALUES
) -> str:
    """Return torch's difference from ONNX Runtime, or why torch cannot run the network correctly.

    The result is JSON with the attribute `parity` or `without_torch` of a `Conversion`.
    """
    proto = onnx.load(path)
    label = f"torch, {path.stem}"
    matched = match_samples(samples, steps, read_contract(proto.graph))
    prepared = matched.prepare(samples, steps)
    run = _run_on(prepared, proto, matched.fields)
    expected = run(open_runner(str(path)))

    # A failure is a result, because other backends can still run
    try:
        outputs = run(_torch_runner(path))
        return json.dumps({"parity": {label: compare_outputs(outputs, expected, final, label)}})
    except ParityError as error:
        reason = f"onnx2torch converts {_name_difference(proto, prepared)} wrongly ({error})"
    except PtqError as error:
        reason = " ".join(str(error).split()).removeprefix(f"{path}: ")[:300]
    except Exception as error:  # onnx2torch's modules may raise anything
        reason = one_line(error)
    return json.dumps({"without_torch": {path.name: reason}})


def _take_branches(network: Network, samples: SampleArray) -> Network:
    """Replace each If by a branch, if its condition is decided and equal for 1, 2 and 3 samples.

    Shapes and constants decide a condition. With a fixed batch size, only batches of this size are
    tried.
    """
    graph = network.proto.graph
    names = input_names(graph)
    fixed = read_contract(graph).batch
    sizes = (1, *batch_axis.SIZES) if fixed is None else (fixed,)
    feeds = [feed(batch_axis.zeros(samples[:1], size), names) for size in sizes]
    proto = branches.take_branches(network.proto, feeds)
    if proto is network.proto:
        return network
    proto = normalization.normalize(proto)
    normalization.name_nodes(proto.graph)
    return replace(network, proto=proto)


def _run_on(
    samples: SampleArray, proto: onnx.ModelProto, fields: Fields | None
) -> Callable[[Predict], Outputs]:
    """Return a function that runs the samples through a network, and returns its outputs.

    The network gets batches of the fixed size of `proto`. If the size is free, the memory budget
    limits it. Texts of free length are sorted by length.
    """
    contract = read_contract(proto.graph)
    longest = None
    cut = None  # drops the padding of a batch
    if fields is not None:
        longest = fields.longest(samples.dtype)
        if any(None in tensor.shape for tensor in contract.inputs):
            # Batch samples of similar length together
            samples = samples[np.argsort(lengths(samples[fields.mask]))]
            cut = fields.cut

    # Keras holds every tensor of a batch until the batch ends, so all of them count.
    of_batch = sum(tensor_bytes(proto, longest).values())
    batch = contract.batch or 1
    at_once = max(batch, min(AT_ONCE, batch * memory.fitting(of_batch, memory.step())))

    def run(predict: Predict) -> Outputs:
        full = batch_axis.in_full_batches(predict, contract.batch)

        def run_cut(batch: SampleArray) -> Outputs:
            if cut is not None:
                batch = cut(batch)
            return full(batch)

        return batch_axis.in_batches(run_cut, samples, at_once)

    return run


def _find_batch(network: Network, samples: SampleArray) -> Network:
    """Fix the batch size at 1 if the file declares it free, but the network fails on two samples.

    Two kinds of outputs also need a batch of 1. A scalar is one number for the whole batch, and the
    size of detections depends on data.
    """
    graph = network.proto.graph
    if read_contract(graph).batch is not None:
        return network
    data_sized = batch_axis.find_data_sized(network.proto)
    if not data_sized and not any(map(is_scalar, graph.output)):
        with suppress(Exception):  # ONNX Runtime raises a dozen types
            network.predict(samples[:2])
            return network  # two samples run, so the batch is free
    for value in graph.input:
        value.type.tensor_type.shape.dim[0].dim_value = 1
    return replace(network, predict=batch_axis.in_full_batches(network.predict, 1))


def _fix_sizes(
    network: Network, samples: SampleArray, fields: Fields | None
) -> tuple[Network, onnx.ModelProto, str | None]:
    """Return the network, its graph with constant sizes, and why the batch size stays fixed.

    The reason is None if the batch size or the length of texts is free. The network's outputs get a
    batch axis where only the outputs of the freed graph have one.

    Raises:
        ModelError: the graph works neither with a free batch size nor with its fixed one.
        Exception: other failures; see `batch_axis.fix_sizes` and `compare_outputs`.
    """
    fixed = read_contract(network.proto.graph).batch
    first = samples[:3]
    if fields is not None and fields.any_length:
        try:
            return network, _free_length(network, samples, fixed, fields), None
        except Exception as error:  # ParityError, or one of ONNX Runtime's dozen types
            log.warning(
                "%s: all samples are padded to the longest one: %s",
                ", ".join(fields.any_length),
                one_line(error),
            )

    # Samples that decide a branch cannot share a batch
    if fixed == 1:
        branch = _find_branch(network.proto.graph)
        if branch:
            proto = batch_axis.fix_sizes(network.proto, samples[:1], fixed)
            return network, proto, f"the sample decides the branch of {branch}"

    # Free the batch if the outputs stay the same; otherwise keep the file's batch size
    try:
        freed = batch_axis.fix_sizes(network.proto, samples[:1], None)
        returned = open_runner(freed)(first)
        with_rows = network
        if fixed == 1:
            with_rows = _keep_rows(network, first, returned)
        compare_outputs(returned, with_rows.predict(first), VALUES, "freed")
    except Exception as error:  # ONNX Runtime raises a dozen types
        if fixed is None:
            raise
        try:
            return network, batch_axis.fix_sizes(network.proto, samples[:1], fixed), one_line(error)
        except Exception as again:
            shape = samples.shape[1:] or samples.dtype
            raise ModelError(f"cannot be run on samples {shape} ({one_line(again)})") from None
    return with_rows, freed, None


def _keep_rows(network: Network, samples: SampleArray, returned: Outputs) -> Network:
    """Return a network of batch size 1 whose outputs all keep their batch axis.

    A Squeeze without axes also removes a batch axis of size 1.

    Args:
        returned: the outputs of the freed graph for several samples.
    """
    alone = network.predict(samples[:1])
    without = []
    for index, (one, many) in enumerate(zip(alone, returned, strict=True)):
        if one.ndim < many.ndim:
            without.append(index)
    if not without:
        return network
    return replace(network, predict=batch_axis.one_by_one(network.predict, without))


def _find_branch(graph: onnx.GraphProto) -> str | None:
    """Return the name of the first If whose condition depends on more than sizes; None without one.

    In a batch, all samples would take the same branch.
    """
    static = batch_axis.static_tensors(graph)
    for node in graph.node:
        if node.op_type == "If" and node.input[0] not in static:
            return str(node.name)
    return None


def _free_length(
    network: Network, samples: SampleArray, batch: int | None, fields: Fields
) -> onnx.ModelProto:
    """Return the graph with a free length of texts; its other sizes are as `fix_sizes` makes them.

    Raises:
        ParityError: padding or the free length changes the outputs.
        Exception: see `batch_axis.fix_sizes`.
    """
    freed = batch_axis.fix_sizes(network.proto, samples[:1], batch, fields.any_length)

    # Compare the shortest samples with their padding and without it
    shortest = np.argsort(lengths(samples[fields.mask]), kind="stable")[:3]
    run = open_runner(freed)
    for index in shortest:
        padded = samples[index : index + 1]
        expected = network.predict(padded)
        compare_outputs(run(padded), expected, VALUES, "a free length")
        returned = run(fields.cut(padded))
        kept = []
        for whole, part in zip(expected, returned, strict=True):
            if part.ndim > 1:  # outputs by token are as long as the input
                whole = whole[:, : part.shape[1]]
            kept.append(whole)
        compare_outputs(returned, kept, VALUES, "less padding")
    return freed


def find_final(outputs: Outputs, samples: SampleArray) -> str:
    """Return the kind of a network's outputs: `probabilities`, `logits` or `values`.

    A single float output [n, classes] holds probabilities if its rows are not negative and sum to 1
    within 1e-3. With a single class, its values must lie between 0 and 1 instead. Otherwise the
    output holds logits. Further axes of size 1 do not matter. All other outputs are values, and so
    is an output with the shape of the samples, such as a reconstruction.
    """
    if len(outputs) != 1:
        return VALUES
    [scores] = outputs
    if count_scores(scores.shape[1:]) is None or scores.dtype.kind != "f":
        return VALUES
    if scores.shape == samples.shape and not is_record(samples):
        return VALUES
    scores = as_rows(scores)
    if scores.shape[1] == 1:
        are_probabilities = 0 <= scores.min() <= scores.max() <= 1
    else:
        sums_to_one = np.allclose(scores.sum(1), 1, rtol=0, atol=1e-3)
        are_probabilities = scores.min() >= 0 and sums_to_one
    return PROBABILITIES if are_probabilities else LOGITS


def _torch_runner(path: Path) -> Predict:
    from resnet8ptq.graph.torch_module import infer, load_torch_module  # imports torch

    return partial(infer, load_torch_module(path))


def _name_difference(proto: onnx.ModelProto, samples: SampleArray) -> str:
    """Return the first node that torch and ONNX Runtime compute differently, for a message.

    Without such a node, the text is `the network`.
    """
    from resnet8ptq.graph.torch_module import find_difference

    node = find_difference(proto, samples[:1], PARITY_TOLERANCE_OF_VALUES)
    if node is None:
        return "the network"
    return f"{node.op_type} {node.name}"


def compare_outputs(got: Outputs, expected: Outputs, final: str, label: str) -> float:
    """Return the largest difference between the outputs.

    Probabilities differ in absolute terms, other outputs relative to the largest absolute value of
    the expected output, unless it is 0.

    Args:
        final: see `find_final`; top-1 classes of `values` are not compared.
        label: the name of the comparison, for messages.

    Raises:
        ParityError: a shape differs, the difference exceeds the tolerance or is NaN, a top-1 class
            differs without a tie, or `expected` has NaN or infinity.
    """
    differences = [0.0]
    flipped = 0
    for output, original in zip(got, expected, strict=True):
        if output.shape != original.shape:
            raise ParityError(f"{label}: returns {output.shape}, the original {original.shape}")
        output = output.astype(np.float64)
        original = original.astype(np.float64)
        if not np.isfinite(original).all():
            raise ParityError(
                f"{label}: the original returns NaN or infinity for the samples; expected finite "
                "outputs; look at preprocess, or leave the output out by model.outputs"
            )
        largest = np.abs(original).max(initial=0)
        scale = 1.0 if final == PROBABILITIES or largest == 0 else largest
        differences.append(float(np.abs(output - original).max(initial=0) / scale))
        if final != VALUES:
            # A class is flipped if the original scores it clearly below the original's top class
            rows = as_rows(original)
            chosen = rows[np.arange(len(rows)), as_rows(output).argmax(1)]
            flipped += int((rows.max(1) - chosen > TIE * scale).sum())
    worst = float(np.max(differences))  # NaN if any difference is NaN
    tolerance = PARITY_TOLERANCE_OF_VALUES if final == VALUES else PARITY_TOLERANCE
    if not flipped and worst <= tolerance:
        return worst

    # Write the message; `values` have no top-1 classes
    kind = "probabilities" if final == PROBABILITIES else "values, relative to the largest,"
    classes = ""
    allowed = f"{tolerance:.0e}"
    if final != VALUES:
        classes = f" on {flipped} of {len(expected[0])} top-1 classes"
        allowed = f"0 and {allowed}"
    raise ParityError(
        f"{label}: differs from the original{classes}, {kind} by up to {worst:.2e} "
        f"(allowed: {allowed})"
    )
