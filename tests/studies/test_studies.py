"""The studies: their tables are there, and their pages name them with a date and a command."""

import re

import pytest

from studies import ship
from tests.helpers.calling import REPO

PAGES = sorted(set(REPO.glob("studies/*.md")) - {REPO / "studies/README.md"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_study_has_a_date_and_the_command_that_repeats_it(page):
    start = page.read_text().split("\n## ")[0]
    assert re.search(r"^Measured 20\d\d-\d\d-\d\d", start, re.M)
    assert re.search(r"^ {4}(SHARED=FOLDER )?python |of commit [0-9a-f]{8}", start, re.M)


def test_every_study_is_in_the_index():
    index = (REPO / "studies/README.md").read_text()
    assert [page.name for page in PAGES if f"]({page.name})" not in index] == []
    tables = REPO.glob("studies/*.csv")
    assert [table.name for table in tables if f"]({table.name})" not in index] == []


def test_a_network_left_out_is_looked_up_in_the_order_of_the_others():
    learned = "calib=mse corrections.adaround=true"
    rows = [
        {"network": "a", "winner": "calib=mse", "helped": "calib=mse (0.50)"},
        {"network": "b", "winner": learned, "helped": "corrections.adaround=true (0.20)"},
        {"network": "c", "winner": "the first step", "helped": ""},
    ]
    assert ship.left_out(rows) == [
        ["a", "calib", "adaround", "none", "adaround", "none"],
        ["b", "adaround", "calib", "none", "calib", "none"],
        ["c", "the first step", "adaround, calib", "", "calib, adaround", ""],
    ]
