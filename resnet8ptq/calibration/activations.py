"""Activation ranges of a network on the calibration samples, measured once for all runs.

The statistics of a tensor do not depend on dtype, granularity or framework, and one histogram
serves several methods. Therefore ONNX Runtime runs the ONNX graph, and the cache keeps the
statistics of every float tensor and the ranges of each method for all later runs. The statistics
of a tensor after a Reshape or Relu usually follow from those of its input.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from resnet8ptq.calibration.methods import (
    describe_method,
    find_method,
    find_range,
    make_observer,
    run_pass,
)
from resnet8ptq.calibration.observer import TensorObserver
from resnet8ptq.calibration.outliers import Outliers, find_outliers
from resnet8ptq.calibration.statistics import Range, TensorStats
from resnet8ptq.calibration.tails import TailObserver
from resnet8ptq.config.schema import CalibConfig
from resnet8ptq.core import cache, files, memory
from resnet8ptq.core.errors import QuantizationError
from resnet8ptq.core.machine import Runtime
from resnet8ptq.core.records import feed
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.attention import say_full_mask, stretched_by_masks
from resnet8ptq.graph.layers import (
    LAYERS,
    find_copies,
    float_inputs,
    float_tensors,
    weight_layers,
)
from resnet8ptq.graph.session import (
    Runner,
    between,
    expose,
    fit_batch,
    group_by_memory,
    keep_apart,
    open_runner,
)

log = logging.getLogger(__name__)

Kind = tuple[str, cache.Key]  # a kind of statistics in the cache, and their settings

_TAILS = "activation_tails"
_STATISTICS = "statistics.npz"
_OUTLIERS = "outliers.json"
_LOWEST = np.finfo(np.float32).min


@dataclass(frozen=True)
class Activations:
    """The activation ranges of a network, calibrated when they are first needed.

    Attributes:
        onnx_path: file of the FP32 network.
        calibration: the calibration samples.
        calib: the settings of the calibration method.
        runtime: threads of the passes, and the cache of the statistics.
        preset: ranges from elsewhere, by ONNX tensor name, which take precedence.
    """

    onnx_path: Path
    calibration: Split
    calib: CalibConfig
    runtime: Runtime
    preset: Mapping[str, Range] = field(default_factory=dict)

    def find_ranges(self, names: Iterable[str]) -> dict[str, Range]:
        """Return the ranges of the float activations in `names`, in order.

        Names of other or unknown tensors are left out. If all ranges are preset, the network does
        not run. With torch's own method (calib=histogram), only preset ranges are returned.

        Raises:
            QuantizationError: one of these activations is NaN or infinite, except for minus
                infinity in a mask. Tensors outside `names` may be infinite, such as the logarithm
                of zero in a node that stays in float.
        """
        names = list(names)
        ranges = dict(self.preset)
        if find_method(self.calib.name).choose and not ranges.keys() >= set(names):
            ranges = {**self._load_ranges(), **ranges}
        chosen = {}
        for name in names:
            if name not in ranges:
                continue
            if not np.isfinite(ranges[name]).all():
                raise self._not_finite(name)
            chosen[name] = ranges[name]
        return chosen

    def _not_finite(self, name: str) -> QuantizationError:
        """Return the error for a tensor; it names the samples that stand out, if there are any."""
        why = ""
        for outlier in self.outliers():
            why += f"; {outlier.describe(self.calibration)}"
        undefined = [name for name, ends in self._load_ranges().items() if np.isnan(ends).any()]
        mask = say_full_mask(onnx.load(self.onnx_path).graph, undefined)
        return QuantizationError(
            f"an activation of the calibration samples is NaN or infinite: {name}; "
            f"expected finite values around quantized nodes; {mask or 'try nodes_to_exclude'}{why}"
        )

    def find_around(self, skipped: Collection[str]) -> dict[str, Range]:
        """Return the ranges of the inputs, and of each float tensor around nodes not in `skipped`.

        The keys are the names in the ONNX graph. Later calls with the same samples and calibration
        method, from any backend, read the ranges from the cache.

        Raises:
            QuantizationError: see `find_ranges`.
        """
        proto = onnx.load(self.onnx_path)
        nodes = {node.name for node in proto.graph.node} - set(skipped)
        return self.find_ranges([*float_inputs(proto.graph), *float_tensors(proto, nodes)])

    def find_unbounded(self) -> list[str]:
        """Return the names of nodes with an input or output that is NaN or infinite.

        Such a node, for example the logarithm of zero, can stay in float. Layers are not listed.
        The list is empty if any range is preset, or if torch chooses the ranges.
        """
        if self.preset or not find_method(self.calib.name).choose:
            return []
        ranges = self._load_ranges()
        unbounded = {name for name, ends in ranges.items() if not np.isfinite(ends).all()}
        if not unbounded:
            return []
        names = []
        for node in onnx.load(self.onnx_path).graph.node:
            is_bounded = unbounded.isdisjoint((*node.input, *node.output))
            if node.op_type not in LAYERS and not is_bounded:
                names.append(node.name)
        return names

    def find_beyond(self, largest: float) -> dict[str, float]:
        """Return the layers whose inputs or outputs exceed `largest`, with the largest magnitude.

        Magnitudes are those of the ranges, by the calibration method. A range with NaN counts as
        infinite.
        """
        peaks = {}
        for name, ends in self._load_ranges().items():
            is_finite = np.isfinite(ends).all()
            peaks[name] = float(np.abs(ends).max()) if is_finite else np.inf

        beyond = {}
        for node in weight_layers(onnx.load(self.onnx_path).graph).values():
            tensors = (*node.input, *node.output)
            peak = max(peaks.get(name, 0.0) for name in tensors)  # only activations have peaks
            if peak > largest:
                beyond[node.name] = peak
        return beyond

    def outliers(self) -> list[Outliers]:
        """Return the samples whose values stand out in a tensor.

        The list is empty if the cache has no statistics yet.
        """
        # Take the first kind of statistics that is in the cache
        folder = None
        for kind, settings in self._kinds():
            folder = cache.find(self.runtime.cache_root, kind, self._key(settings))
            if folder is not None:
                break
        if folder is None:
            return []

        outliers = []
        for row in json.loads((folder / _OUTLIERS).read_text()):
            row["samples"] = tuple(row["samples"])
            outliers.append(Outliers(**row))
        return outliers

    def _load_ranges(self) -> dict[str, Range]:
        def make(folder: Path) -> None:
            ranges = None
            for kind in self._kinds():
                ranges = self._choose_ranges(kind)
                if ranges is not None:
                    break
                log.info("calib.name=%s: a second pass counts all values", self.calib.name)
            (folder / "ranges.json").write_text(json.dumps(ranges))

        method = json.dumps(describe_method(self.calib), sort_keys=True)
        folder = self._entry("activation_ranges", {"method": method}, make)
        for outlier in self.outliers():
            outlier.warn(self.calibration, self.calib)
        ranges = json.loads((folder / "ranges.json").read_text())
        return {name: (low, high) for name, (low, high) in ranges.items()}

    def _choose_ranges(self, kind: Kind) -> dict[str, Range] | None:
        """Return the range of every float tensor; None if these statistics leave one open."""
        name, key = kind
        folder = self._entry(name, key, partial(self._write_statistics, kind=name))
        with np.load(folder / _STATISTICS) as file:
            kept = dict(file)
        ranges = {}
        for row, tensor in enumerate(kept["names"]):
            stat = TensorStats.of_batches(kept["batches"][row])
            ranges[str(tensor)] = (stat.low, stat.high)
            if not stat.is_finite:
                continue
            stat.zeros = int(kept["zeros"][row])

            # The tails' two extremes must give one range
            chosen = set()
            for counts in kept["counts"][row]:
                chosen.add(find_range(replace(stat, counts=counts), self.calib))
            if len(chosen) > 1:
                return None
            ranges[str(tensor)] = chosen.pop()
        return ranges

    def _kinds(self) -> list[Kind]:
        """Return the kinds of statistics to try in turn; the last one gives every range."""
        method = find_method(self.calib.name)
        if not method.histogram:  # moving_average needs the range of each batch
            return [("activation_batches", {"batch_size": self.calib.batch_size})]
        bins = {"num_bins": self.calib.num_bins}
        whole: Kind = ("activation_histograms", bins)
        is_there = cache.find(self.runtime.cache_root, whole[0], self._key(bins)) is not None
        if is_there or not method.reads_tails(self.calib):
            return [whole]
        return [(_TAILS, bins), whole]

    def _write_statistics(self, folder: Path, kind: str) -> None:
        """Run all samples, and write the statistics of every float tensor."""
        proto = onnx.load(self.onnx_path)
        num_bins = self.calib.num_bins
        names = [*float_inputs(proto.graph), *float_tensors(proto)]

        # Observe only tensors that do not copy the values of another
        every = find_copies(proto.graph)
        copies = {}
        originals = []
        for name in names:
            if name in every and every[name][0] in names:
                copies[name] = every[name]
            else:
                originals.append(name)
        make: Callable[[], TensorObserver] = partial(make_observer, self.calib)
        if kind == _TAILS:
            make = partial(TailObserver, counting=True)
        observers = self._observe(proto, originals, make)

        # A copy takes the counts of its source, unless clipping leaves too few fine bins
        coarse = []
        for name, (source, low, high) in copies.items():
            observers[name] = observers[source].clipped(low, high)
            if observers[name].is_coarse(num_bins):
                coarse.append(name)
        if coarse:
            observers |= self._observe(proto, coarse, make)

        # Write the statistics, and the samples that stand out
        bounds = [observers[name].bounds(num_bins) for name in names]
        stats = [first for first, *_ in bounds]
        masked = stretched_by_masks(proto.graph)
        compared = {name: observers[name] for name in names if name not in masked}
        outliers = list(map(vars, self._compare_samples(compared)))
        (folder / _OUTLIERS).write_text(json.dumps(outliers))
        batches = [stat.batches for stat in stats]
        zeros = [stat.zeros for stat in stats]
        counts = []
        for extremes in bounds:
            counts.append([stat.counts for stat in extremes])
        np.savez(
            folder / _STATISTICS,
            names=np.array(names),
            batches=np.array(batches),  # [T, batches, 2]
            counts=np.array(counts),  # [T, B, bins]
            zeros=np.array(zeros),  # [T]
        )

    def _compare_samples(self, observers: Mapping[str, TensorObserver]) -> Iterator[Outliers]:
        """Yield the samples whose values stand out, by tensor, unless all were named before."""
        calibration = self.calibration
        every = np.arange(len(calibration))
        batches = calibration.parts(1, padded=False)
        # The order in which the samples ran
        order = np.concatenate([every[batch] for batch in batches])
        named: set[int] = set()
        for name, observer in observers.items():
            peaks = np.concatenate(observer.peaks)
            if len(peaks) != len(order):
                continue  # the tensor's first axis does not count samples
            outliers = find_outliers(name, peaks[np.argsort(order)])
            if outliers is not None and not named.issuperset(outliers.samples):
                named.update(outliers.samples)
                yield outliers

    def _observe(
        self, proto: onnx.ModelProto, names: Sequence[str], make: Callable[[], TensorObserver]
    ) -> dict[str, TensorObserver]:
        """Run all samples, and observe the tensors `names`, each by its own observer."""
        # Group the tensors by memory, and find those with a first axis of samples
        observers = {name: make() for name in names}
        inputs = [value.name for value in proto.graph.input if value.name in observers]
        computed = [name for name in names if name not in inputs]
        parts = group_by_memory(proto, computed)
        runs, at_once = self._open(proto, parts)
        masked = stretched_by_masks(proto.graph)
        batched: Collection[str] = ()
        if at_once > 1 and self.calibration.at_once != 1:
            batched = self._find_batched(runs[0], parts[0])

        def observe(name: str, values: NDArray[np.float32], is_first: bool, samples: int) -> None:
            if name in masked:  # masks hold minus infinity, which has no range
                values = np.maximum(values, _LOWEST)
            if name not in batched or len(values) != samples:
                samples = 1  # the values do not belong to single samples
            observers[name].observe(values, is_first, samples)

        # Run batch by batch; observe the tensors of a batch in parallel
        with ThreadPoolExecutor(self.runtime.threads) as pool:  # numpy releases the GIL
            for samples, first in run_pass(self.calibration, self.calib, at_once):
                count = len(samples)
                for name, values in feed(samples, inputs).items():
                    observers[name].observe(values, first, count)
                for run, part in zip(runs, parts, strict=True):
                    # A part's extra outputs, the sizes of its tensors, come last: `map` drops them.
                    outputs = run(samples)
                    list(pool.map(observe, part, outputs, repeat(first), repeat(count)))
        return observers

    def _find_batched(self, run: Runner, names: Sequence[str]) -> set[str]:
        """Return the tensors with a first axis of samples, found by runs of one and two samples."""
        some = np.arange(min(2, len(self.calibration)))
        alone = run(self.calibration.inputs(some[:1]))
        both = run(self.calibration.inputs(some))
        batched = set()
        for name, one, two in zip(names, alone, both, strict=True):
            if one.shape[:1] == (1,) and two.shape[:1] == (len(some),):
                batched.add(name)
        return batched

    def _open(
        self, proto: onnx.ModelProto, parts: Sequence[Sequence[str]]
    ) -> tuple[list[Runner], int]:
        """Return a runner for each group of tensors, and the batch size."""
        threads = self.runtime.threads
        if len(parts) == 1:
            run = open_runner(expose(proto, parts[0]), threads)
            (sample,) = self.calibration.take(np.arange(1)).batches(1)
            return [run], fit_batch([run], sample)

        # The tensors of one sample exceed the memory budget
        memory.return_large_blocks()
        source = proto.graph.input[0].name
        names = list(chain.from_iterable(parts))
        runners = []
        for part in parts:
            graph = keep_apart(between(proto, source, part), names)
            runners.append(open_runner(graph, threads, arena=False))
        return runners, 1

    def _entry(self, kind: str, more: cache.Key, make: Callable[[Path], None]) -> Path:
        return cache.entry(self.runtime.cache_root, kind, key=self._key(more), make=make)

    def _key(self, more: cache.Key) -> cache.Key:
        return {
            "network": files.sha256(self.onnx_path),
            "images": self.calibration.digest,
            **cache.made_with(__name__),
            **more,
        }
