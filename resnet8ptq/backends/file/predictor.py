"""Runs a file on samples of the FP32 network, and returns its outputs in that network's layout."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.backends.contract import Predict, Predictor
from resnet8ptq.backends.file.contents import Contents, Port, RawRun
from resnet8ptq.backends.file.matching import Match
from resnet8ptq.backends.file.reading import Admitted
from resnet8ptq.core.errors import ModelError
from resnet8ptq.core.records import feed, names_of
from resnet8ptq.data.preprocessing import arrange


def load(admitted: Admitted, inputs: Match, outputs: Match, threads: int) -> Predictor:
    """Load an admitted file; `inputs` and `outputs` match it to the network, see `matching`."""
    contents = admitted.contents
    whole = MatchedNetwork(admitted.open_run(threads), contents, inputs, outputs=outputs)

    def open_logits() -> Predict | None:
        run = admitted.open_logits(threads)
        if run is None:
            return None
        return MatchedNetwork(run, contents, inputs, outputs={})

    return Predictor(whole, open_logits)


@dataclass(frozen=True)
class MatchedNetwork:
    """A file as a function from network inputs to network outputs.

    Attributes:
        inputs, outputs: the matches of `matching`. Without `outputs`, the function returns all
            outputs of the file in its own order.
    """

    run: RawRun
    contents: Contents
    inputs: Match
    outputs: Match

    def __call__(self, batch: NDArray[Any]) -> list[NDArray[np.float32]]:
        """Return each output [n, ...]; with a fixed batch size, run in parts of that size.

        Raises:
            ModelError: an integer input has no scale, and the samples are not whole numbers; or an
                output has another number of values than that of the network.
        """
        arrays = self._prepare(batch)
        size = self.contents.batch or len(batch)
        parts = []
        for start in range(0, len(batch), size):
            some = [array[start : start + size] for array in arrays]
            count = len(some[0])
            if count < size:  # the last part
                some = [_fill_up(array, size) for array in some]
            outputs = self.run(some)
            parts.append([np.atleast_1d(output)[:count] for output in outputs])  # some are scalars

        # Most files take any batch: one part, which needs no copy
        if len(parts) == 1:
            return self._select(parts[0])
        return self._select([np.concatenate(rows) for rows in zip(*parts, strict=True)])

    def _prepare(self, batch: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the values of the file's inputs, in the file's order, layout and dtypes."""
        names = list(names_of(batch.dtype)) or list(self.inputs)
        values = feed(batch, names)
        name_of = {pair["name"]: name for name, pair in self.inputs.items()}
        arrays = []
        for port in self.contents.inputs:
            name = name_of[port.name]
            pair = self.inputs[name]
            arrays.append(_to_dtype(arrange(values[name], pair["axes"]), port, pair))
        return arrays

    def _select(self, outputs: Sequence[NDArray[Any]]) -> list[NDArray[np.float32]]:
        """Return the network's outputs as float32, in its order and layout; see `outputs`."""
        if not self.outputs:
            return [np.asarray(output, np.float32) for output in outputs]
        names = [port.name for port in self.contents.outputs]
        by_name = dict(zip(names, outputs, strict=True))
        return [_to_network(by_name[pair["name"]], pair) for pair in self.outputs.values()]


def _fill_up(rows: NDArray[Any], count: int) -> NDArray[Any]:
    """Return the rows with zeros appended, `count` rows in all."""
    missing = np.zeros_like(rows, shape=(count - len(rows), *rows.shape[1:]))
    return np.concatenate([rows, missing])


def _to_dtype(values: NDArray[Any], port: Port, pair: dict[str, Any]) -> NDArray[Any]:
    """Return values in the dtype of an input; floats are rounded to an integer input's levels.

    Raises:
        ModelError: an integer input has no scale, and the floats are not whole numbers.
    """
    if values.dtype == port.dtype:
        return np.ascontiguousarray(values)
    wanted = np.dtype(port.dtype)
    if wanted.kind not in "iu" or values.dtype.kind != "f":
        return np.ascontiguousarray(values.astype(wanted))

    # Without a scale, the input takes whole numbers such as pixels
    scale = pair.get("scale")
    zero_point = pair.get("zero_point") or 0
    if scale is None:
        levels = values
        if not np.array_equal(np.rint(values), values):
            raise ModelError(
                f"backend.inputs: {port} has no scale in the file, and the samples are not whole "
                f"numbers; try backend.inputs={{...: {{name: {port.name}, scale: ..., zero_point: "
                "...}}"
            )
    else:
        levels = np.rint(values / np.float32(scale)) + np.float32(zero_point)
    limits = np.iinfo(wanted)
    return np.clip(levels, limits.min, limits.max).astype(wanted)


def _to_network(values: NDArray[Any], pair: dict[str, Any]) -> NDArray[np.float32]:
    """Return an output of the file in the layout of the network, as float32.

    Raises:
        ModelError: the output has another number of values than that of the network.
    """
    if pair.get("scale") is not None:
        shifted = values.astype(np.float32) - np.float32(pair.get("zero_point") or 0)
        values = shifted * np.float32(pair["scale"])
    shape = pair.get("shape")
    if shape is not None:
        if values[:1].size != math.prod(shape):
            raise ModelError(
                f"backend.outputs: {pair['name']} has {values[:1].size} values a sample, the "
                f"network {math.prod(shape)}; expected a file that returns the network's outputs, "
                "not the index of the class"
            )
        values = values.reshape(len(values), *shape)
    return np.asarray(arrange(values, pair["axes"]), np.float32)
