"""`resnet8ptq ship` against single recipes and other tools: `python -m studies.kinds`.

    python -m studies.kinds                          every network, then the tables
    python -m studies.kinds networks=lstm,vit        some of them
    python -m studies.kinds steps=recipes            recipes | one_liners | ship | times
    python -m studies.kinds report=true              only the tables, from kinds.csv

The measurements are kept in kinds.csv and not repeated. Networks whose package or data is absent
are skipped with a message. CIFAR10_DIR and SHARED_NETWORKS name published data and networks.
`folder` keeps networks, samples and files.
"""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hydra import initialize_config_dir
from omegaconf import OmegaConf

from benchmarks.setting import REPO
from resnet8ptq.config import loading
from resnet8ptq.core import command, files
from resnet8ptq.experiment.network_and_data import load_data_and_network
from resnet8ptq.experiment.samples import draw_to_calibrate
from resnet8ptq.results import load_sweep
from studies.kinds import records, tables
from studies.kinds.measuring import (
    ONE_LINER,
    RECIPE,
    SHIP,
    Row,
    compose_settings,
    find_worse,
    measure,
    time_in_turns,
)
from studies.kinds.one_liners import ONE_LINERS, make_feeds, ort_dynamic
from studies.kinds.recipes import RECIPES
from studies.kinds.registry import NETWORKS
from studies.kinds.subjects import AbsentError

RECORD = REPO / "studies" / "kinds.csv"
STEPS = ("recipes", "one_liners", "ship", "times")


@dataclass
class Arguments:
    """The key=value arguments of `python -m studies.kinds`; lists with commas."""

    networks: str = ",".join(NETWORKS)
    steps: str = ",".join(STEPS)
    goal: str = "fastest"
    minutes: float = 2
    folder: str = "runs/ship"
    record: str = str(RECORD)
    report: bool = False


@dataclass
class Bench:
    """The files and rows of one network.

    Attributes:
        words: the settings that name network and data, and one thread.
        save: writes the rows, so that an interrupted study can continue.
    """

    name: str
    words: list[str]
    folder: Path
    rows: list[Row]
    save: Callable[[Sequence[Row]], None]

    def has(self, source: str, name: str) -> bool:
        """Whether a row is measured already."""
        return any(row.source == source and row.name == name for row in self.rows)

    def start(self, source: str, name: str) -> Row:
        """Return an empty row."""
        return Row(self.name, NETWORKS[self.name].kind, source, name)

    def keep(self, row: Row) -> None:
        """Add a row, write it, and report it."""
        self.rows.append(row)
        self.save(self.rows)
        loss = row.reason if not row.measured else f"loss {row.loss:.4g}, {row.bytes} bytes"
        print(f"{self.name}, {row.source} {row.name}: {loss}", file=sys.stderr, flush=True)

    def files(self) -> list[tuple[Row, Path]]:
        """Return the measured rows whose files are in the folder; others keep their times."""
        measured = [(row, self.path(row)) for row in self.rows if row.measured]
        return [(row, path) for row, path in measured if path.exists()]

    def run_folder(self, row: Row) -> Path:
        """Return the folder of a row's run."""
        return self.folder / row.source / row.name.replace(" ", "_").replace(",", "")

    def path(self, row: Row) -> Path:
        """Return the file of a row."""
        for word in shlex.split(row.words):
            key, _, value = word.partition("=")
            if key == "backend.path":
                return Path(value)
        return self.run_folder(row) / "model.onnx"


def main() -> int:
    """Measure the rows that the record lacks, then print the tables."""
    asked = command.parse_words(sys.argv[1:], Arguments, __doc__ or "")
    record = Path(asked.record)
    folders = {"$FOLDER": str(Path(asked.folder).absolute())}
    if os.environ.get("SHARED_NETWORKS"):
        folders["$SHARED_NETWORKS"] = os.environ["SHARED_NETWORKS"]
    rows = records.read_rows(record, folders)
    loading.register_schemas()
    with initialize_config_dir(str(REPO / "conf"), version_base=None):
        for name in [] if asked.report else asked.networks.split(","):
            mine = [row for row in rows if row.network == name]
            others = [row for row in rows if row.network != name]
            save = partial(_save, record, folders, others)
            try:
                bench = make_bench(name, Path(asked.folder).absolute() / name, mine, save)
            except AbsentError as error:
                print(f"{name}: skipped, absent: {error}", file=sys.stderr)
                continue
            take_steps(bench, asked)
            rows = [*others, *bench.rows]
            save(bench.rows)
    print(tables.render(rows))
    return 0


def _save(
    record: Path, folders: Mapping[str, str], others: Sequence[Row], mine: Sequence[Row]
) -> None:
    records.write_rows(record, [*others, *mine], folders)


