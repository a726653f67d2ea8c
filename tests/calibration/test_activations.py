"""One collection of statistics serves every method, dtype and framework, and nothing else."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from resnet8ptq.calibration import activations, tails
from resnet8ptq.calibration.activations import Activations
from resnet8ptq.calibration.methods import SHARED
from resnet8ptq.calibration.observer import TensorObserver
from resnet8ptq.calibration.statistics import Range
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import memory
from resnet8ptq.core.errors import QuantizationError
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.sampling import draw_calibration
from resnet8ptq.models.model import Fp32Model
from tests.helpers.configs import make_config
from tests.helpers.factories import quantize_network, quantizer_of, runtime_of


@pytest.fixture
def split(shapes: Dataset) -> Split:
    return draw_calibration(shapes, 5, 42).split


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The passes over the images, by their methods."""
    passes: list[str] = []
    observe = Activations._observe

    def spy(
        self: Activations,
        proto: onnx.ModelProto,
        names: Sequence[str],
        make: Callable[[], TensorObserver],
    ) -> dict[str, TensorObserver]:
        passes.append(self.calib.name)
        return observe(self, proto, names, make)

    monkeypatch.setattr(Activations, "_observe", spy)
    yield passes


def configure(cache: Path, *overrides: str) -> RunConfig:
    return make_config("data=shapes", "calib.num_bins=512", f"cache_dir={cache}", *overrides)


def find(network: Fp32Model, split: Split, config: RunConfig) -> dict[str, Range]:
    return Activations(network.onnx_path, split, config.calib, runtime_of(config)).find_around([])


@pytest.mark.slow
def test_one_collection_serves_every_method_dtype_and_framework(
    shapes_model, split, observed, tmp_path
):
    (tmp_path / "made").mkdir()
    cells = [[f"calib={method}"] for method in SHARED]
    cells += [["calib=entropy", "backend=torch"]]
    cells += [["calib=minmax", "dtype=uint8", "per_channel=true"]]
    for cell in cells:
        config = configure(tmp_path / "cache", *cell)
        quantize_network(quantizer_of(config), shapes_model, split, tmp_path / "made")
    assert observed == ["minmax", "entropy"]  # the first method of each kind


@pytest.mark.slow
def test_ranges_do_not_depend_on_what_was_found_before(shapes_model, split, tmp_path):
    for method in SHARED:
        alone = configure(tmp_path / method, f"calib={method}")
        shared = configure(tmp_path / "shared", f"calib={method}")
        assert find(shapes_model, split, shared) == find(shapes_model, split, alone)


def test_torch_rounds_to_the_ranges_of_onnx(quantize):
    ours = quantize("dtype=u8s8", "calib=percentile").artifact.ranges
    for flow in ("torch", "torch_pt2e"):
        theirs = quantize(f"backend={flow}", "calib=percentile").artifact.ranges
        assert theirs
        assert {name: ours[name] for name in theirs} == theirs


@pytest.mark.parametrize(
    "overrides",
    [["calib.num_bins=1024"], ["calib.percentile=99"], ["calib.name=mse"]],
    ids=lambda overrides: overrides[0],
)
def test_other_settings_have_ranges_of_their_own(shapes_model, split, tmp_path, overrides):
    config = configure(tmp_path, "calib=percentile", "calib.percentile=99.9")
    before = find(shapes_model, split, config)
    assert find(shapes_model, split, configure(tmp_path, "calib=percentile", *overrides)) != before


def test_other_images_and_networks_are_observed_anew(
    shapes, shapes_model, split, observed, tmp_path
):
    config = configure(tmp_path)
    before = find(shapes_model, split, config)
    other_images = draw_calibration(shapes, 5, 43).split
    assert find(shapes_model, other_images, config) != before
    assert find(change(shapes_model, tmp_path, 2.0), split, config) != before
    assert find(shapes_model, split, config) == before
    assert observed == ["minmax"] * 3


def test_damaged_statistics_are_taken_again(shapes_model, split, observed, tmp_path):
    config = configure(tmp_path, "calib=percentile")
    before = find(shapes_model, split, config)
    (entry,) = (path for path in (tmp_path / "activation_tails").iterdir() if path.is_dir())
    (statistics,) = entry.glob("*.npz")
    statistics.write_bytes(statistics.read_bytes()[:-20])
    observed.clear()
    # Another percentile, or the ranges themselves would be there.
    other = replace(config, calib=replace(config.calib, percentile=99.0))
    assert find(shapes_model, split, other) != before
    assert find(shapes_model, split, config) == before
    assert len(observed) == 1


