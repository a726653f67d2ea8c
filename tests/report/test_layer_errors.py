"""Heat maps of the error by layer, of the analyses of a sweep."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.evaluation.result import RunResult
from resnet8ptq.report.pages import layer_errors, page
from resnet8ptq.report.pages.layer_errors import DARKEST
from resnet8ptq.tracking import history
from resnet8ptq.tracking.mlflow_store.store import Store
from resnet8ptq.tracking.run import start_parent, start_run

RANKED = "rank,layer,node,logits_sqnr_db,accuracy_lost\n1,<b>first</b>,a,20.0,0.1\n2,last,b,inf,0\n"
DIAGNOSED = (
    "kind,tensor,node,sqnr_db,layer_sqnr_db\n"
    "activation,x,a,18,30\nactivation,y,a,17,31\nweight,w,a,40,\n"
)


PICTURE = "<svg xmlns='http://www.w3.org/2000/svg'/>"


def log(
    store: Store, tmp_path: Path, *analyses: tuple[str, str, str], picture: str = PICTURE
) -> str:
    """Log a sweep of analyses, given by name, mode and table; return its id."""
    (tmp_path / "sweep").mkdir()
    parent_id = start_parent(store, "sweep", tmp_path / "sweep", {})
    for number, (name, mode, text) in enumerate(analyses):
        folder = tmp_path / str(number)
        folder.mkdir()
        with start_run(store, name, folder, parent_id, {"job_number": str(number)}) as run:
            params = {"analysis.name": name, "analysis.mode": mode, "backend": f"onnx{number}"}
            (folder / layer_errors._TABLES.get(name, f"{name}.csv")).write_text(text)
            (folder / layer_errors.PICTURE).write_text(picture)
            run.log_params(params)
            run.log_result(RunResult("ok"))
    return parent_id


def test_analyses_of_several_settings_are_columns_of_one_map(own_store, tmp_path):
    one = ("sensitivity", "one_at_a_time", RANKED)
    [made] = layer_errors.load_heat_maps(own_store, log(own_store, tmp_path, one, one))
    assert len(made.columns) == 2
    assert [name for name, _ in made.rows] == ["<b>first</b>", "last"]
    assert [cell.text for cell in made.rows[0][1]] == ["20.0"] * 2
    assert [cell.text for cell in made.rows[1][1]] == ["∞"] * 2
    text = page.to_html([], [], {}, heat_maps=[made])
    assert "&lt;b&gt;first" in text and "<b>first" not in text


@pytest.mark.parametrize("name", ["diagnose", "compare"])
def test_a_diagnosis_has_the_worst_tensor_of_each_layer(own_store, tmp_path, name):
    parent_id = log(own_store, tmp_path, (name, "", DIAGNOSED))
    [made] = layer_errors.load_heat_maps(own_store, parent_id)
    text = page.to_html([], [], {}, heat_maps=[made])
    assert '<img src="data:image/svg+xml;base64,' in text and "<svg xmlns" not in text
    [(name, cells)] = made.rows
    assert name == "a"
    assert [cell.text for cell in cells] == ["30.0", "17.0", "40.0"]


@pytest.mark.parametrize("text", ["", "rank,layer\n1,a\n", RANKED.replace("20.0", "x"), "\x00"])
def test_a_damaged_table_is_one_line(own_store, tmp_path, caplog, text):
    parent_id = log(own_store, tmp_path, ("sensitivity", "one_at_a_time", text))
    assert layer_errors.load_heat_maps(own_store, parent_id) == []
    warnings = [entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING"]
    assert len(warnings) == 1 and "sensitivity.csv" in warnings[0]


def test_a_picture_that_is_no_svg_is_left_out(own_store, tmp_path, caplog):
    html = "<html><script>alert()</script>"
    parent_id = log(own_store, tmp_path, ("diagnose", "", DIAGNOSED), picture=html)
    [made] = layer_errors.load_heat_maps(own_store, parent_id)
    assert not made.picture and "network.svg" in caplog.text


def test_a_single_run_of_another_programs_file_shows_its_cause(own_store, tmp_path):
    with start_run(own_store, "file", tmp_path) as run:
        (tmp_path / layer_errors.PICTURE).write_text(PICTURE)
        run.log_params({"backend": "file", "backend.path": "a.onnx", "cause": "layer b"})
        run.log_result(RunResult("ok"))
    [single] = history.find_runs(own_store, "")
    [made] = layer_errors.load_heat_maps(own_store, single.run_id)
    assert made.title.endswith("layer b") and made.picture


@given(
    st.dictionaries(
        st.text(max_size=3),
        st.floats(-200, 200) | st.sampled_from([math.inf, -math.inf]),
        min_size=1,
    ),
    st.booleans(),
)
def test_the_worst_layer_is_first_and_darkest(found, high_is_bad):
    made = layer_errors.draw("", {k: {"dB": v} for k, v in found.items()}, high_is_bad)
    opacities = [cell.opacity for _, (cell,) in made.rows]
    assert len(made.rows) + made.more == len(found)
    assert opacities == sorted(opacities, reverse=True)
    assert all(0 <= opacity <= DARKEST for opacity in opacities)


def test_outputs_of_nan_are_not_shown_as_unchanged():
    made = layer_errors.draw("", {"kept": {"dB": math.inf}, "lost": {"dB": -math.inf}})
    assert [cell.text for _, (cell,) in made.rows] == ["-∞", "∞"]
