"""The environment of a benchmark: scratch folders, caches, and calls of both sides."""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from benchmarks import process
from benchmarks.tables import megabytes

REPO = Path(__file__).parents[1]
NO_LATENCY = "latency.enabled=false"
GRID = "experiment=grid"
FOUR = ("-m", "backend=onnx,torch", "dtype=int8,uint8")

Record = dict[str, Any]  # part of results.json


@dataclass(frozen=True)
class Setting:
    """One call of the benchmark.

    Attributes:
        scratch: an empty folder, for everything.
        rounds: how often each side runs; the sides alternate.
    """

    scratch: Path
    rounds: int

    def say(self, text: str) -> None:
        """Show progress."""
        print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)

    @cached_property
    def model(self) -> Path:
        """The path of the converted network in the user's cache; converts it if it is missing."""
        self.say("the converted network: looking for it, or making it")
        # In a separate process, since this one must stay small; see `process.run`.
        done = process.run(self.module("convert"), self.fresh(), self.environment())
        return Path(done.out.splitlines()[-1])

    @cached_property
    def cache(self) -> Path:
        """A cache that holds only the converted network."""
        entry, cache = self.model.parent, self.scratch / "cache"
        shutil.copytree(entry, cache / entry.parent.name / entry.name)
        return cache

    @cached_property
    def swept(self) -> tuple[Path, Path]:
        """The folder and the cache of one sweep of 24 runs; the folder holds the store."""
        folder, cache = self.scratch / "swept", self.copy_cache()
        folder.mkdir()
        self.say("filling the cache: one sweep of 24")
        self.run(folder, cache, GRID, NO_LATENCY)
        return folder, cache

    @property
    def warm(self) -> tuple[Path, Path]:
        """The folder of `swept`, and its cache without evaluations: every file runs again."""
        folder, swept = self.swept
        cache = self.scratch / "warm"
        if not cache.exists():
            shutil.copytree(swept, cache)
        shutil.rmtree(cache / "evaluations", ignore_errors=True)
        return folder, cache

    def fresh(self) -> Path:
        """Return a new empty folder."""
        return Path(tempfile.mkdtemp(dir=self.scratch))

    def copy_cache(self) -> Path:
        """Return a new cache that holds only the converted network."""
        return Path(shutil.copytree(self.cache, self.fresh() / "cache"))

    def environment(self, cache: Path | None = None) -> dict[str, str]:
        """Return the environment of a child: this checkout's package, that cache."""
        kept = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
        kept["PYTHONPATH"] = str(REPO)
        return kept if cache is None else {**kept, "RESNET8PTQ_CACHE": str(cache)}

    def module(self, name: str, *args: str | Path) -> list[str]:
        """Return the command that runs one of this package's modules."""
        return [sys.executable, "-m", f"benchmarks.{name}", *map(str, args)]

    def run(self, folder: Path, cache: Path, *overrides: str) -> Record:
        """Call run.py in `folder`; return its usage, its runs and their folders."""
        before = set(find_runs(folder))
        command = [sys.executable, str(REPO / "run.py"), *overrides]
        done = process.run(command, folder, self.environment(cache))
        added = sorted(set(find_runs(folder)) - before, key=job_number)
        return {"usage": asdict(done.usage), "runs": [read_run(path) for path in added]}

    def call_in_turns(
        self, sides: Callable[[], Mapping[str, Callable[[], process.Finished]]]
    ) -> dict[str, list[Record]]:
        """Call each side once a round; return the usages of each, by name."""
        usages: dict[str, list[Record]] = {}
        for turn in range(self.rounds):
            for name, call in sides().items():
                usage = call().usage
                usages.setdefault(name, []).append(asdict(usage))
                peak = megabytes(usage.max_rss_bytes)
                self.say(f"round {turn + 1}: {name}: {usage.wall_s:.1f} s, {peak} MB")
        return usages

    def run_fresh(self, *overrides: str) -> Record:
        """Call run.py in an empty folder, with a cache that holds only the converted network."""
        return self.run(self.fresh(), self.copy_cache(), *overrides)

    def run_warm(self, *overrides: str) -> Record:
        """Call run.py with all shared results in the cache; it evaluates every file."""
        return self.run(*self.warm, *overrides)

    def run_again(self, *overrides: str) -> Record:
        """Call run.py with the folder and cache of a sweep of all 24; it evaluates no file."""
        return self.run(*self.swept, *overrides)

    def run_empty(self, *overrides: str) -> Record:
        """Call run.py in an empty folder, with an empty cache."""
        return self.run(self.fresh(), self.fresh() / "cache", *overrides)

    def run_bare(self, *args: str) -> Record:
        """Run the bare loop on the converted network; return its usage and its runs."""
        return self._run_bare(self.model, *args)

    def run_bare_empty(self) -> Record:
        """Run the bare loop on the Keras file, which it converts; return its usage and its runs."""
        return self._run_bare(Path(os.environ["RESNET8_H5"]))

    def _run_bare(self, model: Path, *args: str) -> Record:
        command = self.module("bare", model, *args)
        done = process.run(command, self.fresh(), self.environment())
        lines = [json.loads(line) for line in done.out.splitlines()]
        return {"usage": asdict(done.usage), "runs": lines}


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the folders of all measured runs below `folder`."""
    return (path.parent for path in (folder / "runs").rglob("result.json"))


def job_number(folder: Path) -> int:
    """Return the number of a run's job in its sweep; 0 for a single run."""
    number = folder.name.partition("_")[0]
    return int(number) if number.isdigit() else 0


def read_run(folder: Path) -> Record:
    """Return a run's configuration and measurements, as the bare loop prints them."""
    config = OmegaConf.load(folder / "config.yaml")
    metrics = json.loads((folder / "result.json").read_text())["metrics"]
    return {
        "backend": config.backend.name,
        "dtype": config.dtype.name,
        "calib": config.calib.name,
        "per_channel": config.per_channel,
        **{key: metrics.get(key) for key in ("accuracy", "peak_memory_bytes")},
        **{key: metrics.get(f"system/{key}") for key in ("quantize_s", "evaluate_s", "choose_s")},
    }
