"""A Slurm of one node: the daemons of Debian's packages, on this machine's loopback alone.

Jobs inherit, as those of a cluster may, next to nothing of the environment.
"""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

PACKAGES = "slurmctld slurmd slurm-client munge"
MUNGE = "munge"  # a user, for munged refuses to run as root
CONF = """
ClusterName=tests
SlurmctldHost=localhost
SlurmctldPort={0}
SlurmdPort={1}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdParameters=config_overrides
NodeName=localhost CPUs=2 RealMemory=4096
PartitionName=all Nodes=ALL Default=YES
"""


class Cluster:
    """A running one, which the commands of Slurm find by the environment."""

    def __iter__(self) -> Iterator[int]:
        """Go through the processes of its jobs."""
        for line in call("scontrol", "listpids").splitlines()[1:]:
            yield int(line.split()[0])

    def list_jobs(self, *states: str) -> list[str]:
        """Return the ids of the jobs in these states."""
        return call("squeue", "-h", "-r", "-o%i", f"--states={','.join(states)}").split()

    def cancel(self, job_id: str) -> None:
        call("scancel", job_id)

    def kill_jobs(self) -> None:
        """Kill every job, and return when none is left."""
        call("scancel", "--me", "--state=PENDING")
        call("scancel", "--me", "--full", "--signal=KILL")
        while self.list_jobs("PENDING", "RUNNING", "COMPLETING"):
            pass


def call(*words: str) -> str:
    # `scontrol listpids` fails where there are none.
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


@contextmanager
def run() -> Iterator[Cluster]:
    """Start one, and end it with all of its jobs."""
    if os.getuid() or not all(map(shutil.which, ("munged", "slurmctld", "slurmd", "sbatch"))):
        pytest.skip(f"needs root, and Slurm (apt-get install {PACKAGES})")
    with (
        TemporaryDirectory() as name,
        (Path(name) / "log").open("w+") as log,
        pytest.MonkeyPatch.context() as patch,
        ExitStack() as daemons,
    ):
        folder = Path(name)
        folder.chmod(0o755)
        write_conf(folder)
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        patch.setenv("SBATCH_EXPORT", "PATH,HOME,PYTHONPATH")
        known = {key: os.environ[key] for key in ("PATH", "SLURM_CONF")}
        files = ("socket", "key-file", "pid-file", "log-file", "seed-file")
        munged = ["munged", "--foreground", *(f"--{f}={folder}/munge/{f}" for f in files)]
        started = []
        for words, user in (
            (munged, MUNGE),
            (["slurmctld", "-D"], "root"),
            (["slurmd", "-D", "-N", "localhost"], "root"),
        ):
            process = subprocess.Popen(words, env=known, stdout=log, stderr=log, user=user)
            started.append(daemons.enter_context(process))
            daemons.callback(process.terminate)
        cluster = Cluster()
        daemons.callback(cluster.kill_jobs)
        while subprocess.run(["scontrol", "ping"], capture_output=True, check=False).returncode:
            if any(process.poll() is not None for process in started):
                log.seek(0)
                pytest.fail(log.read())
        yield cluster


def write_conf(folder: Path) -> None:
    """Write its configuration, with free ports, and munge's key."""
    with socket.socket() as one, socket.socket() as other:
        ports = []
        for probe in (one, other):
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    (folder / "slurm.conf").write_text(CONF.format(*ports, folder=folder))
    munge = folder / "munge"
    munge.mkdir()
    key = munge / "key-file"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    for path in (munge, key):
        shutil.chown(path, MUNGE, MUNGE)
