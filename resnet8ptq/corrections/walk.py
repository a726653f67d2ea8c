"""Computes tensors of a network on samples, batch by batch."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import repeat

import numpy as np
import onnx

from resnet8ptq.core import memory
from resnet8ptq.core.console import track
from resnet8ptq.core.records import feed
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.layers import find_cuts, float_tensors
from resnet8ptq.graph.links import input_names
from resnet8ptq.graph.session import (
    between,
    expose,
    fit_batch,
    group_by_memory,
    open_runner,
    open_session,
    session_inputs,
)
from resnet8ptq.graph.weights import Array


class Walk:
    """Runs a network from the network's input, or after `to` from a stored inner tensor.

    This serves corrections that measure a layer, change it, and measure the next one. `to` moves
    past nodes that no longer change; `run(names)` yields tensors [n, ...] batch by batch.

        walk = setting.walk(fp32)
        for node in nodes:
            walk.to(node, "Measuring")
            for [outputs] in walk.run([node.output[0]]):
                ...

    The stored tensor is a cut: all layers after it depend only on it and on the network's inputs
    (`graph.layers.find_cuts`). If each cut's tensor fits into a step's memory budget for all
    samples, a walk over all layers takes as long as a few runs of the network. Without cuts, each
    layer would take a run from the network's input.
    """

    def __init__(
        self, proto: onnx.ModelProto, samples: Split, batch_size: int, threads: int
    ) -> None:
        """Start at the network's input.

        Args:
            proto: the network; weights after the walk's position may still change.
            batch_size: the largest batch; smaller if its tensors exceed a step's memory budget.
        """
        self._proto = proto
        self._samples = samples
        self._threads = threads
        self._cuts = find_cuts(proto.graph)
        self._inputs = input_names(proto.graph)
        self._source = self._inputs[0]  # the first input stands for all
        # The source's values for each batch; None at the samples
        self._kept: list[Array] | None = None

        # Run as many samples at once as fit into memory with all their tensors
        (sample,) = samples.take(np.arange(1)).batches(1)
        names = float_tensors(proto)
        if len(group_by_memory(proto, names)) == 1:
            run = open_runner(expose(proto, names), threads)
            self._at_once = min(batch_size, fit_batch([run], sample))
        else:
            self._at_once = 1
            memory.return_large_blocks()

    def through(self, proto: onnx.ModelProto) -> "Walk":
        """Return a walk through the same network with other weights, from the same position."""
        other = copy.copy(self)
        other._proto = proto
        return other

    def to(self, node: onnx.NodeProto, label: str) -> None:
        """Move to the last cut before a node; the nodes up to the cut must not change afterwards.

        The walk stays where it is if the cut's tensor for all samples would exceed a step's memory
        budget.
        """
        names = [other.name for other in self._proto.graph.node]
        position = names.index(node.name)
        cut = max((cut for cut in self._cuts if cut < position), default=-1)
        source = self._cuts.get(cut, self._source)
        if source == self._source:
            return

        # Compute the cut's tensor once for all samples
        kept: list[Array] = []
        for [batch] in self.run([source], label):
            if len(self._samples) * batch[0].nbytes > memory.step():
                return
            kept.append(batch)
        self._source = source
        self._kept = kept

    def parts(self, names: list[str]) -> list[list[str]]:
        """Split tensors into parts for `run`, see `group_by_memory`."""
        return group_by_memory(self._proto, names)

    def run(self, names: list[str], label: str | None = None) -> Iterator[list[Array]]:
        """Yield the values of tensors, batch by batch.

        Args:
            label: the title of a progress bar; None for no bar.
        """
        # Compute the tensors that are not stored, from the walk's position on
        computed = [name for name in names if name not in (*self._inputs, self._source)]
        part = between(self._proto, self._source, computed)
        taken = {*input_names(part.graph)}
        compute = self._open(part) if computed else lambda _: ()
        batches: Iterable[dict[str, Array]] = self._batches(taken.union(names))
        if label:
            batches = track(batches, label)
        for tensors in batches:
            made = tensors | dict(zip(computed, compute(tensors), strict=True))
            yield [made[name] for name in names]

    def _open(self, part: onnx.ModelProto) -> Callable[[dict[str, Array]], Sequence[Array]]:
        """Return a function that computes the outputs of a part of the network."""
        arena = self._at_once > 1  # without an arena, the memory of a large sample is returned
        session = open_session(part.SerializeToString(), self._threads, arena=arena, spins=False)
        taken = session_inputs(session)

        def compute(tensors: dict[str, Array]) -> Sequence[Array]:
            fed = {name: tensors[name] for name in taken}
            outputs: Sequence[Array] = session.run(None, fed)
            return outputs

        return compute

    def _batches(self, needed: Set[str]) -> Iterator[dict[str, Array]]:
        """Yield the stored tensor of each batch, if any, and the network's inputs if needed."""
        kept = [{self._source: source} for source in self._kept or ()]
        if kept and needed.isdisjoint(self._inputs):
            yield from kept
            return
        batches = self._samples.batches(self._at_once, padded=False)
        for batch, source in zip(batches, kept or repeat({}), strict=False):
            yield feed(batch, self._inputs) | source
