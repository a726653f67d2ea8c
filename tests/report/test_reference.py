"""Other tools' figures beside a sweep's own."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.report import page, reference
from tests.helpers.cells import IMAGES, amend_family, predictions, sweep

HEAD = "tool,configuration,correct,expected_correct,total,size_bytes\n"


def write(path: Path, *lines: str) -> Path:
    path.write_text(HEAD + "\n".join(lines))
    return path


def test_shipped_reference_is_whole():
    entries = reference.load("resnet8_cifar10")
    assert len(entries) == 13
    assert {entry.total for entry in entries} == {9980}
    assert all(8600 < entry.correct < 8750 for entry in entries)


def test_seeds_of_one_configuration_are_one_line_and_the_best_comes_first(tmp_path):
    found = sweep(
        ("a", predictions(lost=10), {"seed": "1", "accuracy": 0.890, "expected_accuracy": 0.889}),
        ("b", predictions(lost=20), {"seed": "2", "accuracy": 0.880, "expected_accuracy": 0.880}),
    )
    path = write(tmp_path / "tools.csv", f"T,plain,886,,{IMAGES},90000", f"T,x,1,1,{IMAGES + 1},1")
    entries = reference.rank(found, reference.load(str(path)))
    assert [entry.own for entry in entries] == [False, True]
    own = entries[1]
    assert own.draws == 2
    assert (own.correct, own.expected_correct) == pytest.approx((885.0, 884.5))
    assert "seed" not in own.configuration
    assert reference.rows(entries)[0] == ["T", "plain", "", "886", "", "90,000"]
    limits = ReportConfig(reference=str(path))
    text = page.to_markdown(page.select([found], limits), {})
    assert "## Other tools" in text
    assert text.index("| T | plain |") < text.index("| this sweep |")
    assert "Other tools" not in page.to_markdown(page.select([found], ReportConfig()), {})


@pytest.mark.parametrize("line", ["T,plain,many,,10,5", "T,plain,5", "T,plain,5,,ten,5"])
def test_bad_line_is_named(tmp_path, line):
    path = write(tmp_path / "tools.csv", line)
    with pytest.raises(ConfigError, match=r"report\.reference: .*line 2: .*expected tool"):
        reference.load(str(path))


def test_missing_file_names_what_is_shipped():
    with pytest.raises(ConfigError, match=r"report\.reference: got nowhere.*resnet8_cifar10"):
        reference.load("nowhere")


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_in_one_line(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("reference") / "tools.csv"
    path.write_bytes(content)
    try:
        reference.load(str(path))
    except ConfigError as error:
        assert str(error).startswith("report.reference: ")


def test_a_shipped_reference_stands_beside_its_own_network_only():
    found = sweep(("a", predictions(lost=1), {}))
    assert not reference.fits("resnet8_cifar10", found)
    assert reference.fits("own.csv", found)
    found = amend_family(found, params={"model": "resnet8", "dataset": "cifar10"})
    assert reference.fits("resnet8_cifar10", found)
