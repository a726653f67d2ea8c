"""Stores of real size: a run, a report and a resumed sweep beside many other runs.

The other runs are copies of those of a real sweep, straight into MLflow's tables: the same rows
with ids of their own. The sweep that is reported on is made of copies too, each with a seed,
predictions, artifacts and a folder of its own.

    python -m studies.stores               measure, and print the tables (minutes)
    python -m studies.stores ROOT SWEEP    what calls take in the store at ROOT, for a sweep's id
"""

import hashlib
import json
import re
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks import process
from benchmarks.setting import Record, Setting
from benchmarks.tables import spread, table

OTHERS = (100, 1_000, 10_000)  # runs beside those of the sweep
DRAWS = 42  # of the sweep reported on, whose configurations are those of experiment=grid
REPEATS = 3  # of a call; in the first, SQLAlchemy compiles its statements
READ = ("predictions.npz", "choice.npz")  # by the report, of each run; and:
FILES = (*READ, "ranges.json", "confusion.png", "classes.png")
# What moves with the number of hits, on the samples reported on and behind `choice/`.
_HITS = ("accuracy", "expected_accuracy", "ci95/delta_low", "ci95/delta_high")
_ID = re.compile(r"[0-9a-f]{32,64}")
_RUNS = (
    "(SELECT run_uuid FROM tags WHERE key = 'mlflow.parentRunId' AND value = :sweep "
    "UNION SELECT :sweep)"
)
_INPUTS = f"(SELECT input_uuid FROM inputs WHERE {{}}_id IN {_RUNS})"
_BOTH = f"input_uuid IN {_INPUTS.format('source')} OR input_uuid IN {_INPUTS.format('destination')}"
_MODELS = f"(SELECT model_id FROM logged_models WHERE source_run_id IN {_RUNS})"
_ROWS = {  # table -> the rows of a sweep in it
    **dict.fromkeys(("runs", "params", "tags"), f"run_uuid IN {_RUNS}"),
    **dict.fromkeys(("metrics", "latest_metrics"), f"run_uuid IN {_RUNS}"),
    **dict.fromkeys(("inputs", "input_tags"), _BOTH),
    **dict.fromkeys(("logged_models", "logged_model_params"), f"model_id IN {_MODELS}"),
    "logged_model_tags": f"model_id IN {_MODELS}",
}


class Copier:
    """A finished sweep in an SQLite store, and copies of it.

    Args:
        database: a copy of the store's.
        root: where the store itself lies.

    Attributes:
        jobs: ids of its runs.
    """

    def __init__(self, database: Path, root: Path) -> None:
        self.connection = sqlite3.connect(database)
        self.connection.execute("PRAGMA synchronous = OFF")
        moved = "UPDATE runs SET artifact_uri = replace(artifact_uri, ?, ?)"
        self.connection.execute(moved, (str(root), str(database.parent)))
        moved = "UPDATE experiments SET artifact_location = replace(artifact_location, ?, ?)"
        self.connection.execute(moved, (str(root), str(database.parent)))
        oldest = (
            "SELECT run_uuid FROM tags JOIN runs USING (run_uuid) WHERE key = 'kind' "
            "ORDER BY start_time LIMIT 1"
        )
        self.parent_id = self.read(oldest)
        self._rows = {
            name: self.connection.execute(
                f"SELECT * FROM {name} WHERE {condition}", {"sweep": self.parent_id}
            ).fetchall()
            for name, condition in _ROWS.items()
        }
        runs = [row[0] for row in self._rows["runs"]]
        self.jobs = [run for run in runs if run != self.parent_id]
        unique = ("record", "identity", "sweep_key")
        own = [value for key, value, _ in self._rows["tags"] if key in unique]
        models = [row[0].removeprefix("m-") for row in self._rows["logged_models"]]
        self._ids = {*runs, *own, *models, *(row[0] for row in self._rows["inputs"])}

    def read(self, statement: str, *values: object) -> str:
        """Return one value."""
        return str(self.connection.execute(statement, values).fetchone()[0])

    def translate(self, text: str, sweep: str, draw: int) -> str:
        """Return a text with the ids of a copy; the parent run is the same in every draw."""

        def fresh(match: re.Match[str]) -> str:
            if (original := match[0]) not in self._ids:
                return original
            salt = sweep if original == self.parent_id else f"{sweep} {draw}"
            return hashlib.sha256(f"{salt} {original}".encode()).hexdigest()[: len(original)]

        return _ID.sub(fresh, text)

    def copy(self, sweep: str, draw: int = 0) -> str:
        """Add copies of all runs to a sweep; return its id."""
        for name, rows in self._rows.items():
            fresh = (
                [self.translate(x, sweep, draw) if isinstance(x, str) else x for x in row]
                for row in rows
            )
            marks = ", ".join("?" * len(rows[0]))
            self.connection.executemany(f"INSERT OR IGNORE INTO {name} VALUES ({marks})", fresh)
        self.connection.commit()
        return self.translate(self.parent_id, sweep, draw)


