"""Networks of texts, on the command line: tokens, and the commands of docs/data.md."""

import csv
import re
import shlex
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tests.helpers import phrases
from tests.helpers.calling import REPO, call, call_beside

pytest.importorskip("tokenizers", reason="needs the extra text")

SECTION = (REPO / "docs" / "data.md").read_text().partition("\n## Texts")[2].partition("\n## ")[0]
COMMANDS = [shlex.split(line) for line in re.findall(r"^ {4}resnet8ptq run (.*)$", SECTION, re.M)]
FAST = ("latency.enabled=false", "calib.samples_per_class=20")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the files that the section names."""
    folder = tmp_path_factory.mktemp("texts")
    phrases.write_tables(folder)
    return folder


def run(folder: Path, files: Path, *words: str):
    for path in files.iterdir():
        (folder / path.name).symlink_to(path)
    done = call(folder, *words, *FAST)
    assert done.code == 0, done.err
    return done


@pytest.mark.slow
def test_a_table_of_texts_is_scored_as_its_tokens(files, tmp_path):
    [words] = [words for words in COMMANDS if any(w.startswith("data.test=") for w in words)]
    (tmp_path / "table").mkdir()
    (tmp_path / "tokens").mkdir()
    table = run(tmp_path / "table", files, *words)
    settings = [word for word in words if not word.startswith(("data", "model"))]
    own = phrases.settings(tmp_path)
    tokens = call(tmp_path / "tokens", *settings, *own, *FAST)
    assert tokens.code == 0, tokens.err
    assert [row["accuracy"] for row in table.table] == [row["accuracy"] for row in tokens.table]
    assert {row["limit"] for row in table.table} == {"baseline", "pass"}
    [child, _] = table.children
    kept = table.artifacts(child)["tokenizer.json"].read_bytes()
    assert kept == (files / "my_tokenizer.json").read_bytes()
    example_reads_texts(tmp_path / "table", child.info.run_id)


@pytest.mark.slow
def test_the_tensors_of_texts_of_any_length_are_compared(tmp_path):
    words = ("+analysis=compare", "dtype=u8s8", *phrases.settings(tmp_path))
    done = call(tmp_path, *words, *FAST)
    assert done.code == 0, done.err
    assert re.search(r"costs most: \d+\.\d dB alone", done.out)


def example_reads_texts(folder: Path, run_id: str) -> None:
    done = call_beside(folder, "deploy", f"run_id={run_id}", "folder=out", "verify=false")
    assert done.code == 0, done.err
    assert "tokenizers==" in (folder / "out" / "requirements.txt").read_text()
    path = folder / "out" / "example.py"
    code, _, _ = path.read_text().partition("\nvectors = ")
    example: dict = {"__file__": str(path)}
    with mock.patch.object(sys, "argv", [str(path)]):  # without a text to print
        exec(compile(code, str(path), "exec"), example)
    with np.load(path.with_name("test_vectors.npz")) as vectors:
        inputs, outputs = vectors["inputs"], vectors["output_0"]
    [first, *_] = csv.DictReader((folder / "my_test_texts.csv").read_text().splitlines())
    record = example["read_text"](first["text"])
    assert record[0] == inputs[0]
    [logits] = example["run"](record)
    np.testing.assert_allclose(logits, outputs[:1], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("words", [words for words in COMMANDS if "-m" not in words], ids=str)
def test_the_other_commands_of_the_section_run(files, tmp_path, words):
    done = run(tmp_path, files, *words)
    [finished] = done.runs
    assert finished.data.metrics["sqnr_db"] > 10
    if "task=similarity" in words:
        metrics = done.result(finished)["metrics"]
        assert metrics["baseline/spearman"] > 0.4
        assert metrics["counts/total"] == 1000  # pairs, not texts
        assert {"pearson", "baseline/pearson", "paired/p_value"} <= set(metrics)
