"""From a network's file to ONNX, with the gate that both frameworks agree with the original.

Runs in a process of its own (see `model.load`): nothing in the main process imports TensorFlow.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from resnet8ptq.core import memory
from resnet8ptq.core.console import waiting
from resnet8ptq.core.errors import DataError, ModelError, ParityError
from resnet8ptq.core.text import one_line
from resnet8ptq.data.preprocessing import RAW, arrange
from resnet8ptq.data.preprocessing import Preprocessing as Arithmetic
from resnet8ptq.graph.footprint import live_bytes
from resnet8ptq.graph.session import open_runner
from resnet8ptq.models.batch import (
    Outputs,
    Predict,
    filled_up,
    find_counted,
    in_batches,
    one_by_one,
    settle,
)
from resnet8ptq.models.contract import (
    Contract,
    find_dtype,
    find_layout,
    is_scalar,
    read_contract,
)
from resnet8ptq.models.folding import Preprocessing, preprocess
from resnet8ptq.models.normalization import (
    flatten_biases,
    make_way_for_quantizer,
    name_nodes,
    opset,
)
from resnet8ptq.models.sources import Module, Network, read
from resnet8ptq.tasks.contract import LOGITS, PROBABILITIES, VALUES

PARITY_SAMPLES = 1000
PARITY_BYTES = 2**24  # of samples: 27 pictures of 224 x 224
PARITY_TOLERANCE = 1e-4  # of a probability, or of the largest logit
# Of the largest of other values: rounding to float32 comes to 2e-4 in a detector of 113
# convolutions, over ten million values.
PARITY_TOLERANCE_OF_VALUES = 1e-3
TIE = 1e-6  # of the same: top scores that are closer may change places
AT_ONCE = 100  # samples

CRASHED = "reading it crashed the converter, or took too much memory or time"

UNFOLDED, FOLDED, RECORD = "unfolded.onnx", "folded.onnx", "conversion.json"


@dataclass(frozen=True)
class Conversion:
    """What a conversion found.

    Attributes:
        parity: largest difference from the original, by framework and file: of probabilities, else
            as a fraction of the largest value.
        source_opset: of the original; of formats other than ONNX, as exported.
        contract: what the graphs take and return; their sizes are all known.
        final: what the one output [N, classes] holds, `probabilities` or `logits`; else `values`.
        preprocessing: what folding changed, or why it failed.
        without_torch: why there is no torch module, for each file of which there is none.
        why_fixed: why the batch could not be freed, where it is fixed.
    """

    parity: dict[str, float]
    source_opset: int
    opset: int
    contract: Contract
    final: str
    preprocessing: Preprocessing
    without_torch: dict[str, str] = field(default_factory=dict)
    why_fixed: str | None = None


def read_record(folder: Path) -> Conversion:
    """Return what `convert` wrote into `folder`."""
    record = json.loads((folder / RECORD).read_text())
    record["contract"] = read_contract(onnx.load(folder / UNFOLDED).graph)
    record["preprocessing"] = Preprocessing(**record["preprocessing"])
    return Conversion(**record)


def convert(
    source: Path,
    folder: Path,
    samples: NDArray[Any],
    module: Module | None = None,
    inputs: Mapping[str, Any] | None = None,
    steps: Arithmetic = RAW,
) -> None:
    """Write `unfolded.onnx`, `folded.onnx` and `conversion.json` into `folder`.

    Where folding fails, `folded.onnx` is left out, and the record says why.

    Args:
        source: the network's file or folder; with `module`, its weights.
        folder: an existing, empty folder.
        samples: [n, ...], as stored: the frameworks must agree on them.
        module: the class of a torch network whose weights `source` is.
        inputs: see `sources.onnx.read`.
        steps: what is done to the samples.

    Raises:
        ModelError: not a model, unsafe, NaN in its weights, or shapes that do not fit.
        ParityError: ONNX Runtime or torch disagree with the original.
    """
    warnings.simplefilter("ignore")  # TensorFlow's and tf2onnx's own deprecations
    try:
        with waiting("Reading and converting the network"):
            network = read(source, samples.shape[1:], module, inputs)
        contract = read_contract(network.proto.graph)
        layout = find_layout(samples.shape[1:], contract)
        values = steps.apply(samples, find_dtype(samples.dtype, steps, contract))
        _convert(network, folder, arrange(values, layout))
    except DataError:
        raise
    except ModelError as error:
        known = str(error).startswith((f"{source}: ", "model."))
        raise error if known else type(error)(f"{source}: {error}") from None
    except Exception as error:  # Keras, tf2onnx, ONNX and onnx2torch each have their own
        raise ModelError(f"{source}: cannot be converted ({one_line(error)})") from None


def _convert(network: Network, folder: Path, samples: NDArray[Any]) -> None:
    """Write what `convert` does; the samples lie as the network takes them."""
    name_nodes(network.proto.graph)
    flatten_biases(network.proto.graph)
    network = _find_batch(network, samples)
    proto, why_fixed = _settle(network, samples)
    network = _give_batch_axes(network, proto)
    make_way_for_quantizer(proto.graph)
    onnx.save(proto, folder / UNFOLDED)
    preprocessing = preprocess(folder / UNFOLDED, folder / FOLDED)
    written = [UNFOLDED] if preprocessing.failure else [UNFOLDED, FOLDED]
    at_once = min(AT_ONCE, memory.fitting(live_bytes(proto), memory.step()))
    expected = in_batches(network.predict, samples, at_once, "Running the original")
    contract, final = read_contract(proto.graph), find_final(expected, samples.shape[1:])
    parity, without_torch = {}, {}
    for path in (folder / name for name in written):
        label = f"onnx, {path.stem}"
        found = _run(open_runner(str(path)), samples, contract, at_once, label)
        parity[label] = compare(found, expected, final, label)
        label = f"torch, {path.stem}"
        try:
            found = _run(_torch_runner(path), samples, contract, at_once, label)
        except Exception as error:  # ModelError, or any that onnx2torch's modules raise
            without_torch[path.name] = " ".join(str(error).split()).removeprefix(f"{path}: ")[:300]
        else:
            parity[label] = compare(found, expected, final, label)
    record = Conversion(
        parity=parity,
        source_opset=network.source_opset,
        opset=opset(proto),
        contract=contract,
        final=final,
        preprocessing=preprocessing,
        without_torch=without_torch,
        why_fixed=why_fixed,
    )
    (folder / RECORD).write_text(json.dumps(asdict(record), indent=2))


def _find_batch(network: Network, samples: NDArray[Any]) -> Network:
    """Fix the batch at 1 where the file says that it is free, and its operators fix it.

    A single number as an output is one of all samples: only of one it is that sample's.
    """
    if read_contract(network.proto.graph).batch is not None:
        return network
    if find_counted(network.proto) or any(map(is_scalar, network.proto.graph.output)):
        return _one_at_once(network)
    try:
        network.predict(samples[:2])
    except Exception:  # ONNX Runtime's own, a dozen
        return _one_at_once(network)
    return network


def _one_at_once(network: Network) -> Network:
    network.proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    return replace(network, predict=filled_up(network.predict, 1))


def _give_batch_axes(network: Network, settled: onnx.ModelProto) -> Network:
    """Return the network with the outputs of `settled`, which have a batch axis."""
    given = {node.output[0] for node in settled.graph.node if node.name.endswith("__batch_axis")}
    places = [place for place, value in enumerate(settled.graph.output) if value.name in given]
    return replace(network, predict=one_by_one(network.predict, places)) if places else network


def _settle(network: Network, samples: NDArray[Any]) -> tuple[onnx.ModelProto, str | None]:
    """Return the graph with its sizes settled, and why its batch is still fixed where it is."""
    fixed, shape = read_contract(network.proto.graph).batch, samples.shape[1:]
    try:
        freed = settle(network.proto, shape, None)
        compare(open_runner(freed)(samples[:3]), network.predict(samples[:3]), VALUES, "freed")
    except Exception as error:  # ONNX Runtime's own, a dozen
        if fixed is None:
            raise
        try:
            return settle(network.proto, shape, fixed), one_line(error)
        except Exception as again:
            raise ModelError(f"cannot be run on samples {shape} ({one_line(again)})") from None
    return freed, None


def find_final(outputs: Outputs, sample: tuple[int, ...]) -> str:
    """Return what a network returns: `probabilities`, `logits` or `values`.

    A single output [n, classes] of floats holds probabilities where its rows are not negative and
    sum to 1 within 1e-3, or of one class lie within 0 and 1, else logits; all else is values, such
    as a reconstruction of the input, of a sample's own shape.
    """
    single = len(outputs) == 1 and outputs[0].ndim == 2 and outputs[0].dtype.kind == "f"
    if not single or outputs[0].shape[1:] == sample:
        return VALUES
    [found] = outputs
    if found.shape[1] == 1:
        return PROBABILITIES if 0 <= found.min() <= found.max() <= 1 else LOGITS
    sums_to_one = found.min() >= 0 and np.allclose(found.sum(1), 1, rtol=0, atol=1e-3)
    return PROBABILITIES if sums_to_one else LOGITS


def _run(
    predict: Predict, samples: NDArray[Any], contract: Contract, at_once: int, label: str
) -> Outputs:
    if contract.batch is not None:
        predict = filled_up(predict, contract.batch)
    return in_batches(predict, samples, at_once, f"Comparing with the original: {label}")


def _torch_runner(path: Path) -> Predict:
    import torch

    from resnet8ptq.graph.torch_module import load_torch_module

    module = load_torch_module(path)

    def predict(batch: NDArray[Any]) -> Outputs:
        with torch.inference_mode():
            found = module(torch.from_numpy(batch))
        return [each.numpy() for each in (found if isinstance(found, list | tuple) else [found])]

    return predict


def compare(got: Outputs, expected: Outputs, final: str, label: str) -> float:
    """Return the largest difference: of probabilities, else as a fraction of the largest value.

    Args:
        final: what the outputs hold; of `values`, no top-1 class is compared.
        label: what the error is to name.

    Raises:
        ParityError: it is above `PARITY_TOLERANCE`, or another class comes out on top.
    """
    differences, flipped = [0.0], 0
    for found, wanted in zip(got, expected, strict=True):
        if found.shape != wanted.shape:
            raise ParityError(f"{label}: returns {found.shape}, the original {wanted.shape}")
        found, wanted = found.astype(np.float64), wanted.astype(np.float64)
        largest = np.abs(wanted).max(initial=0)
        scale = 1.0 if final == PROBABILITIES or largest == 0 else largest
        differences.append(float(np.abs(found - wanted).max(initial=0) / scale))
        if final != VALUES:
            flipped += _count_flips(found, wanted, TIE * scale)
    worst = float(np.max(differences))  # NaN, where any is
    tolerance = PARITY_TOLERANCE_OF_VALUES if final == VALUES else PARITY_TOLERANCE
    if flipped or not worst <= tolerance:
        what = "probabilities" if final == PROBABILITIES else "values, relative to the largest,"
        raise ParityError(
            f"{label}: differs from the original on {flipped} of {len(expected[0])} top-1 classes, "
            f"{what} by up to {worst:.2e} (allowed: 0 and {tolerance:.0e})"
        )
    return worst


def _count_flips(got: NDArray[Any], expected: NDArray[Any], tie: float) -> int:
    """Count samples [n, classes] whose top-1 class differs by more than a tie of two classes."""
    lead = expected.max(1) - np.take_along_axis(expected, got.argmax(1)[:, np.newaxis], 1)[:, 0]
    return int((lead > tie).sum())
