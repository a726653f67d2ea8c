"""What jobs in processes of their own are told, and what they hand back."""

import os
import pickle
import re
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path

import cloudpickle
import pytest
from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import OmegaConf

from hydra_plugins.resnet8ptq_launchers._base import Job, JobsLauncher
from resnet8ptq.core import command, machine
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.sweeps import jobs
from resnet8ptq.sweeps.callback import SweepCallback
from resnet8ptq.tracking.sweep_file import ParallelJobs
from tests.helpers import calling
from tests.helpers.calling import REPO
from tests.helpers.configs import compose_whole

CORES = machine.threads(None)


def plan(*overrides: str) -> ParallelJobs | None:
    return jobs.plan(compose_whole(*overrides).hydra.launcher)


@pytest.mark.parametrize(
    ("overrides", "at_once", "threads"),
    [
        (["hydra/launcher=processes"], CORES, 1),
        (["hydra/launcher=processes", f"hydra.launcher.cpus_per_task={CORES}"], 1, CORES),
        (["hydra/launcher=ray_local"], CORES, 1),
        (
            [
                "hydra/launcher=ray_local",
                "hydra.launcher.ray.init.num_cpus=9",
                "hydra.launcher.ray.remote.num_cpus=4",
            ],
            *(2, 4),
        ),
        (["hydra/launcher=slurm", "hydra.launcher.cpus_per_task=8"], 64, 8),
    ],
)
def test_jobs_times_threads_are_what_the_launcher_has(overrides, at_once, threads):
    result = plan(*overrides)
    assert result is not None
    assert (result.at_once, result.threads) == (at_once, threads)


def test_one_job_after_the_other_stays_in_this_process():
    assert plan() is None


def test_joblib_is_answered_with_its_successor_also_in_a_single_run():
    joblib = {"_target_": "hydra_plugins.hydra_joblib_launcher.JoblibLauncher"}
    config = OmegaConf.create({"hydra": {"launcher": joblib}, "tracking": {"uri": None}})
    with pytest.raises(command.Abort) as caught:
        SweepCallback().on_run_start(config)
    assert re.search(r"got 'joblib'.*try hydra/launcher=processes$", str(caught.value.error))


@pytest.mark.parametrize(
    ("launcher", "setting", "reason"),
    [
        ("processes", "cpus_per_task=1000", f"got 1000, expected 1 to {CORES}"),
        ("ray_local", "ray.remote.num_cpus=0.5", "got 0.5, expected 1 to"),
        ("ray_cluster", "ray.remote.num_cpus=0", "got 0, expected 1 or more"),
        ("slurm", "cpus_per_task=null", "got None, expected 1 or more"),
    ],
)
def test_no_room_for_a_job_is_refused(launcher, setting, reason):
    key = re.escape(setting.partition("=")[0])
    with pytest.raises(ConfigError, match=rf"hydra\.launcher\.{key}: {reason}"):
        plan(f"hydra/launcher={launcher}", f"hydra.launcher.{setting}")


def test_a_job_elsewhere_has_the_variables_and_the_folder(tmp_path, monkeypatch):
    here, secret = str(Path.cwd()), "MLFLOW_TRACKING_PASSWORD"
    monkeypatch.setenv("RESNET8_H5", str(tmp_path))
    monkeypatch.setenv("RESNET8PTQ_CACHE", "a")
    monkeypatch.setenv(secret, "b")
    monkeypatch.setenv("CIFAR10_DIR", str(tmp_path / "nowhere"))  # not for others either
    parallel = ParallelJobs(2, 1, variables=jobs.variables())
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(secret)
    monkeypatch.setenv("RESNET8PTQ_CACHE", "the node's own")
    jobs.enter(parallel)
    assert (os.environ[secret], os.environ["RESNET8PTQ_CACHE"]) == ("b", "the node's own")
    assert str(Path.cwd()) == here
    assert "CIFAR10_DIR" not in parallel.variables

    monkeypatch.setenv("RESNET8_H5", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"^RESNET8_H5: \S+ does not see \S+/nowhere; expected"):
        jobs.enter(parallel)


class Elsewhere(JobsLauncher):
    """Runs each job in another folder, from a copy, as another machine does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, jobs: Sequence[Job]) -> dict[int, JobReturn]:
        with chdir(self.folder):
            return {job.number: pickle.loads(cloudpickle.dumps(job))() for job in jobs}


@pytest.mark.slow
@pytest.mark.parametrize("setting", [(), ("hydra.sweep.dir=relative",)])
def test_a_job_that_starts_elsewhere_writes_to_the_sweeps_folder(tmp_path, setting, monkeypatch):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir(), elsewhere.mkdir()
    monkeypatch.chdir(home)
    launcher = Elsewhere(elsewhere)
    with initialize_config_dir(str(REPO / "conf"), version_base="1.3"), calling.kept_globals():
        loader = GlobalHydra.instance().config_loader()
        sweep = loader.load_configuration("config", [*setting], RunMode.MULTIRUN)
        folder = Path(sweep.hydra.sweep.dir).absolute()
        launcher.setup(
            hydra_context=HydraContext(loader, Callbacks()),
            task_function=lambda _: HydraConfig.get().runtime.output_dir,
            config=sweep,
        )
        results = launcher.launch([["seed=1"], ["seed=2"]], 0)
    assert folder.is_relative_to(home)
    written = [Path(result.return_value) for result in results]
    assert [path.parent for path in written] == [folder] * 2
    assert [path.name[0] for path in written] == ["0", "1"]
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(("plugin", "extra"), [("ray", "ray"), ("submitit_slurm", "slurm")])
def test_a_missing_plugin_names_its_extra(plugin, extra):
    error = HydraException(f"In 'hydra/launcher/x': Could not load 'hydra/launcher/{plugin}'.")
    assert command.explain(error).endswith(
        f"load 'hydra/launcher/{plugin}'; {extra}: pip install -c constraints.txt -e '.[{extra}]'"
    )


class TwoArgumentsError(Exception):
    """Which pickle cannot make again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


@pytest.mark.parametrize(
    ("error", "kind"),
    [(ConfigError("a key"), ConfigError), (TwoArgumentsError("a", "key"), RuntimeError)],
)
def test_every_error_reaches_the_parent_with_its_traceback(error, kind):
    try:
        raise error
    except Exception as raised:
        content = pickle.loads(pickle.dumps(jobs.to_picklable(raised)))
    assert type(content) is kind
    assert "a key" in str(content)
    assert f"raise error\n{''.join(content.__notes__).splitlines()[-1]}" in content.__notes__[0]
