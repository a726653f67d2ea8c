"""A store that somebody else has filled."""

import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from resnet8ptq.core import files
from resnet8ptq.tracking import details
from tests.helpers.calling import Called, call_beside

ADDRESSES = (  # columns of MLflow's tables
    ("runs", "artifact_uri"),
    ("experiments", "artifact_location"),
    ("logged_models", "artifact_location"),
)


class Foreign:
    """A store that somebody else has filled: no folder of its runs is here."""

    def __init__(self, sweep: Called, folder: Path) -> None:
        self.called = replace(sweep, folder=folder)
        before, after = sweep.folder / "mlruns", folder / "mlruns"
        shutil.copytree(before, after)
        for table, column in ADDRESSES:
            changed = f"UPDATE {table} SET {column} = replace({column}, ?, ?)"
            self.write(changed, str(before), str(after))
        self.write("UPDATE tags SET value = '/home/others/run' WHERE key = 'folder'")

    def write(self, statement: str, *values: str) -> None:
        with closing(sqlite3.connect(self.called.folder / "mlruns" / "mlflow.db")) as connection:
            connection.execute(statement, values)
            connection.commit()

    def run(self, backend: str) -> tuple[str, dict[str, Path]]:
        """Return the id of a backend's run that is ok, and its files in the store."""
        for run in self.called.children:
            if (run.data.params.get("backend"), run.data.tags["status"]) == (backend, "ok"):
                return str(run.info.run_id), self.called.artifacts(run)
        raise AssertionError(backend)

    def put(self, run_id: str, path: Path) -> None:
        """Say that the run has measured the file, as whoever writes to the store can."""
        self.set_param(run_id, "artifact_sha256", files.sha256(path))

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self.write("UPDATE tags SET value = ? WHERE key = ? AND run_uuid = ?", value, key, run_id)

    def set_param(self, run_id: str, key: str, value: str) -> None:
        """Change a param where MLflow has it, and in the run's own record of it."""
        statement = "UPDATE params SET value = ? WHERE key = ? AND run_uuid = ?"
        self.write(statement, value, key, run_id)
        home = self.called.folder / "mlruns"
        [path] = home.rglob(f"{run_id}/artifacts/{details.FILE}")
        kept = json.loads(path.read_text())
        kept["params"][key] = value
        path.write_text(json.dumps(kept))

    def deploy(self, run_id: str, *words: str) -> Called:
        words = (f"run_id={run_id}", "verify=false", "folder=out", *words)
        return call_beside(self.called.folder, "deploy", *words)
