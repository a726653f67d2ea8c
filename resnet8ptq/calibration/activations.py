"""Activation ranges of a network on the calibration images: measured once, for every run of it.

The statistics of a tensor do not depend on dtype, granularity or framework, and its histogram not
on the method. So they are taken once, of every tensor, by running the ONNX graph in ONNX Runtime,
and kept in the cache, as are the ranges that a method makes of them: a run reads what an earlier
one has left there, whichever process that was.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from resnet8ptq.calibration.methods import describe_method, find_method, find_range
from resnet8ptq.calibration.passes import Batch, run_pass
from resnet8ptq.calibration.statistics import Range, TensorStats
from resnet8ptq.config.schema import CalibConfig
from resnet8ptq.core import cache, files
from resnet8ptq.core.machine import Runtime
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.layers import float_tensors
from resnet8ptq.graph.session import open_session

Stats = dict[str, TensorStats]
BUDGET = 2**28  # bytes of activations that are observed at once, if one sample has no more
_FILES = {"ranges": "ranges.npz", "histograms": "histograms.npz"}


@dataclass(frozen=True)
class Activations:
    """What a backend asks for activation ranges.

    Attributes:
        onnx_path: the FP32 network.
        calibration: the images.
        calib: how a range is chosen.
        runtime: threads of the passes; the statistics are kept in its cache.
        given: ranges made elsewhere, by ONNX tensor name; they win.
    """

    onnx_path: Path
    calibration: Split
    calib: CalibConfig
    runtime: Runtime
    given: Mapping[str, Range] = field(default_factory=dict)

    def find_ranges(self, names: Iterable[str]) -> dict[str, Range]:
        """Return the ranges of the tensors in `names` that the ONNX graph has, in their order.

        Where all are given, nothing is run. With a method that only one framework has
        (calib=histogram) the given ones are all there are.

        Raises:
            QuantizationError: an activation is NaN or infinite.
        """
        names, known = list(names), dict(self.given)
        own = find_method(self.calib.name).choose is None
        if not own and not known.keys() >= set(names):
            known = {**self._load_ranges(), **known}
        return {name: known[name] for name in names if name in known}

    def find_around(self, skipped: Collection[str]) -> dict[str, Range]:
        """Return the ranges of the input and of each float tensor around nodes not in `skipped`.

        Raises:
            QuantizationError: see `find_ranges`.
        """
        proto = onnx.load(self.onnx_path)
        nodes = {node.name for node in proto.graph.node} - set(skipped)
        names = [value.name for value in float_tensors(proto, nodes)]
        return self.find_ranges([proto.graph.input[0].name, *names])

    def _load_ranges(self) -> dict[str, Range]:
        calib = self.calib

        def make(folder: Path) -> None:
            stats = self._load_statistics(find_method(calib.name).histogram)
            ranges = {name: find_range(stat, calib) for name, stat in stats.items()}
            (folder / "ranges.json").write_text(json.dumps(ranges))

        method = json.dumps(describe_method(calib), sort_keys=True)
        folder = self._entry("activation_ranges", {"method": method}, make)
        ranges = json.loads((folder / "ranges.json").read_text())
        return {name: (low, high) for name, (low, high) in ranges.items()}

    def _load_statistics(self, histograms: bool) -> Stats:
        """Return the statistics of every float tensor, from the cache where they are there."""
        calib = self.calib
        # moving_average takes the range of each batch.
        folder = self._entry(
            "activation_batches",
            {"batch_size": calib.batch_size},
            lambda folder: self._observe("ranges", {}, folder),
        )
        with np.load(folder / _FILES["ranges"]) as kept:
            stats = {
                str(name): TensorStats.of_batches(batches)
                for name, batches in zip(kept["names"], kept["batches"], strict=True)
            }
        if not histograms:
            return stats
        folder = self._entry(
            "activation_histograms",
            {"num_bins": calib.num_bins},
            lambda folder: self._observe("histograms", stats, folder),
        )
        with np.load(folder / _FILES["histograms"]) as kept:
            for stat, counts, zeros in zip(
                stats.values(), kept["counts"], kept["zeros"], strict=True
            ):
                stat.counts, stat.zeros = counts, int(zeros)
        return stats

    def _observe(self, stage: str, stats: Stats, folder: Path) -> None:
        """Run all images, and write what the pass `stage` is for."""
        proto = onnx.load(self.onnx_path)
        source, values = proto.graph.input[0].name, float_tensors(proto)
        names = [value.name for value in values]
        stats = stats or {name: TensorStats() for name in [source, *names]}
        del proto.graph.output[:]
        proto.graph.output.extend(values)
        session = open_session(proto.SerializeToString(), self.runtime.threads)

        def run(batch: Batch) -> list[Batch]:
            return [batch, *session.run(names, {source: batch})]

        (sample,) = self.calibration.take(np.arange(1)).batches(1)
        at_once = max(1, BUDGET // sum(values.nbytes for values in run(sample)))
        with ThreadPoolExecutor(self.runtime.threads) as pool:  # numpy works beside itself
            for batch in run_pass(stage, self.calibration, self.calib):
                for start in range(0, len(batch), at_once):
                    observe = partial(
                        TensorStats.observe,
                        stage=stage,
                        config=self.calib,
                        new_batch=start == 0,
                    )
                    values = run(batch[start : start + at_once])
                    list(pool.map(observe, stats.values(), values))
        every = stats.values()
        arrays: dict[str, Any] = {"names": np.array(list(stats))}
        if stage == "ranges":
            arrays["batches"] = np.array([stat.batches for stat in every])  # [T, batches, 2]
        else:
            arrays["counts"] = np.array([stat.counts for stat in every])  # [T, bins]
            arrays["zeros"] = np.array([stat.zeros for stat in every])  # [T]
        np.savez(folder / _FILES[stage], **arrays)

    def _entry(self, kind: str, more: cache.Key, make: Callable[[Path], None]) -> Path:
        key: cache.Key = {
            "network": files.sha256(self.onnx_path),
            "images": self.calibration.digest,
            **cache.made_with("calibration", "data", "graph"),
            **more,
        }
        return cache.entry(self.runtime.cache_root, kind, key, make)
