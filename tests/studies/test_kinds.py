"""The study of `ship`: its registry, its tables, and one network from start to end."""

from dataclasses import replace

import pytest
from hydra import initialize_config_dir

from resnet8ptq.config import loading
from resnet8ptq.experiment.network_properties import PRODUCTS
from studies.kinds import __main__ as command
from studies.kinds import orders, records, tables
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


def make_row(name, loss, size, ms, kind="dense", network="a"):
    limits = {"limit": 0.01, "fp32_bytes": 100, "fp32_ms": 1.0}
    return Row(network, kind, RECIPE, name, loss=loss, bytes=size, ms=ms, **limits)


def test_a_walk_ends_at_the_first_file_that_passes_and_is_worth_it():
    lossy, large = make_row("static", 0.05, 25, 0.5), make_row("static bias", 0.0, 99, 1.0)
    passing, smaller = make_row("dynamic", 0.0, 30, 0.8), make_row("mixed", 0.0, 24, 0.9)
    walked = orders.walk(orders.STEPS, [smaller, large, passing, lossy])
    assert (walked.steps, walked.chosen, walked.best) == (2, passing, smaller)
    assert walked.excess == 30 / 24
    several = orders.walk(orders.STEPS, [smaller, passing, lossy], orders.STARTS)
    assert (several.steps, several.chosen) == (3, passing)  # the fastest of the first steps


def test_an_order_takes_what_passes_on_most_networks_first():
    one = [make_row("static", 0.0, 25, 0.5), make_row("dynamic", 0.0, 25, 0.5)]
    other = [make_row("static", 0.5, 25, 0.5), make_row("dynamic", 0.0, 25, 0.5)]
    third = [make_row("static bias", 0.0, 25, 0.5)]
    assert orders.compute_order([one, other, third]) == ["dynamic", "static bias"]


def test_the_order_of_ship_is_that_of_its_table():
    assert orders.order_of_ship([PRODUCTS])[:3] == ["static", "dynamic", "w8 by channel"]
    assert orders.order_of_ship([])[-1] == "w8 by channel"
    assert {*orders.STEPS} <= {*RECIPES}


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