def add_sweep(copier: Copier, folder: Path, draws: int) -> str:
    """Add a sweep whose runs have seeds, predictions, artifacts and folders of their own.

    Args:
        folder: of the sweep, to be made.

    Returns:
        The id of its parent run.
    """
    folder.mkdir()
    edit = copier.connection.execute
    for draw in range(draws):
        parent_id = copier.copy("large", draw)
        for job, source in enumerate(copier.jobs):
            run_id, number = copier.translate(source, "large", draw), draw * len(copier.jobs) + job
            seed = "UPDATE params SET value = ? WHERE run_uuid = ? AND key = 'seed'"
            edit(seed, (str(draw + 1), run_id))
            _copy_folder(copier, source, run_id, draw, folder / str(number))
            for tag in (("job_number", str(number)), ("folder", str(folder / str(number)))):
                edit("UPDATE tags SET value = ?2 WHERE run_uuid = ?3 AND key = ?1", (*tag, run_id))
            _copy_artifacts(copier, source, run_id, number)
    _copy_folder(copier, copier.parent_id, parent_id, 0, folder)
    edit(
        "UPDATE tags SET value = ? WHERE run_uuid = ? AND key = 'folder'", (str(folder), parent_id)
    )
    copier.connection.commit()
    return parent_id


def _copy_folder(copier: Copier, source: str, run_id: str, draw: int, folder: Path) -> None:
    """Leave a copy's journal in its folder."""
    folder.mkdir(exist_ok=True)
    tag = "SELECT value FROM tags WHERE run_uuid = ? AND key = 'folder'"
    text = (Path(copier.read(tag, source)) / "record.json").read_text()
    (folder / "record.json").write_text(copier.translate(text, "large", draw))