@pytest.mark.parametrize("louder, passes", [(1.0, 1), (100.0, 2)])
def test_percentile_counts_all_values_where_the_tails_of_the_first_samples_leave_a_range_open(
    shapes_model, split, observed, tmp_path, monkeypatch, louder, passes
):
    """The first samples are `louder` times as large, so that no other value reaches their tails."""
    monkeypatch.setattr(tails, "_FIRST_VALUES", 1000)
    values = split.inputs(slice(None)).copy()
    values[:8] *= louder
    samples = Split(values, None, "made up")
    words = ["calib=percentile", "calib.percentile=99", "calib.batch_size=8"]
    ranges = find(shapes_model, samples, configure(tmp_path / "tails", *words))
    assert len(observed) == passes

    monkeypatch.setattr(tails, "_FIRST_VALUES", 2**40)  # all values are counted
    assert find(shapes_model, samples, configure(tmp_path / "all", *words)) == ranges


@pytest.mark.parametrize("method", ["minmax", "percentile", "entropy"])
def test_scores_that_a_mask_sets_to_minus_infinity_have_a_range(shapes_model, tmp_path, method):
    """They stay in float, but the pass over the images observes every tensor."""
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> network (float[N, 3, 4] x) => (float[N, 3, 3] y)
        { turned = Transpose <perm = [0, 2, 1]> (x)  scores = MatMul(x, turned)
          masked = Add(scores, mask)  y = Softmax(masked) }"""
    )
    mask = np.triu(np.full((3, 3), -np.inf, np.float32), 1)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(mask, "mask"))
    onnx.save(proto, tmp_path / "causal.onnx")
    values = np.random.default_rng(0).normal(size=(8, 3, 4)).astype(np.float32)
    network = replace(shapes_model, onnx_path=tmp_path / "causal.onnx")
    config = configure(tmp_path / "cache", f"calib={method}")
    ranges = find(network, Split(values, None, "made"), config)
    assert np.isfinite(list(ranges.values())).all()
    assert ranges["scores"][1] > 0


def test_a_network_without_numbers_is_refused_also_from_the_cache(
    shapes_model, split, observed, tmp_path
):
    broken = change(shapes_model, tmp_path, np.inf)
    for _ in range(2):
        with pytest.raises(QuantizationError, match="NaN or infinite"):
            find(broken, split, configure(tmp_path / "cache"))
    assert len(observed) == 2  # the first time: copies of infinite values are observed themselves


@pytest.mark.parametrize("method", ["minmax", "moving_average", "percentile"])
def test_infinite_values_are_refused_only_around_quantized_nodes(shapes_model, tmp_path, method):
    """The logarithm of zero, whose nodes can stay in float."""
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> network (float[N, 4] x) => (float[N, 4] y)
        { positive = Relu(x)  logs = Log(positive)  powers = Exp(logs)  y = Neg(powers) }"""
    )
    for node in proto.graph.node:
        node.name = node.op_type
    onnx.save(proto, tmp_path / "network.onnx")
    samples = Split(np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32), None, "made")
    config = configure(tmp_path / "cache", f"calib={method}")
    network = tmp_path / "network.onnx"
    activations = Activations(network, samples, config.calib, runtime_of(config))
    assert activations.find_unbounded() == ["Log", "Exp"]
    ranges = activations.find_around(activations.find_unbounded())
    assert ranges.keys() == {"x", "positive", "powers", "y"}
    assert np.isfinite([*ranges.values()]).all()
    with pytest.raises(QuantizationError, match="NaN or infinite: logs; "):
        activations.find_around([])


