"""Kills a node of a Ray cluster and then a sweep of 48 runs on it, and resumes the sweep.

    python -m studies.cluster [FOLDER]

Two nodes of one CPU each on this machine, on 127.0.0.1. One node is killed after a quarter of the
runs, the sweep after half of them, each with SIGKILL; `sweep.resume=true` runs the rest. Then every
configuration has one finished run, with the numbers of a serial sweep. Takes minutes; needs the
real files (CIFAR10_DIR, RESNET8_H5).
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.equality import same_predictions
from benchmarks.setting import NO_LATENCY, REPO

# 2 x 2 x 3 x 2 x 2; few images, since the accuracy does not matter here.
SWEEP = (
    *("-m", "backend=onnx,torch", "dtype=int8,u8s8", "calib=minmax,percentile,mse"),
    *("per_channel=false,true", "seed=42,43", "calib.samples_per_class=20", NO_LATENCY),
    *("evaluate.split=held_out", "held_out_images=1000", "data.on_missing=error", "threads=1"),
)
RUNS = 48
MEASURED = {
    *("system/quantize_s", "system/evaluate_s", "peak_memory_bytes"),
    *("system/evaluate_batch_size", "system/evaluate_threads", "system/prepare_s"),
}


def say(text: str) -> None:
    """Show progress."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def command(*args: str) -> list[str]:
    """Return the command of the sweep."""
    return [sys.executable, str(REPO / "run.py"), *SWEEP, *args]


def finished(folder: Path) -> list[Any]:
    """Return the finished runs of the sweep in the store below `folder`; empty without one."""
    from resnet8ptq.config.schema import TrackingConfig
    from resnet8ptq.tracking import history
    from resnet8ptq.tracking.mlflow_store.store import open_store

    if not any((folder / "runs" / "sweeps").glob("*/*/sweep.json")):
        return []
    store = open_store(TrackingConfig(root=str(folder / "mlruns")))
    (parent,) = history.find_runs(store, "tags.kind = 'sweep'")
    children = f"tags.`mlflow.parentRunId` = '{parent.run_id}' and attributes.status = 'FINISHED'"
    return history.find_runs(store, children)


def wait_for(runs: int, folder: Path, sweep: "subprocess.Popen[bytes]") -> None:
    """Wait until the sweep has finished `runs` runs.

    Raises:
        RuntimeError: the sweep ended before.
    """
    while len(finished(folder)) < runs:
        if sweep.poll() is not None:
            raise RuntimeError(f"the sweep ended early, with {sweep.returncode}")
        time.sleep(1)


def kill_node(node: Any) -> None:
    """Kill a node's raylet and everything it has started, at once."""
    raylet = node.all_processes["raylet"][0].process.pid
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(raylet)], capture_output=True, text=True, check=False
    )
    for process in [raylet, *map(int, listed.stdout.split())]:
        os.kill(process, signal.SIGKILL)


def wait_for_no_job(folder: Path) -> None:
    """Wait until Ray has ended the jobs of the killed sweep."""
    from resnet8ptq.tracking import journal

    while any(journal.is_alive(path.parent) for path in (folder / "runs").rglob(journal.FILE)):
        time.sleep(0.5)


def run_on_cluster(folder: Path) -> None:
    """Run the sweep, kill a node and then the sweep, and resume it."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        node = cluster.add_node(num_cpus=1)
        launcher = ["hydra/launcher=ray_cluster"]
        launcher.append(f"hydra.launcher.ray.init.address={cluster.address}")
        with subprocess.Popen(command(*launcher), cwd=folder) as sweep:
            wait_for(RUNS // 4, folder, sweep)
            kill_node(node)
            say(f"killed a node after {len(finished(folder))} runs")
            wait_for(RUNS // 2, folder, sweep)
            sweep.kill()
        say(f"killed the sweep after {len(finished(folder))} runs")
        wait_for_no_job(folder)
        start = time.perf_counter()
        done = subprocess.run(
            command(*launcher, "sweep.resume=true"), cwd=folder, stdout=subprocess.PIPE, text=True
        )
        say(f"resumed: exit code {done.returncode}, {time.perf_counter() - start:.0f} s")
        print(*[line for line in done.stdout.splitlines() if "kipped" in line], sep="\n")
    finally:
        cluster.shutdown()


def compare(serial: Sequence[Any], clustered: Sequence[Any]) -> None:
    """Compare the runs on the cluster with those of the serial sweep.

    Raises:
        RuntimeError: a run is missing or duplicated, or a number differs.
    """
    sides = []
    for runs in (serial, clustered):
        by_number = {int(run.tags["job_number"]): run for run in runs}
        if len(runs) != RUNS or sorted(by_number) != list(range(RUNS)):
            raise RuntimeError(f"{len(runs)} runs of {len(by_number)} jobs, not {RUNS}, once each")
        sides.append(by_number)
    for number in range(RUNS):
        one, other = sides[0][number], sides[1][number]
        for kind in ("params", "metrics"):
            left, right = (
                {key: value for key, value in getattr(run, kind).items() if key not in MEASURED}
                for run in (one, other)
            )
            left.pop("sweep.resume", None), right.pop("sweep.resume", None)
            if left != right:
                keys = {key for key in left | right if left.get(key) != right.get(key)}
                raise RuntimeError(f"job {number}: {kind} differ: {', '.join(sorted(keys))}")
        if not same_predictions(Path(one.tags["folder"]), Path(other.tags["folder"])):
            raise RuntimeError(f"job {number}: predictions differ")


def main(root: Path) -> None:
    """Run the sweep serially and on the cluster, and compare the runs."""
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # everything on 127.0.0.1
        "OMP_NUM_THREADS": "1",  # as for a task of one CPU
    }
    os.environ.update(settings)  # before Ray is imported
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    serial, clustered = root / "serial", root / "cluster"
    for folder in (serial, clustered):
        folder.mkdir(parents=True)
    start = time.perf_counter()
    subprocess.run(command(), cwd=serial, check=True, stdout=subprocess.DEVNULL)
    say(f"serial: {len(finished(serial))} runs, {time.perf_counter() - start:.0f} s")
    run_on_cluster(clustered)
    compare(finished(serial), finished(clustered))
    print(f"{RUNS} configurations, each finished once, with the numbers of a serial sweep")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]).absolute())
    else:
        with tempfile.TemporaryDirectory() as name:
            main(Path(name))
