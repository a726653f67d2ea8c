"""Calibration tables: ONNX Runtime's formats, their way back, and every reason to refuse one."""

import contextlib
import filecmp
import json
import logging
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnxruntime.quantization import quantize_static
from onnxruntime.quantization.CalTableFlatBuffers.TrtTable import TrtTable

from resnet8ptq.backends.onnx.dynamic import INTEGERS
from resnet8ptq.calibration import methods, table
from resnet8ptq.calibration.table import FILES, PROVENANCE_FILE, load_ranges, write_tables
from resnet8ptq.config.schema import CalibConfig
from resnet8ptq.core import files
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.data.sampling import draw_calibration
from resnet8ptq.experiment import pipeline
from resnet8ptq.experiment.settings import resolve
from resnet8ptq.tracking.run import Run
from tests.helpers.configs import make_config
from tests.helpers.factories import quantize_network, quantizer_of

RANGES = {"input": (0.0, 255.0), "a/b": (-0.1, 0.3), "dead": (0.0, 0.0), "below": (-4.0, -1.0)}
AS_FLOAT32 = {name: tuple(float(np.float32(v)) for v in ends) for name, ends in RANGES.items()}
MADE_FROM = {"model": "0" * 64, "method": {"name": "mse", "num_bins": 2048}, "images": "1" * 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tables(tmp_path, RANGES, MADE_FROM)
    return tmp_path


def forge(folder: Path, content: bytes) -> None:
    """Replace the table and its hash: what lies beyond the hash is to be as robust."""
    (folder / "calibration.json").write_bytes(content)
    hashes = {"calibration.json": files.sha256(folder / "calibration.json")}
    (folder / PROVENANCE_FILE).write_text(json.dumps({**MADE_FROM, "sha256": hashes}))


# Written and read back


def test_a_table_reads_back_as_float32(folder):
    assert load_ranges(folder, MADE_FROM) == AS_FLOAT32
    assert load_ranges(str(folder / "calibration.json"), MADE_FROM) == AS_FLOAT32
    assert {path.name for path in folder.iterdir()} == {*FILES, PROVENANCE_FILE}


def test_the_other_formats_have_one_number_per_tensor(folder):
    lines = (folder / "calibration.cache").read_text().splitlines()
    highest = {name: float(text) for name, text in (line.split(" ") for line in lines)}
    assert highest == {name: high for name, (_, high) in AS_FLOAT32.items()}
    table = TrtTable.GetRootAs((folder / "calibration.flatbuffers").read_bytes(), 0)
    pairs = [table.Dict(position) for position in range(table.DictLength())]
    assert {pair.Key().decode(): float(pair.Value()) for pair in pairs} == highest


def test_files_are_the_same_each_time_and_match_their_hashes(folder, tmp_path):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_tables(folder, RANGES, MADE_FROM)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    record = json.loads(before[PROVENANCE_FILE])
    assert record["sha256"] == {name: files.sha256(folder / name) for name in FILES}


def test_the_table_stays_out_of_the_log(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        write_tables(tmp_path, RANGES, MADE_FROM)
    assert not caplog.records
    assert not logging.getLogger().filters


# Provenance


def test_provenance_has_what_ranges_depend_on_and_no_more(tmp_path, shapes):
    model = tmp_path / "model.onnx"
    model.write_bytes(b"a network")

    def of(name: str = "minmax", samples: int = 2, **calib: Any) -> Any:
        split = draw_calibration(shapes, samples, 42).split
        return table.provenance(CalibConfig(name=name, **calib), model, split)

    assert of("minmax", batch_size=7) == of("minmax")
    assert of("mse", percentile=99) == of("mse")
    assert of("mse", num_bins=1024) != of("mse")
    assert of("moving_average", batch_size=7) != of("moving_average")
    assert of()["images"] != of(samples=3)["images"]
    assert of()["model"] == files.sha256(model)
    for name in methods.METHODS:
        assert of(name)["method"]["name"] == name


# Refused


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "2" * 64}, r"made from model 000000000000; this run has model 222222222222;"),
        (
            {"method": {"name": "minmax"}},
            r"made from method mse \(num_bins=2048\); this run has method minmax;",
        ),
        (
            {"images": "3" * 64, "method": {"name": "mse", "num_bins": 512}},
            r"made from method mse \(num_bins=2048\), images 1{12}; "
            r"this run has method mse \(num_bins=512\), images 3{12};",
        ),
    ],
)
def test_a_table_of_something_else_is_refused(folder, changed, message):
    with pytest.raises(ConfigError, match=f"^calib.table: {message}"):
        load_ranges(folder, {**MADE_FROM, **changed})


