"""A Slurm of one machine, as far as submitit sees one: sbatch, srun, sacct and scancel on PATH.

Jobs run one after the other and, as those of a cluster may, inherit no environment.
"""

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

KEPT = ("PATH", "HOME", "PYTHONPATH")


def install(folder: Path) -> Path:
    """Write the commands; return the folder to put on PATH."""
    folder.mkdir()
    for name in ("sbatch", "srun", "sacct", "scancel"):
        path = folder / name
        path.write_text(
            f"#!{sys.executable}\nimport sys\nsys.path.append({str(Path(__file__).parent)!r})\n"
            f"import slurm\nslurm.{name}(slurm.Path(__file__).parent, sys.argv[1:])\n"
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return folder


def sbatch(folder: Path, args: list[str]) -> None:
    """Start the tasks of an array in the background."""
    script = Path(args[0])
    shutil.copy(script, folder / "script.sh")
    array = re.search(r"--array=0-(\d+)", script.read_text())
    tasks = range(int(array[1]) + 1) if array else [0]
    jobs = [f"7_{task}" if array else "7" for task in tasks]
    code = "import sys, slurm; slurm.run(slurm.Path(sys.argv[1]), sys.argv[2:])"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", code, folder, *jobs],
            env={name: os.environ[name] for name in KEPT if name in os.environ}
            | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path[1:]])},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    (folder / "pid").write_text(str(process.pid))
    print("Submitted batch job 7")


def run(folder: Path, jobs: list[str]) -> None:
    """Run the tasks of an array, and keep their states."""
    for job in jobs:
        array, _, task = job.partition("_")
        told = {"SLURM_JOB_ID": job.replace("_", ""), "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
        told |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
        if task:
            told |= {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": task}
        else:
            told |= {"SLURM_JOB_ID": array}
        code = subprocess.call(["bash", folder / "script.sh"], env={**os.environ, **told})
        (folder / f"{job}.state").write_text("FAILED" if code else "COMPLETED")


def srun(folder: Path, args: list[str]) -> None:
    """Become the command, with its output where `--output` and `--error` say."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    names = {"%j": os.environ["SLURM_JOB_ID"], "%A": array or "", "%a": task or "", "%t": "0"}
    for option, target in (("--output", sys.stdout), ("--error", sys.stderr)):
        path = args[args.index(option) + 1]
        for short, value in names.items():
            path = path.replace(short, value)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), target.fileno())
    command = args[args.index("--error") + 2 :]
    os.execvp(command[0], command)


def sacct(folder: Path, args: list[str]) -> None:
    """Print the states of the tasks that have ended."""
    print("JobID|State|NodeList")
    for path in sorted(folder.glob("*.state")):
        print(f"{path.stem}|{path.read_text()}|here")


def scancel(folder: Path, args: list[str]) -> None:
    """End all of them."""
    os.killpg(int((folder / "pid").read_text()), 9)
