"""Settings are decided once, from the request, the files and the job."""

import ast
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import resnet8ptq
from resnet8ptq.experiment.settings import fill_defaults, resolve
from resnet8ptq.sweeps import identity
from tests.helpers.assembling import assemble
from tests.helpers.configs import make_config
from tests.helpers.frameworks import QUANTIZING


def test_arrays_with_the_names_of_the_networks_inputs_fill_them(tmp_path):
    nodes = [
        helper.make_node("Mul", ["x", "mask"], ["masked"]),
        helper.make_node("MatMul", ["masked", "weights"], ["y"]),
    ]
    sides = {"x": ["N", 4], "mask": ["N", 4]}, {"y": ["N", 2]}
    onnx.save(
        assemble(nodes, *sides, {"weights": np.eye(4, 2, dtype=np.float32)}), tmp_path / "a.onnx"
    )
    ones = np.ones((8, 4), np.float32)
    np.savez(tmp_path / "a.npz", x_train=ones, mask_train=ones, x_test=ones, mask_test=ones)
    paths = [f"model.path={tmp_path / 'a.onnx'}", f"data.root={tmp_path / 'a.npz'}"]
    settings = resolve(make_config("data=arrays", *paths, f"cache_dir={tmp_path / 'cache'}"))
    assert settings.config.data.inputs == {"x": "x", "mask": "mask"}


OF_SHAPES = ("data=shapes", "evaluate.stop=decided")


@pytest.mark.parametrize("backend", QUANTIZING)
def test_decided_settings_stay_as_they_are(backend, tmp_path):
    asked = make_config(*OF_SHAPES, f"backend={backend}", f"cache_dir={tmp_path}")
    before = deepcopy(asked)
    settings = resolve(asked, jobs=1, threads=2)
    assert asked == before
    assert resolve(settings.config).config == settings.config


@pytest.mark.parametrize(
    ("words", "jobs", "choice", "models"),
    [
        (OF_SHAPES, 1, "none", 1),
        (OF_SHAPES, 6, "auto", 6),
        (OF_SHAPES, None, "auto", None),
        ((*OF_SHAPES, "evaluate.models=3"), 6, "auto", 3),
        ((*OF_SHAPES, "evaluate.choice=half"), 1, "half", 1),
        ((*OF_SHAPES, "evaluate.split=choice"), 1, "auto", 1),
        (("data=shapes",), 6, "auto", None),
    ],
)
def test_defaults_of_the_evaluation_follow_the_number_of_jobs(words, jobs, choice, models):
    evaluate = fill_defaults(make_config(*words), jobs).evaluate
    assert (evaluate.choice, evaluate.models) == (choice, models)


def test_the_threads_of_a_worker_are_a_default_and_no_part_of_the_identity(tmp_path):
    asked = make_config("data=shapes", f"cache_dir={tmp_path}")
    alone, beside = resolve(asked), resolve(asked, threads=3)
    assert beside.config.threads == beside.runtime.threads == 3
    assert beside.runtime.threads_fixed and not alone.runtime.threads_fixed
    assert identity.hash_run(alone) == identity.hash_run(beside)
    fixed = resolve(replace(asked, threads=2), threads=3)
    assert fixed.runtime.threads == 2
    assert identity.hash_run(fixed) != identity.hash_run(alone)


@pytest.mark.parametrize(
    ("words", "float_tail"),
    [("data=shapes", None), ("data=coco", True), ("task=detection", True)],
)
def test_the_tail_of_a_detector_stays_in_float(words, float_tail):
    assert fill_defaults(make_config(words)).float_tail is float_tail
    assert fill_defaults(make_config(words, "float_tail=false")).float_tail is False


def test_a_run_has_one_quantizer_for_its_settings(tmp_path):
    config = make_config("data=shapes", f"cache_dir={tmp_path}")
    settings = resolve(config)
    assert settings.quantizer is settings.quantizer
    assert settings.vary(seed=7).config.seed == 7
    assert settings.config.seed == config.seed


def test_no_code_changes_a_config_in_place():
    changed = [
        line
        for path in Path(resnet8ptq.__file__).parent.rglob("*.py")
        for line in _find_changes(path.read_text())
    ]
    assert changed == []


def _find_changes(code: str) -> list[str]:
    """Return the assignments to a setting, such as `cfg.threads = 1` and `self.config.seed = 1`."""
    assigned = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Assign):
            assigned += [ast.unparse(target) for target in node.targets]
        elif isinstance(node, ast.AugAssign):
            assigned.append(ast.unparse(node.target))
    return [name for name in assigned if re.match(r"(\w+\.)?(cfg|config|asked|settings)\.", name)]
