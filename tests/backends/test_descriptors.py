"""The descriptor of each backend: complete, cheap to import, and enough to add a backend."""

import filecmp
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import onnx
import pytest
import yaml

from resnet8ptq.backends.contract import Quantizer
from resnet8ptq.backends.registry import BACKENDS
from resnet8ptq.config import loading
from resnet8ptq.config.folders import find_conf
from resnet8ptq.config.schema import BackendConfig
from resnet8ptq.core import code, machine, templates
from resnet8ptq.core.descriptor import Backend, Search, find_backends, find_readers
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.deploy import example
from resnet8ptq.exploration.search import candidates
from tests.helpers import toy_backend
from tests.helpers.calling import QUICK, REPO, Called, call, call_beside, clean_environment
from tests.helpers.configs import make_config
from tests.helpers.factories import quantizer_of
from tests.helpers.frameworks import SHIPPED
from tests.helpers.toy_backend.files import unpack

QUANTIZING = [backend for backend in BACKENDS.values() if backend.quantizes]
CHOOSES_ITSELF = ("openvino_nncf",)  # its quantizer chooses the operators
TOY = REPO / "tests" / "helpers" / "toy_backend"
CONTRACT = (  # the tests that run over every backend
    *("tests/backends/test_descriptors.py", "tests/backends/test_backends.py"),
    *("tests/experiment/test_sensitivity.py", "tests/tasks/test_distortion.py"),
)
FRAMEWORKS = {"torch", "tensorflow", "onnx", "onnxruntime", "openvino", "numpy", "omegaconf"}
every_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
every_quantizing = pytest.mark.parametrize("backend", QUANTIZING, ids=lambda one: one.name)