TABLE = "calibration.json"


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (TABLE, None, "cannot read .*calibration.json .No such file"),
        (PROVENANCE_FILE, None, "cannot read .*provenance.json .No such file"),
        (TABLE, lambda text: text.replace("255.0", "128.0"), "edited or damaged"),
        (PROVENANCE_FILE, lambda _: "{", "damaged: not JSON"),
        (PROVENANCE_FILE, lambda _: "[" * 100_000, "damaged: not JSON"),
        (PROVENANCE_FILE, lambda _: "[]", "damaged: got other JSON, expected an object"),
        (PROVENANCE_FILE, lambda _: '{"sha256": 3}', "edited or damaged"),
    ],
)
def test_a_damaged_table_is_refused(folder, name, damage, message):
    path = folder / name
    if damage is None:
        path.unlink()
    else:
        path.write_text(damage(path.read_text()))
    with pytest.raises(ConfigError, match=f"^calib.table: .*{message}"):
        load_ranges(folder, MADE_FROM)


@pytest.mark.parametrize("name", FILES[1:])
def test_formats_with_one_number_per_tensor_are_refused(folder, name):
    with pytest.raises(ConfigError, match=r"one number per tensor; expected the calibration\.json"):
        load_ranges(folder / name, MADE_FROM)


@pytest.mark.parametrize(
    "ends",
    [
        '{"lowest": NaN, "highest": 1}',
        '{"lowest": 0, "highest": Infinity}',
        '{"lowest": 0, "highest": 1e39}',
        f'{{"lowest": 0, "highest": {10**400}}}',
        '{"lowest": 2, "highest": 1}',
        '{"lowest": "0", "highest": 1}',
        '{"lowest": false, "highest": true}',
        '{"lowest": {"data": [0, 1], "dtype": "float32"}, "highest": 1}',
        '{"highest": 1}',
        "[0, 1]",
        "null",
    ],
)
def test_ranges_that_are_none_are_refused(folder, ends):
    forge(folder, f'{{"data": {{"good": {{"lowest": 0, "highest": 1}}, "x": {ends}}}}}'.encode())
    with pytest.raises(ConfigError, match="'x': no valid range"):
        load_ranges(folder, MADE_FROM)


json_value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["data", "lowest", "highest", "sha256", "x"]), inner, max_size=3
        )
    ),
)


@given(table=json_value.map(lambda v: json.dumps(v).encode()) | st.binary(max_size=30))
def test_any_content_is_read_or_refused(table, tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    forge(folder, table)
    with contextlib.suppress(ConfigError):
        ranges = load_ranges(folder, MADE_FROM)
        assert all(np.isfinite([low, high]).all() and low <= high for low, high in ranges.values())
    (folder / PROVENANCE_FILE).write_bytes(table)
    with pytest.raises(ConfigError):
        load_ranges(folder, MADE_FROM)


# In runs


def run(folder: Path, *overrides: str) -> Path:
    """Run the whole pipeline but for MLflow, which this does not concern."""
    folder.mkdir()
    few = ("data=shapes", "calib.samples_per_class=5", "latency.enabled=false")
    scored = ("evaluate.split=held_out", "held_out_images=50")
    settings = resolve(make_config(*few, *scored, *overrides))
    pipeline.run_experiment(settings, folder, mock.create_autospec(Run, instance=True))
    return folder


@pytest.mark.slow
def test_a_run_from_a_table_is_the_run_that_wrote_it(tmp_path):
    method = ("calib=percentile", "dtype=u8s8")
    first = run(tmp_path / "first", *method)
    table = f"calib.table={first / 'calibration.json'}"
    second = run(tmp_path / "second", *method, table)
    for name in ("model.onnx", *FILES, PROVENANCE_FILE):
        assert filecmp.cmp(first / name, second / name, shallow=False), name
    for other, message in [
        ("calib.percentile=99", r"percentile=99\.99\); this run has .*percentile=99\.0\)"),
        ("seed=7", "made from images"),
        ("model.fold=false", "made from model"),
    ]:
        with pytest.raises(ConfigError, match=message):
            run(tmp_path / other, *method, table, other)


def test_a_table_is_what_onnxruntime_takes_as_its_calibration_cache(tmp_path, shapes, shapes_model):
    split = draw_calibration(shapes, 5, 42).split
    ours = quantize_network(quantizer_of(make_config("dtype=u8s8")), shapes_model, split, tmp_path)
    write_tables(tmp_path, ours.ranges, MADE_FROM)
    theirs = tmp_path / "theirs.onnx"
    activations, weights = INTEGERS["uint8"], INTEGERS["int8"]
    quantize_static(
        shapes_model.onnx_path,
        theirs,
        None,
        activation_type=activations,
        weight_type=weights,
        calibration_cache_path=tmp_path / "calibration.json",
    )
    graphs = [onnx.load(path).graph for path in (theirs, ours.path)]
    for graph in graphs:
        del graph.value_info[:]  # ONNX Runtime's file declares the types of constants twice
    assert graphs[0] == graphs[1]
