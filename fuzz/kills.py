"""Kills small sweeps at random moments, resumes them, and compares them with an unkilled sweep.

    python -m fuzz.kills                 20 kills with the seeds 0 to 19
    python -m fuzz.kills 5 100           5 kills with the seeds 100 to 104

A seed chooses the sweep, the moment of SIGKILL, and whether the resumed sweep is killed as well. A
sweep passes if `sweep.resume=true`, `sync` and `report` end with code 0, if runs and verdicts are
those of the unkilled sweep, and if every file can be read. The folders of sweeps that do not pass
are kept.
"""

import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image

QUICK = (
    *("data=shapes", "latency.enabled=false", "evaluate.split=held_out", "held_out_images=500"),
    *("calib.samples_per_class=20", "report.max_drop=0.02"),
)
SWEEPS = (
    ("backend=onnx", "dtype=int8,uint8,u8s8"),
    ("backend=onnx,torch", "dtype=int8"),
    ("backend=onnx", "dtype=int8", "calib=minmax,mse", "per_channel=false,true"),
)
MOMENTS = ("any", "drawing", "reporting")  # drawing: soon after a run; reporting: after the last
COMPARED = ("status", "accuracy", "drop", "size_bytes", "kl_divergence", "artifact_sha256")
LIMIT_S = 600


def main() -> int:
    """Run the kills, and print a line for each and the counts; return the exit code."""
    count, first = (int(word) for word in [*sys.argv[1:], "20", "0"][:2])
    root = Path(tempfile.mkdtemp(prefix="kills-"))
    expected: dict[int, tuple[list[list[str]], float]] = {}
    outcomes: Counter[str] = Counter()
    for seed in range(first, first + count):
        chance = random.Random(seed)
        number = chance.randrange(len(SWEEPS))
        if number not in expected:
            expected[number] = run_whole(root / f"whole{number}", SWEEPS[number])
        outcome = kill_and_resume(root / str(seed), SWEEPS[number], chance, *expected[number])
        print(f"seed {seed}: {outcome}", flush=True)
        outcomes[outcome.partition(":")[0]] += 1
    print(", ".join(f"{number} {name}" for name, number in outcomes.items()))
    if set(outcomes) == {"same"}:
        shutil.rmtree(root)
        return 0
    print(f"folders: {root}")
    return 1


def run_whole(folder: Path, words: tuple[str, ...]) -> tuple[list[list[str]], float]:
    """Run a sweep that is not killed, twice; return its table and the seconds of the second."""
    for part in ("cold", "warm"):
        (folder / part).mkdir(parents=True)
        begun_s = time.monotonic()
        assert call(folder / part, *sweep(words)) == 0, folder
    return read_table(folder / "warm"), time.monotonic() - begun_s


def kill_and_resume(
    folder: Path,
    words: tuple[str, ...],
    chance: random.Random,
    expected: list[list[str]],
    seconds: float,
) -> str:
    """Kill a sweep once or twice, resume it, and return the outcome in a line."""
    folder.mkdir()
    resumed = (*sweep(words), "sweep.resume=true")
    states = [kill(folder, sweep(words), chance, seconds)]
    if chance.random() < 0.4:
        states.append(kill(folder, resumed, chance, seconds))
    said = f"killed {', then '.join(states)}"
    for command in (resumed, ("sync",), ("report",)):
        if code := call(folder, *command):
            return f"{command[0]} failed: code {code}, {said}"
    if read_table(folder) != expected:
        return f"another table: {said}"
    if damaged := find_damaged(folder):
        return f"damaged: {', '.join(map(str, damaged))}, {said}"
    shutil.rmtree(folder)
    return f"same: {said}"


def sweep(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command of a sweep."""
    return ("run", "-m", *words, *QUICK)


def start(folder: Path, *words: str) -> "subprocess.Popen[bytes]":
    """Start a command in a folder; its output is in `log.txt`."""
    log = (folder / "log.txt").open("ab")
    command = [sys.executable, "-m", "resnet8ptq", *words]
    environment = {**os.environ, "CIFAR10_DIR": "", "RESNET8_H5": ""}
    return subprocess.Popen(
        command, cwd=folder, stdout=log, stderr=log, env=environment, start_new_session=True
    )


def call(folder: Path, *words: str) -> int:
    """Run a command to its end; return its exit code."""
    return start(folder, *words).wait(LIMIT_S)


def kill(folder: Path, words: tuple[str, ...], chance: random.Random, seconds: float) -> str:
    """Start a sweep and kill it; return the moment and the number of finished runs."""
    moment = chance.choice(MOMENTS)
    before = count_finished(folder)
    process = start(folder, *words)
    if moment == "any":
        wait(process, chance.uniform(0, 1.1 * seconds))
    else:
        wanted = before + 1 if moment == "drawing" else sweep_size(words)
        while process.poll() is None and count_finished(folder) < wanted:
            time.sleep(0.01)
        wait(process, chance.uniform(0, 0.2 * seconds))
    ended = process.poll() is not None
    if not ended:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    time.sleep(0.5)  # for the background process to end
    at = "after its end" if ended else moment
    return f"{at} with {count_finished(folder)} of {sweep_size(words)} finished"


def wait(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Wait for some seconds, at most until the process ends."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def sweep_size(words: tuple[str, ...]) -> int:
    """Return the number of jobs of a sweep."""
    return int(np.prod([word.count(",") + 1 for word in words]))


def count_finished(folder: Path) -> int:
    """Return the number of runs whose own record says that they finished."""
    records = [json.loads(path.read_text()) for path in folder.glob("runs/**/[0-9]*_*/record.json")]
    return sum(record["status"] == "FINISHED" for record in records)


def read_table(folder: Path) -> list[list[str]]:
    """Return the runs of the newest report, with the values that no timing changes."""
    newest = max(folder.glob("runs/sweeps/*/*/runs.csv"), key=lambda path: path.stat().st_mtime_ns)
    with newest.open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = [name for name in rows[0] if name.rpartition("/")[2] in COMPARED]
    report = newest.with_name("report.md").read_text()
    verdicts = [line for line in report.splitlines() if line.startswith("- Limit: ")]
    return [columns, *([row[name] for name in columns] for row in rows), verdicts]


def find_damaged(folder: Path) -> list[Path]:
    """Return the files of runs and of their artifacts that cannot be read."""
    damaged = []
    for path in [*folder.glob("runs/**/*"), *folder.glob("mlruns/artifacts/**/*")]:
        try:
            check(path)
        except Exception:
            damaged.append(path.relative_to(folder))
    return damaged


def check(path: Path) -> None:
    """Read a file whole; raise an error if it is damaged."""
    if path.name.startswith("."):  # a temporary file of a killed process
        return
    match path.suffix:
        case ".png":
            with Image.open(path) as picture:
                picture.load()
        case ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                _ = [arrays[name] for name in arrays]
        case ".json":
            json.loads(path.read_text())
        case ".onnx":
            import onnx

            onnx.checker.check_model(onnx.load(path))


if __name__ == "__main__":
    sys.exit(main())
