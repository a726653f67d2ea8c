"""Ranges by hand: the formats of other programs, and everything else refused in words."""

import json
from pathlib import Path

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.calibration import foreign_table, table
from resnet8ptq.core.errors import ConfigError

PATH = Path("ranges.json")
# -1.28 to 1.27: 256 levels of 0.01, of which 128 are below zero.
FORMATS = {
    "calibration.json": {"data": {"relu": {"lowest": -1.28, "highest": 1.27}}},
    "overrides, ends": {"relu": [{"rmin": -1.28, "rmax": 1.27}]},
    "overrides, scale": {"relu": [{"scale": 0.01, "zero_point": 128, "quant_type": "QUInt8"}]},
    "overrides, weights by channel": {
        "relu": [{"rmin": -1.28, "rmax": 1.27}],
        "weight": [{"rmin": -1, "rmax": 1}, {"rmin": -2, "rmax": 2}],
        "another": [{"axis": 0, "rmin": -1, "rmax": 1}],
    },
    "AIMET 0.6": {
        "activation_encodings": {"relu": [{"bitwidth": 8, "min": -1.28, "max": 1.27}]},
        "param_encodings": {"weight": [{"min": -1, "max": 1}, {"min": -1, "max": 1}]},
        "version": "0.6.1",
    },
    "AIMET 1.0": {
        "activation_encodings": [
            {"name": "relu", "enc_type": "PER_TENSOR", "bw": 8, "scale": [0.01], "offset": [-128]}
        ],
        "version": "1.0.0",
    },
    "AIMET 2.0": {
        "encodings": [
            {"name": "relu", "output_dtype": "int8", "y_scale": 0.01, "y_zero_point": 0},
            {"name": "weight", "output_dtype": "int8", "y_scale": [0.1, 0.2], "axis": 0},
        ],
        "version": "2.0.0",
    },
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_gives_the_range(name):
    ranges = foreign_table.read_ranges(FORMATS[name], PATH)
    assert list(ranges) == ["relu"]
    assert ranges["relu"] == pytest.approx((-1.28, 1.27))


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["data", "encodings", "activation_encodings", "name", "rmin", "rmax"])
            | st.sampled_from(["scale", "offset", "bw", "y_scale", "min", "max", "relu"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(parsed=JSON)
def test_any_content_is_read_or_refused(parsed):
    try:
        ranges = foreign_table.read_ranges(parsed, PATH)
    except ConfigError as error:
        assert str(error).startswith("calib.table: ")
        return
    assert ranges
    assert all(low <= high for low, high in ranges.values())


@pytest.mark.parametrize("shift", ["offset", "zero_point"])
def test_a_range_beyond_float32_is_refused(shift):
    with pytest.raises(ConfigError, match="relu"):
        foreign_table.read_ranges({"relu": [{"scale": 1e38, shift: 100}]}, PATH)


def test_tensors_of_another_network_are_named(caplog):
    network = """<ir_version: 8, opset_import: ["": 17]> one (float[n] x) => (float[n] relu)
    { relu = Relu(x) }"""
    graph = onnx.parser.parse_model(network).graph
    ranges = {"relu": (0.0, 1.0), "another": (0.0, 2.0)}
    assert foreign_table.match_tensors(ranges, graph, "ranges.json") == {"relu": (0.0, 1.0)}
    assert "another" in caplog.text
    with pytest.raises(ConfigError, match="another"):
        foreign_table.match_tensors({"another": (0.0, 2.0)}, graph, "ranges.json")


def test_the_origin_is_still_checked_without_trust(tmp_path):
    path = tmp_path / "ranges.json"
    path.write_text(json.dumps(FORMATS["AIMET 0.6"]))
    with pytest.raises(ConfigError, match=r"calib\.trust=true"):
        table.load_ranges(path, {"model": "", "method": "", "images": ""})