def make_bench(
    name: str, folder: Path, rows: list[Row], save: Callable[[Sequence[Row]], None]
) -> Bench:
    """Make the network and its samples, or find those of an earlier call."""
    made = folder / "words.txt"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        words = NETWORKS[name].make(folder)
        files.write_text(made, shlex.join(words))
    return Bench(name, [*shlex.split(made.read_text()), "threads=1"], folder, rows, save)


def take_steps(bench: Bench, asked: Arguments) -> None:
    """Make and measure the rows that a network lacks."""
    steps = asked.steps.split(",")
    if "recipes" in steps:
        try_recipes(bench)
    if "one_liners" in steps:
        try_one_liners(bench)
    if "ship" in steps and not bench.has(SHIP, asked.goal):
        ship(bench, asked.goal, asked.minutes)
    if "times" in steps:
        bench.rows[:] = compare(bench)


def try_recipes(bench: Bench) -> None:
    """Quantize by each recipe of this tool."""
    for name, recipe in RECIPES.items():
        if not bench.has(RECIPE, name):
            row = bench.start(RECIPE, name)
            bench.keep(measure(row, [*bench.words, *recipe], bench.run_folder(row)))


def try_one_liners(bench: Bench) -> None:
    """Quantize by each call of another tool, on this tool's FP32 network and calibration draw."""
    settings = compose_settings(bench.words)
    source = Path(settings.config.model.path or "")
    missing = [name for name in ONE_LINERS if not bench.has(ONE_LINER, name)]
    if source.suffix != ".tflite":
        missing = [name for name in missing if ONE_LINERS[name][0] != ".tflite"]
    if not missing:
        return
    data, network = load_data_and_network(settings)
    calibrating = draw_to_calibrate(settings.config, data).split
    feeds = make_feeds(calibrating, [value.name for value in network.contract.inputs])
    for name in missing:
        suffix, make = ONE_LINERS[name]
        row = bench.start(ONE_LINER, name)
        folder = bench.run_folder(row)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"theirs{suffix}"
        try:
            make(source if suffix == ".tflite" else network.onnx_path, feeds, target)
        except Exception as error:  # another tool may raise any
            bench.keep(replace(row, reason=f"{type(error).__name__}: {error}"[:200]))
            continue
        words = [*bench.words, "backend=file", f"backend.path={target}"]
        if make is ort_dynamic:
            words.append("evaluate.batch_size=1")  # a batch sets its ranges
        bench.keep(measure(row, words, folder))


def ship(bench: Bench, goal: str, minutes: float) -> None:
    """Ship the network by one command, and score its winner on the samples of the other files."""
    sweep = bench.folder / f"ship_{goal}"
    row = bench.start(SHIP, goal)
    words = [*bench.words, f"goal={goal}", f"minutes={minutes:g}"]
    kept = [f"tracking.root={bench.folder / 'mlruns'}", f"hydra.sweep.dir={sweep}"]
    begin = time.monotonic()
    called = subprocess.run(
        [sys.executable, "-m", "resnet8ptq", "ship", *words, *kept],
        capture_output=True,
        text=True,
        check=False,
    )
    took = (time.monotonic() - begin) / 60
    files.write_text(bench.folder / "ship.log", called.stdout + called.stderr)
    written = [path for path in sweep.glob("winner.*") if path.suffix != ".yaml"]
    if len(written) != 1:
        last = (called.stderr or called.stdout).strip().splitlines()[-1:]
        bench.keep(replace(row, reason=f"exit code {called.returncode}: {' '.join(last)}"))
        return
    scored = [*bench.words, "backend=file", f"backend.path={written[0]}"]
    settings = OmegaConf.to_container(OmegaConf.load(sweep / "winner.yaml"))
    if isinstance(settings, dict) and settings.get("method") == "dynamic":
        scored.append("evaluate.batch_size=1")
    measured = measure(row, scored, bench.run_folder(row))
    verdict = find_verdict(sweep)
    bench.keep(replace(measured, verdict=verdict, minutes=took))


def find_verdict(sweep: Path) -> str:
    """Return the verdict of the last confirmation."""
    confirmed = [run for run in load_sweep(folder=sweep).runs if run.samples_from == "test"]
    verdicts = [run.verdict for run in confirmed if run.verdict]
    return verdicts[-1] if verdicts else "not confirmed"


def compare(bench: Bench) -> list[Row]:
    """Return the rows with latencies, and the winner's test against its rival."""
    files = bench.files()
    timed = time_in_turns(files)
    kept = [row for row, _ in files]
    rows = [row for row in bench.rows if row not in kept]
    for row in timed:
        rival = tables.find_rival(row, timed) if row.source == SHIP else None
        if rival is None:
            rows.append(row)
            continue
        p_worse = find_worse(bench.run_folder(row), bench.run_folder(rival), bench.words)
        rows.append(replace(row, p_worse=p_worse))
    return rows


if __name__ == "__main__":
    sys.exit(main())
