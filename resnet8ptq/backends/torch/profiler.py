"""Times the operators of a TorchScript file with torch's profiler."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from resnet8ptq.backends.contract import Key, NodeTime, Predictor, Profiler, to_nodes

_CONVERSIONS = {
    "aten::quantize_per_tensor",
    "aten::quantize_per_channel",
    "aten::dequantize",
    "aten::to",
    "aten::_to_copy",
}
_CALL = "forward"  # runs the network; its outputs are dequantized afterwards


@contextmanager
def profile(load: Callable[[], Predictor]) -> Iterator[Profiler]:
    """Load a network, to time its operators."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise two lines are printed for each run
    yield _Profiler(load())


@dataclass(frozen=True)
class _Profiler:
    """See `contract.Profiler`; `runs` holds the times of each run."""

    predictor: Predictor
    runs: list[dict[Key, float]] = field(default_factory=list)

    def predict(self, batch: NDArray[np.float32]) -> Sequence[NDArray[np.float32]]:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, record_shapes=True) as profiled:
            outputs = self.predictor.predict(batch)
        self.runs.append(read_events(profiled.events()))
        return outputs

    def nodes(self, runs: int) -> list[NodeTime]:
        return to_nodes(self.runs[-runs:])


def read_events(events: Sequence[Any]) -> dict[Key, float]:
    """Return the milliseconds of a run's operators; the index makes each key's name unique.

    The time of an operator includes the operators that it calls. Of the operators outside the
    network, only the dequantization of its outputs is counted.

    Args:
        events: torch's `FunctionEvent`s.
    """
    times: dict[Key, float] = {}
    for event in events:
        # Operators below the network's direct ones are part of their time
        if event.cpu_parent is None:  # the outputs are dequantized after the network
            is_counted = event.name == "aten::dequantize"
        else:
            is_counted = event.cpu_parent.name == _CALL
        if is_counted:
            key = (f"{len(times)} {event.name}", event.name, _kind(event))
            times[key] = event.cpu_time_total / 1000
    return times


def _kind(event: Any) -> str:
    if event.name in _CONVERSIONS:
        return "conversion"
    if event.name == "quantized::matmul":  # see `torchscript.count_layers`
        return "unfused"
    dtypes = event.input_dtypes
    if event.name.startswith("quantized::") or any(d.startswith("c10::q") for d in dtypes):
        return "integer"
    return "float" if "float" in dtypes else "other"
