"""Times the commands that users wait for, each in a new process."""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks import process
from benchmarks.setting import REPO, Record, Setting
from benchmarks.tables import Row, usage_table, walls

COMMANDS = {
    "run.py --help": ("run.py", "--help"),
    "a run, repeated": ("run.py", "backend=onnx", "dtype=int8", "latency.enabled=false"),
    "verdict": ("-m", "resnet8ptq", "verdict"),
    "verdict folder=RUN": ("-m", "resnet8ptq", "verdict", "folder={newest}"),
    "advise": ("-m", "resnet8ptq", "advise"),
}
IMPORTS = {
    "import mlflow": "import mlflow; mlflow.MlflowClient",
    "import onnxruntime": "import onnxruntime",
}


def measure(setting: Setting) -> Record:
    """Call each command once a round, with the cache and the store of a sweep of 24 runs."""
    folder, cache = setting.swept
    environment = setting.environment(cache)

    def sides() -> Mapping[str, Callable[[], process.Finished]]:
        calls = {}
        newest = _newest_run(folder)
        for name, (program, *words) in COMMANDS.items():
            path = str(REPO / program) if program == "run.py" else program
            command = [sys.executable, path, *(word.format(newest=newest) for word in words)]
            calls[name] = partial(process.run, command, folder, environment)
        for name, code in IMPORTS.items():
            calls[name] = partial(process.run, [sys.executable, "-c", code], folder, environment)
        return calls

    return {"usages": setting.call_in_turns(sides)}


def _newest_run(folder: Path) -> Path:
    results = (folder / "runs").rglob("result.json")
    return max(results, key=lambda path: path.stat().st_mtime).parent


def summarize(record: Record) -> list[Row]:
    """Return this section's rows of the first table in RESULTS.md."""
    return [Row(name, walls(record["usages"][name])) for name in COMMANDS]


def render(record: Record) -> str:
    """Return the section in Markdown."""
    words = (
        "Each in a new process, where a sweep of 24 has filled the cache and the store. Without "
        "`folder=`, `verdict` finds the newest run in the store's database."
    )
    return f"{words}\n\n{usage_table(record['usages'], {})}"