def test_the_layers_around_values_that_float16_lacks_are_named(tmp_path):
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 13]> g (float[N, 4] x) => (float[N, 4] y)
        { a = MatMul(x, small)  b = MatMul(a, large)  y = MatMul(b, small) }"""
    )
    for node, name in zip(proto.graph.node, ("first", "second", "third"), strict=True):
        node.name = name
    small = np.eye(4, dtype=np.float32)
    named = {"small": small, "large": 1e5 * small}
    constants = [numpy_helper.from_array(v, n) for n, v in named.items()]
    proto.graph.initializer.extend(constants)
    onnx.save(proto, tmp_path / "network.onnx")
    samples = Split(np.ones((8, 4), np.float32), None, "made")
    config = configure(tmp_path / "cache")
    result = Activations(tmp_path / "network.onnx", samples, config.calib, runtime_of(config))
    assert [*result.find_beyond(65504)] == ["second", "third"]
    assert result.find_beyond(65504)["third"] == pytest.approx(1e5)
    assert result.find_beyond(1e6) == {}


def test_given_ranges_win_and_where_they_suffice_nothing_is_run(
    shapes_model, split, observed, tmp_path
):
    config = configure(tmp_path)
    wanted = Activations(
        shapes_model.onnx_path, split, config.calib, runtime_of(config), {"a": (0.0, 1.0)}
    )
    assert wanted.find_ranges(["a"]) == {"a": (0.0, 1.0)}
    assert observed == []
    (name, *_) = find(shapes_model, split, config)
    mixed = Activations(
        shapes_model.onnx_path, split, config.calib, runtime_of(config), {name: (-1.0, 1.0)}
    )
    ranges = mixed.find_ranges([name, "not in the graph"])
    assert ranges == {name: (-1.0, 1.0)}


def test_threads_do_not_change_the_statistics(shapes_model, split, tmp_path):
    """The key of the cache leaves them out."""
    one, two = (configure(tmp_path / n, "calib=percentile", f"threads={n}") for n in "12")
    assert find(shapes_model, split, one) == find(shapes_model, split, two)


@pytest.mark.parametrize("method", ["moving_average", "percentile"])
def test_a_small_budget_does_not_change_the_statistics(
    shapes_model, split, tmp_path, monkeypatch, method
):
    roomy, tight = (configure(tmp_path / n, f"calib={method}", "calib.batch_size=20") for n in "12")
    whole = find(shapes_model, split, roomy)
    monkeypatch.setattr(memory, "step", lambda: 1)  # byte: one sample at once
    assert find(shapes_model, split, tight) == whole


def test_a_clipped_tensor_has_the_statistics_of_its_source(
    shapes_model, split, tmp_path, monkeypatch
):
    configs = [configure(tmp_path, f"calib={method}") for method in SHARED]
    followed = [find(shapes_model, split, config) for config in configs]
    graph = onnx.load(shapes_model.onnx_path).graph
    assert any(node.op_type == "Relu" for node in graph.node)
    monkeypatch.setattr(activations, "find_copies", lambda graph: {})
    configs = [configure(tmp_path / "alone", f"calib={method}") for method in SHARED]
    for method, ranges, config in zip(SHARED, followed, configs, strict=True):
        alone = find(shapes_model, split, config)
        if method in ("minmax", "moving_average"):
            assert ranges == alone
        if method == "percentile":
            for name, ends in ranges.items():
                width = 2 * max(map(abs, alone[name])) / 512
                assert ends == pytest.approx(alone[name], abs=1.001 * width)


def test_a_tensor_that_is_clipped_to_a_sliver_is_observed_itself(
    shapes_model, split, observed, tmp_path
):
    proto = onnx.load(shapes_model.onnx_path)
    node = next(node for node in proto.graph.node if node.op_type == "Relu")
    proto.graph.initializer.extend(
        numpy_helper.from_array(np.float32(end), name)
        for name, end in (("none", 0.0), ("sliver", 1e-5))
    )
    node.op_type = "Clip"
    node.input.extend(["none", "sliver"])
    onnx.save(proto, tmp_path / "sliver.onnx")
    network = replace(shapes_model, onnx_path=tmp_path / "sliver.onnx")
    ranges = find(network, split, configure(tmp_path, "calib=percentile", "calib.percentile=99"))
    assert observed == ["percentile"] * 2
    width = 2e-5 / 512
    assert ranges[node.output[0]] == pytest.approx((0.0, 1e-5), abs=1.001 * width)


def change(network: Fp32Model, folder: Path, factor: float) -> Fp32Model:
    """Return the network with the weights of one layer times `factor`."""
    proto = onnx.load(network.onnx_path)
    tensor = next(t for t in proto.graph.initializer if len(t.dims) == 4)
    weights = numpy_helper.to_array(tensor) * np.float32(factor)
    tensor.CopyFrom(numpy_helper.from_array(weights.astype(np.float32), tensor.name))
    path = folder / f"changed_{factor}.onnx"
    onnx.save(proto, path)
    return replace(network, onnx_path=path)
