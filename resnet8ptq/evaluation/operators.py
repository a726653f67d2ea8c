"""Times of the operators of a model and its FP32 baseline, run in turns."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack

from resnet8ptq.backends.contract import Node, Profiler
from resnet8ptq.config.schema import LatencyConfig
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation.latency import time_in_turns, torch_threads_kept


def measure(
    profiles: Sequence[AbstractContextManager[Profiler]],
    split: Split,
    batch_size: int,
    settings: LatencyConfig,
) -> list[list[Node]]:
    """Load artifacts, run batches in turns as `latency.measure` does, and time every node.

    Args:
        profiles: load the artifacts, see `contract.Quantizer.profile`.
        split: its first samples are run, repeated if there are too few.

    Returns:
        The nodes of each artifact, in order.
    """
    repeats = settings.repeats if batch_size == 1 else settings.batch_repeats
    with torch_threads_kept(), ExitStack() as stack:
        profilers = [stack.enter_context(profile) for profile in profiles]
        times = time_in_turns(profilers, split, batch_size, repeats, settings.max_seconds)
        return [profiler.nodes(len(runs)) for profiler, runs in zip(profilers, times, strict=True)]
