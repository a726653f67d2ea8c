"""The tool outside its checkout: a wheel, a project of one's own, its options and modules."""

import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from resnet8ptq.config.words import check_and_arrange
from resnet8ptq.core import isolation
from tests.helpers.calling import QUICK, REPO, call, call_beside, clean_environment
from tests.helpers.originals import start_isolated

CONF = REPO / "conf"
METRIC = """
def right(outputs, labels):
    return (outputs.argmax(1) == labels) * 1.0
"""
NETWORK = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 10, 3, stride=4)

    def forward(self, pictures):
        return self.convolution(pictures / 255).mean((2, 3)).softmax(1)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a space and an umlaut in its path, an option, an experiment and modules."""
    folder = tmp_path / "ein Ördner"
    for name, text in {
        "conf/calib/few.yaml": "defaults: [minmax]\nsamples_per_class: 10\n",
        "conf/calib/percentile.yaml": "name: percentile\n",
        "conf/experiment/two.yaml": "# @package _global_\ndefaults: [override /calib: few]\n",
        "conf/config.yaml": "not: used",
        "own_metric_here.py": METRIC,
        "own_nets_here.py": NETWORK,
        "secrets.py": "raise ImportError('shadows the standard library')",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of the wheel, as pip would install it."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--no-build-isolation",) if find_spec("hatchling") else ()
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", *options, "-w", str(folder), str(REPO)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if built.returncode and not options:
        pytest.skip("needs hatchling, or a package index to get it from")
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "site")
    return folder / "site"


def list_tracked(*folders: str) -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", *folders], cwd=REPO, capture_output=True, text=True, timeout=60
    )
    if listed.returncode:
        pytest.skip("no git checkout")
    return {name for name in listed.stdout.split("\0") if name and (REPO / name).exists()}


def test_the_wheel_has_each_file_of_the_packages_and_of_conf(unpacked):
    files = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    expected = list_tracked("resnet8ptq", "hydra_plugins")
    expected |= {f"resnet8ptq/{name}" for name in list_tracked("conf")}
    assert {name for name in files if ".dist-info/" not in name} == expected
    assert {
        *("resnet8ptq/conf/config.yaml", "resnet8ptq/data/shapes/resnet8.h5"),
        *("resnet8ptq/report/pages/templates/report.md.j2", "resnet8ptq/starter/files/mine.yaml"),
        "hydra_plugins/resnet8ptq_launchers/search_path.py",
    } <= files
    (points,) = unpacked.glob("*.dist-info/entry_points.txt")
    assert "resnet8ptq = resnet8ptq.__main__:main" in points.read_text()


@pytest.mark.slow
def test_the_wheel_runs_in_another_folder(unpacked, project):
    shown = "import resnet8ptq; from resnet8ptq.config import folders; print(folders.find_conf())"
    words = ("experiment=two", "task=custom", "task.metric._target_=own_metric_here.right", *QUICK)
    for command in (("-c", shown), ("-m", "resnet8ptq", "run", *words)):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=project,
            env=clean_environment(PYTHONPATH=str(unpacked)),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        if command[0] == "-c":
            assert Path(done.stdout.strip()) == unpacked / "resnet8ptq" / "conf"
    assert (project / "mlruns" / "mlflow.db").is_file()
    assert list((project / "runs").rglob("result.json"))
    assert "python -m resnet8ptq ui" in done.stdout


def test_options_of_the_folder_are_known(project):
    own = project / "conf"
    assert check_and_arrange(["calib=few", "experiment=two"], CONF, own) == [
        "calib=few",
        "experiment=two",
    ]
    done = call_beside(project, "run", "calib=fwe")
    assert (done.code, len(done.errors)) == (2, 1)
    assert "percentile | few (nearest: few)" in done.errors[0]


def test_options_of_the_folder_are_in_the_help(project):
    for topic in ("calib", "all"):
        done = call_beside(project, "run", "--help", topic)
        assert done.code == 0
        assert "  calib=few" in done.out.splitlines()
    assert "  resnet8ptq run experiment=published " in done.out
    chosen = call_beside(project, "run", "calib=few", "--help")
    lines = chosen.out.splitlines()
    keys = lines[lines.index("Keys of calib=few") + 2 :]
    assert [line for line in keys if "calib.samples_per_class=10" in line]


def test_an_option_with_the_name_of_the_packages_own_is_refused(project):
    done = call_beside(project, "run", "calib=percentile")
    assert (done.code, len(done.errors)) == (2, 1)
    assert (
        "calib: got 'percentile', an option of the package and conf/calib/percentile.yaml"
        in (done.errors[0])
    )


def test_the_packages_own_conf_adds_nothing(tmp_path):
    done = call_beside(REPO, "run", "--cfg", "job", "calib=percentile")
    assert done.code == 0, done.err


@pytest.mark.slow
def test_jobs_of_other_processes_find_its_options_and_modules(project):
    words = ("calib=few,entropy", "task=custom", "task.metric._target_=own_metric_here.right")
    done = call(project, "-m", "hydra/launcher=processes", *words, *QUICK, installed=True)
    assert done.code == 0, done.err
    assert [run.data.tags["status"] for run in done.children] == ["ok", "ok"]


@pytest.mark.slow
def test_a_network_of_the_folder_is_read(project, monkeypatch):
    monkeypatch.setattr(isolation, "start", start_isolated)
    weights = {"convolution.weight": torch.randn(10, 3, 3, 3), "convolution.bias": torch.zeros(10)}
    torch.save(weights, project / "weights.pt")
    words = ("model.module=own_nets_here.Net", "model.state_dict=weights.pt", *QUICK)
    done = call(project, *words, installed=True)
    assert done.code == 0, done.err