def test_descriptors_are_found_without_importing_a_framework():
    look = (
        "import sys; from resnet8ptq.core.descriptor import find_backends;"
        f"print(len(find_backends()), *({FRAMEWORKS} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(BACKENDS))]


def test_every_folder_is_a_backend_of_its_own_name():
    folders = {path.parent.name for path in Path("resnet8ptq/backends").glob("*/__init__.py")}
    assert folders == set(BACKENDS)
    assert len({backend.rank for backend in BACKENDS.values()}) == len(BACKENDS)


@every_backend
def test_a_backend_has_a_config_option_and_typed_settings(backend):
    option = find_conf() / "backend" / f"{backend.name}.yaml"
    assert yaml.safe_load(option.read_text())["name"] == backend.name
    config = make_config(f"backend={backend.name}")
    assert type(config.backend) is backend.schema
    assert issubclass(resolve_name(backend.quantizer), Quantizer)


@every_quantizing
def test_a_name_alone_does_not_choose_another_backends_settings(backend):
    other = "torch" if backend.name == "onnx" else "onnx"
    if backend.schema is BackendConfig:  # without settings of its own
        assert make_config(f"backend={other}", f"backend.name={backend.name}").backend.name
    else:
        with pytest.raises(ConfigError, match=rf"backend\.name: .* try backend={backend.name}"):
            make_config(f"backend={other}", f"backend.name={backend.name}")


@every_quantizing
def test_its_packages_are_part_of_every_cache_key(backend, monkeypatch):
    assert backend.runtime in backend.packages
    monkeypatch.setattr(machine, "version", lambda package: "1")
    assert {f"version.{name}" for name in backend.packages} <= set(machine.versions.__wrapped__())


@every_quantizing
def test_a_cached_measurement_depends_on_its_code(backend):
    behind = code.closure("resnet8ptq.evaluation.evaluator")
    assert backend.quantizer.partition(":")[0] in behind


@every_quantizing
def test_it_names_its_integer_operators(backend):
    if backend.name in CHOOSES_ITSELF:
        assert not backend.operators
    elif backend.operators or backend.name in SHIPPED:
        assert {"Conv", "MatMul"} <= backend.find_operators()


@every_quantizing
def test_the_search_starts_from_a_configuration_that_it_supports(backend):
    config = make_config(f"backend={backend.name}", *backend.search.start)
    assert quantizer_of(config).resolve().weight_dtype == "int8"


@every_quantizing
def test_a_folder_to_deploy_has_an_example_of_it(backend):
    package = backend.example_package
    runner = templates.load(package, "runner.py.j2", extends="resnet8ptq.deploy")
    assert backend.suffixes
    assert {"imports", "load", "run"} <= set(runner.blocks)
    assert runner.filename
    code_of_user = Path(runner.filename).read_text()
    assert "resnet8ptq" not in code_of_user, "example.py runs where this package is not installed"


@every_backend
def test_it_is_served_without_this_package_or_says_why_not(backend):
    assert bool(backend.serving) != bool(backend.not_served)
    if backend.serving.startswith("resnet8ptq."):
        assert code.closure(backend.serving) == {backend.serving}


@every_backend
def test_its_reader_reads_files_of_other_programs(backend):
    assert bool(backend.reads) == bool(backend.reader)
    if backend.reader:
        for name in ("fetch", "read", "open_run", "open_logits"):
            assert callable(resolve_name(f"{backend.reader}:{name}"))


def test_no_two_backends_read_the_same_files():
    suffixes = [suffix for backend in BACKENDS.values() for suffix in backend.reads]
    assert sorted(suffixes) == sorted(find_readers())


@every_quantizing
def test_advice_names_it(backend):
    settings = [item.settings for item in candidates.advise(("sse2", "avx2"))]
    assert any(f"backend={backend.name}" in words for words in settings)


def test_a_backend_without_advice_is_advised_by_its_start():
    plain = Backend("plain", "", search=Search(start=("dtype=int8",)))
    [candidate] = candidates._advise(plain, (), None)
    assert (candidate.settings, candidate.verdict) == ("backend=plain dtype=int8", candidates.TRY)


# A backend added by one folder (`tests/helpers/toy_backend`) and one YAML


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose `conf/` has the toy's option; the toy itself is among the backends."""
    option = tmp_path / "conf" / "backend" / "toy.yaml"
    option.parent.mkdir(parents=True)
    shutil.copyfile(TOY / "toy.yaml", option)
    monkeypatch.setitem(find_backends(), "toy", toy_backend.BACKEND)
    forget_versions()
    loading.register_schemas()
    yield tmp_path
    forget_versions()


def forget_versions() -> None:
    machine.versions.cache_clear()
    machine.describe.cache_clear()


def succeed(done: Called) -> Called:
    assert done.code == 0, done.err
    return done


@pytest.mark.slow
def test_the_contract_holds_for_a_backend_of_one_folder_and_one_option(tmp_path):
    """In a copy of the project, where a contributor adds it; no list in it names the toy."""
    copy = tmp_path / "project"
    for name in ("resnet8ptq", "hydra_plugins", "conf", "tests"):
        shutil.copytree(REPO / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "run.py"):
        shutil.copyfile(REPO / name, copy / name)
    folder = copy / "resnet8ptq" / "backends" / "toy"
    shutil.copytree(TOY, folder)
    (folder / "toy.yaml").rename(copy / "conf" / "backend" / "toy.yaml")
    for path in folder.glob("*.py"):
        moved = path.read_text().replace("tests.helpers.toy_backend", "resnet8ptq.backends.toy")
        path.write_text(moved)

    command = [sys.executable, "-m", "pytest", "-q", "-k", "toy", *CONTRACT]
    environment = clean_environment(PYTHONPATH=str(copy))
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_a_backend_of_one_folder_and_one_option_is_complete(project):
    words = ("-m", "backend=toy,onnx", "dtype=int8", "backend.path=null")
    done = succeed(call(project, *words, *QUICK, installed=True))
    [ours] = [run for run in done.children if run.data.params["backend"] == "toy"]
    assert ours.data.tags["status"] == "ok"
    assert ours.data.params["execution"] == "simulated"
    assert {"version.filelock", "version.onnxruntime"} <= set(done.result(ours)["tags"])
    files = done.artifacts(ours)
    succeed(call_beside(project, "report"))
    report = done.artifacts(done.parent)["report.md"].read_text()
    assert "toy" in report

    folder = project / "deployed"
    id_ = f"run_id={ours.info.run_id}"
    succeed(call_beside(project, "deploy", id_, f"folder={folder}", "register=a", "verify=false"))
    assert filecmp.cmp(folder / "model.toy", files["model.toy"], shallow=False)
    assert "largest difference" in example.run_example(sys.executable, folder)
    served = load_served(done, ours.info.run_id)
    with np.load(folder / "test_vectors.npz") as vectors:
        (result,) = served.predict(vectors["inputs"]).values()
        np.testing.assert_allclose(result, vectors["output_0"], atol=1e-6)

    network = project / "network.onnx"
    onnx.save(unpack(files["model.toy"].read_bytes()), network)
    judged = ("judge", str(network), str(files["model.toy"]), *QUICK, "max_drop=0.05")
    [verdict] = json.loads(succeed(call_beside(project, *judged, "format=json")).out)
    assert verdict["choice"]["framework"] == "toy file model.toy"

    advice = " ".join(succeed(call_beside(project, "advise", str(network))).out.split())
    assert "backend=toy dtype=int8" in advice


def load_served(done: Called, run_id: str):
    import mlflow

    (output,) = done.client.get_run(run_id).outputs.model_outputs
    mlflow.set_tracking_uri(done.client.tracking_uri)
    return mlflow.pyfunc.load_model(f"models:/{output.model_id}")
