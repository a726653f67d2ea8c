"""Every structure of the zoo through every flow: equal to FP32 within 8 bits, or unsupported.

Each structure runs through the flows of ONNX Runtime, those that it names, and one of the others.
With ZOO_TABLE=docs/zoo.md each runs through all flows, and the table is written there.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import onnx2tf
from tests.zoo import flows
from tests.zoo.flows import Outcome
from tests.zoo.registry import STRUCTURES
from tests.zoo.table import render

TABLE = os.environ.get("ZOO_TABLE")
ALWAYS = ("onnx u8s8", "onnx qoperator", "onnx dynamic")
# tflite and executorch take many seconds: only for the structures that name them.
IN_TURN = (
    *("onnx int8", "onnx weight_only", "openvino"),
    *("torch fx", "torch pt2e", "openvino_nncf"),
)


def cells() -> Iterator[tuple[str, str]]:
    """Yield the structures and their flows."""
    for number, (name, structure) in enumerate(STRUCTURES.items()):
        chosen = flows.EACH if TABLE else (*ALWAYS, IN_TURN[number % len(IN_TURN)])
        for flow in dict.fromkeys((*chosen, *structure.flows)):
            yield name, flow


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[tuple[str, str], Outcome]]:
    """The outcomes of this process, for the table."""
    made: dict[tuple[str, str], Outcome] = {}
    yield made
    if TABLE:
        Path(TABLE).write_text(render(made))


@pytest.mark.slow
# keras.Model.save, with the pinned TensorFlow and NumPy.
@pytest.mark.filterwarnings("ignore:__array__ implementation")
@pytest.mark.parametrize(("name", "flow"), [*cells()])
def test_structure_is_equal_to_fp32_or_unsupported(name, flow, outcomes, tmp_path, cache_root):
    converts = flow.startswith("tflite") and not name.endswith("_in_keras")
    if converts and not onnx2tf.link(cache_root):
        pytest.skip("onnx2tf is not installed")
    outcome = flows.run(name, flow, tmp_path)
    outcomes[name, flow] = outcome
    if outcome.sqnr_db is None:
        assert len(outcome.reason) > 20
    else:
        least_db = min(STRUCTURES[name].least_db, flows.LEAST_OF_FLOW.get(flow, 100))
        assert outcome.sqnr_db >= least_db


def test_every_structure_says_where_it_was_found_or_varies_one():
    reported = [structure for structure in STRUCTURES.values() if structure.reports]
    assert len({structure.reports for structure in reported}) >= 25
    assert {flow for structure in reported for flow in structure.flows} <= flows.FLOWS.keys()
