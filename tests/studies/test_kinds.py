"""The study of `ship`: its registry, its tables, and one network from start to end."""

from dataclasses import replace

import pytest
from hydra import initialize_config_dir

from resnet8ptq.config import loading
from studies.kinds import __main__ as command
from studies.kinds import records, tables
from studies.kinds.measuring import ONE_LINER, RECIPE, SHIP, Row
from studies.kinds.recipes import RECIPES, STATIC
from studies.kinds.registry import NETWORKS
from tests.helpers.calling import REPO

WINNER = Row("a", "dense", SHIP, "fastest", loss=0.01, sqnr_db=30.0, bytes=100, ms=1.0, p_worse=0.2)
THEIRS = replace(WINNER, source=ONE_LINER, name="theirs", loss=0.0, p_worse=None)


def test_the_registry_has_twenty_networks_of_ten_kinds():
    assert len(NETWORKS) >= 20
    assert len({entry.kind for entry in NETWORKS.values()}) >= 10
    assert len({entry.make for entry in NETWORKS.values()}) == len(NETWORKS)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_composes(name):
    loading.register_schemas()
    with initialize_config_dir(str(REPO / "conf"), version_base=None):
        assert command.compose_settings(["data=shapes", *RECIPES[name]]).config.backend.quantizes


def test_rows_are_read_as_they_were_written(tmp_path):
    rows = [WINNER, replace(THEIRS, loss=None, words="model.path=/a/b.onnx", reason="one, or two")]
    records.write_rows(tmp_path / "rows.csv", rows, {"$FOLDER": "/a"})
    assert "/a/" not in (tmp_path / "rows.csv").read_text()
    assert records.read_rows(tmp_path / "rows.csv", {"$FOLDER": "/a"}) == rows


@pytest.mark.parametrize(("p_worse", "worse"), [(0.2, False), (0.01, True), (None, False)])
def test_a_winner_is_worse_if_chance_does_not_explain_its_loss(p_worse, worse):
    ending = tables.end([replace(WINNER, p_worse=p_worse), THEIRS])
    assert ending.is_worse is worse


def test_a_larger_one_liner_is_no_rival():
    larger = replace(THEIRS, bytes=200)
    smaller = replace(THEIRS, name="smaller", loss=0.02, bytes=90)
    assert tables.find_rival(WINNER, [larger, smaller]) == smaller


def test_a_winner_is_slower_only_than_one_liners_that_lose_no_more():
    fast = replace(THEIRS, ms=0.5)
    assert tables.end([WINNER, fast]).is_slower
    assert not tables.end([WINNER, replace(fast, loss=0.02)]).is_slower


@pytest.mark.slow
def test_a_network_is_made_quantized_and_timed(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    recipes = {"static": STATIC, "dynamic": RECIPES["dynamic"]}
    monkeypatch.setattr(command, "RECIPES", recipes)
    theirs = "ORT quantize_static"
    monkeypatch.setattr(command, "ONE_LINERS", {theirs: command.ONE_LINERS[theirs]})
    words = ["networks=digits_few", "steps=recipes,one_liners,times", "folder=work"]
    monkeypatch.setattr("sys.argv", ["kinds", *words, "record=rows.csv"])
    assert command.main() == 0
    rows = records.read_rows(tmp_path / "rows.csv", {})
    assert {(row.source, row.name) for row in rows} == {
        *((RECIPE, name) for name in recipes),
        (ONE_LINER, theirs),
    }
    assert all(row.measured and row.ms and row.fp32_ms for row in rows), rows
