"""The memory budget, the bytes that networks take of it, and the batches that follow."""

import subprocess
import sys

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from resnet8ptq.config.schema import ModelConfig
from resnet8ptq.core import memory
from resnet8ptq.experiment import network_and_data
from resnet8ptq.experiment.settings import resolve
from resnet8ptq.graph.footprint import live_bytes, samples_at_once, tensor_bytes
from resnet8ptq.graph.layers import float_tensors
from resnet8ptq.graph.session import expose, group_by_memory, open_runner
from resnet8ptq.models import conversion
from tests.helpers.assembling import assemble
from tests.helpers.configs import make_config


@given(free=st.none() | st.integers(0, 2**45))
def test_the_budget_is_a_power_of_two_within_its_limits(free):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "free_bytes", lambda: free)
        memory._half_of_free.cache_clear()
        budget = memory.budget()
    memory._half_of_free.cache_clear()
    assert memory.LEAST <= budget <= memory.MOST
    assert budget & (budget - 1) == 0
    if free is not None and memory.LEAST < budget < memory.MOST:
        assert free / 8 < budget <= free / 4


def test_memory_gb_sets_the_budget_of_a_run_and_of_its_processes():
    resolve(make_config("data=shapes", "memory_gb=1.5"))
    try:
        assert memory.budget() == 2**29
        budget = "from resnet8ptq.core import memory; print(memory.budget())"
        started = subprocess.run([sys.executable, "-c", budget], capture_output=True, check=True)
        assert int(started.stdout) == 2**29
    finally:
        memory.set_limit(None)


def test_with_memory_gb_the_free_memory_is_not_asked_for(monkeypatch):
    monkeypatch.setenv("RESNET8PTQ_MEMORY_GB", "1.5")
    monkeypatch.setattr(memory, "_half_of_free", None)
    assert memory.budget() == 2**29


@given(sizes=st.lists(st.integers(0, 100)), within=st.integers(0, 200))
def test_groups_hold_all_in_order_and_stay_within_the_budget(sizes, within):
    parts = [sizes[part] for part in memory.in_groups(sizes, within)]
    assert [size for part in parts for size in part] == sizes
    assert all(sum(part) <= within or sum(size > 0 for size in part) == 1 for part in parts)


def test_the_control_group_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    whole = memory.free_bytes()
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert memory.free_bytes() == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert (memory.free_bytes() is None) == (whole is None)


def test_bytes_are_those_of_the_tensors(shapes_model):
    proto = onnx.load(shapes_model.onnx_path)
    names, sizes = float_tensors(proto), tensor_bytes(proto)
    shape = [1, *(axis.dim_value for axis in proto.graph.input[0].type.tensor_type.shape.dim[1:])]
    made = open_runner(expose(proto, names))(np.zeros(shape, np.float32))
    assert [sizes[name] for name in names] == [values.nbytes for values in made]


def test_a_tensor_counts_until_the_last_node_that_takes_it():
    """A residual block: x stays beside a and b; the constant does not count."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Add", ["b", "x"], ["c"]),
        helper.make_node("Add", ["c", "k"], ["y"]),
    ]
    sides = {"x": ["N", 5]}, {"y": ["N", 5]}
    proto = assemble(nodes, *sides, {"k": np.zeros(5, np.float32)})
    assert live_bytes(proto) == 3 * 20


def test_data_come_in_batches_that_fit(shapes, shapes_model, monkeypatch):
    proto = onnx.load(shapes_model.onnx_path)
    monkeypatch.setattr(memory, "budget", lambda: 7 * 4 * live_bytes(proto))
    assert samples_at_once(proto) == 7
    split = network_and_data.fit_data(shapes, shapes_model).test.take(np.arange(20))
    assert [len(batch) for batch in split.batches(100)] == [7, 7, 6]
    assert [len(batch) for batch in split.batches(5)] == [5] * 4


def test_a_conversion_runs_few_samples_at_once(shapes, shapes_model, tmp_path, monkeypatch):
    sizes = []

    def spy(model: object, *more: object) -> object:
        run = open_runner(model, *more)

        def counted(batch: np.ndarray) -> list[np.ndarray]:
            sizes.append(len(batch))
            return run(batch)

        return counted

    monkeypatch.setattr(memory, "budget", lambda: 1)
    monkeypatch.setattr(conversion, "open_runner", spy)
    (samples,) = shapes.train.take(np.arange(5)).batches(5)
    conversion.convert(shapes_model.onnx_path, tmp_path, samples, ModelConfig())
    assert sizes[-10:] == [1] * 10  # unfolded and folded


def test_parts_of_a_network_are_as_large_as_the_budget(shapes_model, monkeypatch):
    proto = onnx.load(shapes_model.onnx_path)
    names, sizes = float_tensors(proto), tensor_bytes(proto)
    assert group_by_memory(proto, names) == [names]
    monkeypatch.setattr(memory, "step", lambda: 2**17)
    parts = group_by_memory(proto, names)
    assert [name for part in parts for name in part] == names
    assert len(parts) > 1
    assert all(sum(sizes[name] for name in part) <= 2**17 for part in parts)
