"""The winner of a search: its verdict, and the command and the config that reproduce it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from resnet8ptq.config import words
from resnet8ptq.core import files, invocation
from resnet8ptq.core.console import say, stdout
from resnet8ptq.core.errors import TrackingError
from resnet8ptq.core.text import printable
from resnet8ptq.report.answer import say_facts, say_verdict
from resnet8ptq.report.comparison import Cell
from resnet8ptq.report.recommend import ModelSelection, Recommendation
from resnet8ptq.report.verdicts import EXIT_CODES, PASS, UNDECIDED, Verdict
from resnet8ptq.tracking import origin

FILE = "winner.yaml"  # in the sweep's folder
_LEFT_OUT = ("experiment", "evaluate.split", "sweep.resume", "max_seconds")


@dataclass(frozen=True)
class Winner:
    """The confirmed model of a search."""

    selected: ModelSelection
    cell: Cell  # its run on the reported samples
    folder: Path = origin.RUNS  # of the sweep

    @property
    def judged(self) -> Verdict:
        """The verdict on the reported samples."""
        return self.selected.judged[self.cell.record.run_id]

    @property
    def outcome(self) -> str:
        """The outcome of the verdict."""
        return self.judged.outcome

    @property
    def settings(self) -> list[str]:
        """The settings that reproduce the model in one run."""
        record = self.cell.record
        settings = origin.find_overrides(record, self.folder)
        if settings is None:
            raise TrackingError(f"run {record.run_id}: job_overrides are not what the sweep set")
        kept = [word for word in settings if not _is_of_search(word)]
        if "of the test samples" in record.chosen_by:  # report on the same half
            kept.append("evaluate.choice=half")
        return kept


def find(chosen: Sequence[ModelSelection], folder: Path = origin.RUNS) -> Winner | None:
    """Return the last confirmed model that passes, else the first confirmed one, else None.

    Models are confirmed one after the other, until one passes.

    Args:
        folder: the folder of the sweep.
    """
    confirmed = [
        Winner(selected, cell, folder)
        for selected in chosen
        for cell in selected.family.measured
        if not cell.record.held_out
    ]
    passing = [winner for winner in confirmed if winner.outcome == PASS]
    return next(iter([*reversed(passing), *confirmed]), None)


def announce(chosen: Sequence[ModelSelection], folder: Path, goal: str) -> int:
    """Print the winner, write its settings as a config; return the exit code of its verdict.

    Args:
        goal: `fastest`, `smallest` or `best`.
    """
    console, winner = stdout(None, 240), find(chosen, folder)
    if winner is None:
        say(console, "\nNo model was confirmed: no step could be measured.")
        return EXIT_CODES[UNDECIDED]
    verdict = say_verdict(winner.selected, winner.cell, winner.judged)
    title = "Winner" if winner.outcome == PASS else "Nothing passes; the closest to FP32"
    again = printable(invocation.command("run", *winner.settings))
    files.write_text(folder / FILE, to_yaml(winner.settings))
    say(console, f"\n{title}: {winner.cell.label}. {verdict}")
    say(console, f"  {'; '.join(say_facts(winner.selected, winner.cell))}")
    record = winner.cell.record
    slower = record.speedup is not None and round(record.speedup, 2) < 1
    if goal == "fastest" and winner.outcome == PASS and slower and (record.size_reduction or 0) > 0:
        say(console, "  FP32 is faster on this machine; the model is only smaller")
    say(console, f"  reproduce it: {again}")
    if cut := record.params.get("cut_short"):
        say(console, f"  the time limit cut work short ({cut}): without it, the result may differ")
    say(console, f"  its settings, for conf/experiment/: {folder / FILE}")
    say(console, f"  {Recommendation('', winner.cell.label, '', winner.cell).command}")
    return EXIT_CODES[winner.outcome]


def to_yaml(settings: Sequence[str]) -> str:
    """Return settings as an option of `conf/experiment/`."""
    defaults, values = [], OmegaConf.create()
    for override in map(words.parse, settings):
        key, value = override.key_or_group, override.value()
        if words.is_group(key):
            defaults.append({f"override /{key}": value})
        else:
            OmegaConf.update(values, key, value, force_add=True)
    content: dict[str, Any] = {"defaults": defaults} if defaults else {}
    head = "# @package _global_\n# The winner of experiment=auto.\n"
    return head + OmegaConf.to_yaml(OmegaConf.merge(content, values))


def _is_of_search(word: str) -> bool:
    key = word.lstrip("+~").partition("=")[0]
    return key in _LEFT_OUT or key.startswith("hydra") or word == "latency.enabled=true"