def _copy_artifacts(copier: Copier, source: str, run_id: str, number: int) -> None:
    """Copy what the report reads, with other predictions for one sample in 500."""
    uri = "SELECT artifact_uri FROM runs WHERE run_uuid = ?"
    old, new = (Path(copier.read(uri, run).removeprefix("file://")) for run in (source, run_id))
    new.mkdir(parents=True)
    for name in FILES:
        if (old / name).exists():  # an unsupported run has none
            shutil.copyfile(old / name, new / name)
    draw = np.random.default_rng(number)
    for name, prefix in zip(READ, ("", "choice/"), strict=True):
        if not (new / name).exists():
            continue
        with np.load(old / name) as stored:
            arrays = dict(stored)
        labels, moved = arrays["labels"], arrays["predictions"].copy()
        places = draw.choice(len(labels), len(labels) // 500, replace=False)
        moved[places] = draw.permutation(moved[places])
        hits = [(predictions == labels).mean() for predictions in (moved, arrays["predictions"])]
        np.savez_compressed(new / name, **{**arrays, "predictions": moved})
        for kind in ("metrics", "latest_metrics"):
            for sign, keys in ((1, _HITS), (-1, ("drop",))):
                for key in keys:
                    copier.connection.execute(
                        f"UPDATE {kind} SET value = value + ? WHERE run_uuid = ? AND key = ?",
                        (sign * float(hits[0] - hits[1]), run_id, prefix + key),
                    )


def time_calls(root: Path, parent_id: str) -> Record:
    """Time what runs, reports and resumed sweeps ask of a store; count the statements."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    from resnet8ptq.config.schema import TrackingConfig
    from resnet8ptq.sweeps import resume
    from resnet8ptq.tracking import history, sync
    from resnet8ptq.tracking.store import open_store
    from resnet8ptq.tracking.sweep_file import Sweep
    from studies import tracking_load

    store = open_store(TrackingConfig(root=str(root)))
    parent = history.load_run(store, parent_id)
    folder, sweep = Path(parent.tags["folder"]), Sweep(store, parent_id, root, resume=True)
    job = history.find_runs(store, history.under(parent_id), most=1)[0].tags
    number, identity = int(job["job_number"]), job["identity"]
    statements: list[str] = []
    event.listen(Engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    measured: Record = {}
    with tempfile.TemporaryDirectory() as scratch:
        calls: dict[str, Callable[[int], object]] = {
            "a run's tracking": lambda n: tracking_load.log_run(store, None, Path(scratch), n),
            "a run by its id": lambda _: history.load_run(store, parent_id),
            "the newest sweep": lambda _: history.find_parent(store),
            "resume: the sweep": lambda _: resume.find_sweep(store, parent.tags["sweep_key"]),
            "resume: a finished run": lambda _: resume.find_finished(sweep, number, identity),
            "resume: a job's attempts": lambda _: resume.find_attempts(sweep, number),
            "resume: all runs are logged": lambda _: sync.sync(store, folder),
        }
        for name, call in calls.items():
            seconds = []
            for repeat in range(REPEATS):
                statements.clear()
                start = time.process_time()
                call(repeat)
                seconds.append(time.process_time() - start)
            measured[name] = {"cpu_s": seconds, "statements": len(statements)}
    return measured


def measure(setting: Setting) -> Record:
    """Fill a store with copies, and measure beside each number of other runs."""
    folder, cache = setting.warm
    home = setting.fresh()
    shutil.copytree(folder / "mlruns", home / "mlruns")
    copier = Copier(home / "mlruns" / "mlflow.db", folder / "mlruns")
    setting.say(f"a sweep of {DRAWS * len(copier.jobs)}")
    parent_id = add_sweep(copier, home / "sweep", DRAWS)
    record: Record = {"runs": DRAWS * len(copier.jobs), "others": {}}
    sweeps = 0
    for others in OTHERS:
        setting.say(f"{others} other runs")
        while sweeps * len(copier.jobs) < others:
            copier.copy(f"other {sweeps}")
            sweeps += 1
        command = [sys.executable, "-m", "studies.stores", str(home / "mlruns"), parent_id]
        calls = process.run(command, setting.fresh(), setting.environment(cache))
        command = [sys.executable, "-m", "resnet8ptq", "report", f"run_id={parent_id}"]
        command += [f"root={home / 'mlruns'}", "folder=."]
        reports = [
            asdict(process.run(command, setting.fresh(), setting.environment(cache)).usage)
            for _ in range(setting.rounds)
        ]
        setting.say(f"report: {reports[-1]['wall_s']:.1f} s")
        record["others"][str(others)] = {"calls": json.loads(calls.out), "reports": reports}
    return record


def render(record: Record) -> str:
    """Return the section in Markdown."""
    stores = record["others"]
    heads = [f"{int(others):,} other runs" for others in stores]
    reports = [store["reports"] for store in stores.values()]
    rows = [
        [title, *(spread([scale * usage[key] for usage in usages], 1) for usages in reports)]
        for title, key, scale in (
            ("wall s", "wall_s", 1),
            ("user s", "user_s", 1),
            ("peak MB", "max_rss_bytes", 1e-6),
        )
    ]
    names = list(next(iter(stores.values()))["calls"])
    calls = [[name, *(_cell(store["calls"][name]) for store in stores.values())] for name in names]
    return "\n\n".join(
        [
            f"`python -m resnet8ptq report` of a sweep of {record['runs']:,} runs, copies of those "
            "of `experiment=grid` with predictions of their own, in SQLite beside other runs:",
            table([f"report of {record['runs']:,} runs", *heads], rows),
            "Calls in the same stores, in ms of CPU time with SQLite's, and the SQL statements of "
            f"one call. `all runs are logged` looks at all {record['runs']:,}.",
            table(["CPU ms (statements)", *heads], calls),
        ]
    )


def _cell(call: Record) -> str:
    return f"{1000 * statistics.median(call['cpu_s']):.1f} ({call['statements']})"


def main(words: list[str]) -> None:
    """Time the calls in a store; without one, make stores and measure them all."""
    if words:
        root, sweep = words
        print(json.dumps(time_calls(Path(root), sweep)))
        return
    with tempfile.TemporaryDirectory(prefix="studies-") as scratch:
        print(render(measure(Setting(Path(scratch), rounds=3))))


if __name__ == "__main__":
    main(sys.argv[1:])
