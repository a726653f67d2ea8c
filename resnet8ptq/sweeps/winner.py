"""Prints the winner of a search with its verdict, and writes the config that reproduces it."""

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
from resnet8ptq.evaluation.worth import WORTH, saves
from resnet8ptq.report import naming
from resnet8ptq.report.answer import say_facts, say_verdict
from resnet8ptq.report.families import Cell
from resnet8ptq.report.recommend import ModelSelection
from resnet8ptq.report.table import VOID
from resnet8ptq.report.verdicts import EXIT_CODES, FAIL, PASS, UNDECIDED
from resnet8ptq.sweeps.delivery import Delivery
from resnet8ptq.tracking import origin
from resnet8ptq.tracking.record import RunRecord

FILE = "winner.yaml"  # the name in the sweep's folder
BY_OUTPUTS = "to ship by the distance from FP32's outputs, whatever the labels: add task=deviation"
_LEFT_OUT = ("experiment", "evaluate.split", "sweep.resume", "max_seconds")


@dataclass(frozen=True)
class Winner:
    """The confirmed model of a search."""

    selected: ModelSelection
    cell: Cell  # the run on the reported samples
    folder: Path = origin.RUNS  # the sweep's folder

    @property
    def outcome(self) -> str:
        """The verdict on the reported samples."""
        return self.cell.record.verdict or UNDECIDED

    @property
    def settings(self) -> list[str]:
        """The settings that reproduce the model in one run."""
        return _find_settings(self.cell.record, self.folder)


def _find_settings(record: RunRecord, folder: Path) -> list[str]:
    settings = origin.find_overrides(record, folder)
    if settings is None:
        raise TrackingError(f"run {record.run_id}: job_overrides differ from the sweep's")
    kept = [word for word in settings if not _is_of_search(word)]
    if "of the test samples" in record.chosen_by:  # to report on the same half
        kept.append("evaluate.choice=half")
    return kept


def find_winner(chosen: Sequence[ModelSelection], delivery: Delivery) -> Winner | None:
    """Return the last confirmed model that passes, else the first confirmed one, else None."""
    folder = delivery.folder or Path()
    first = None
    passing = None
    for selected in chosen:
        for cell in selected.family.measured:
            if cell.record.held_out and cell.record.run_id != delivery.confirmed_id:
                continue
            winner = Winner(selected, cell, folder)
            first = first or winner
            if winner.outcome == PASS:
                passing = winner
    return passing or first


def announce(chosen: Sequence[ModelSelection], delivery: Delivery, goal: str) -> int:
    """Print the winner and its file, write its settings as a config; return the exit code.

    Without a confirmed model, the function prints the best so far. Without a measured model, it
    prints the file of an interrupted step, or else the FP32 network.

    Args:
        goal: `fastest`, `smallest` or `best`.
    """
    folder = delivery.folder or Path()
    winner = find_winner(chosen, delivery)
    if winner is not None:
        return _announce_confirmed(winner, delivery, folder, goal)

    # Print the best so far, which is not confirmed
    console = stdout(None, 240)
    if delivery.record is not None:
        lacks = "Not confirmed"
        on = "selection"
        if delivery.is_confirmed:
            lacks = "Not judged"
            on = "reported"
        say(console, f"\n{lacks}; the best model so far, measured on the {on} samples:")
        say(console, f"  {delivery.outcome}")
        _say_file(delivery, delivery.record, _find_settings(delivery.record, folder))
        return EXIT_CODES[UNDECIDED]

    # Print the first file or FP32, which are not measured
    delivery.keep_fp32()
    if not delivery.is_measured:
        say(console, "\nNot measured, because the time was up: the file of the first step.")
        say(console, f"  file: {delivery.path}")
        return EXIT_CODES[UNDECIDED]
    if delivery.path is not None:
        say(console, "\nNo step gave a quantized file, see the reasons above: FP32 stays.")
        say(console, f"  file: {delivery.path}")
    else:
        say(console, "\nNo model was confirmed: no step could be measured.")
    return EXIT_CODES[FAIL]


def _announce_confirmed(winner: Winner, delivery: Delivery, folder: Path, goal: str) -> int:
    console = stdout(None, 240)
    record = winner.cell.record
    verdict = say_verdict(winner.cell.record)
    is_worth = saves(record.size_bytes or 0, record.fp32_size_bytes or 0, record.speedup)
    outcome = winner.outcome
    title = "Nothing passes; the closest to FP32"
    if outcome == PASS:
        title = "Winner"
    if not is_worth:
        title = "Nothing is worth deploying instead of FP32; the closest to it"
    if outcome == VOID:
        title = "FP32 itself is void, so nothing can pass; the file in plain 8 bits"
        # Do not repeat the verdict's long sentence, which the table has given
        verdict = "No verdict, for the reason below the table."

    # Print the facts, then doubts, then the file
    name = naming.label([record], keys=())  # the settings follow
    say(console, f"\n{title}: {name}. {verdict}")
    say(console, f"  {'; '.join(say_facts(winner.cell.record))}")
    if not is_worth:
        say(console, f"  {WORTH}")
    if not record.chosen_by:
        say(console, "  the same samples chose and reported it: the figures are probably too good")
    is_slower = record.speedup is not None and round(record.speedup, 2) < 1
    is_smaller = (record.size_reduction or 0) > 0
    if goal == "fastest" and outcome == PASS and is_slower and is_smaller:
        say(console, "  FP32 is faster on this machine; the model is only smaller")
    if delivery.record is None or delivery.record.run_id != record.run_id:
        delivery.keep(record, "", is_confirmed=True)
    _say_file(delivery, record, winner.settings)
    if record.deploy_command is None:
        say(console, f"  {BY_OUTPUTS}")
    else:
        say(console, f"  {record.deploy_command}")
    if outcome == PASS and not is_worth:
        outcome = FAIL
    return EXIT_CODES[outcome]


def _say_file(delivery: Delivery, record: RunRecord, settings: Sequence[str]) -> None:
    """Print the file, if it is kept, and the command to make it; write the settings to `FILE`."""
    console = stdout(None, 240)
    folder = delivery.folder or Path()
    if not delivery.is_current:
        say(console, "  file: not in the folder of its run any more")
    elif delivery.path is not None:
        say(console, f"  file: {delivery.path}")
    say(console, f"  reproduce it: {printable(invocation.command('run', *settings))}")
    cut = record.params.get("cut_short")
    if cut:
        say(console, f"  the time limit cut work short ({cut}): without it, the result may differ")
    files.write_text(folder / FILE, to_yaml(settings))
    say(console, f"  its settings, for conf/experiment/: {folder / FILE}")


def to_yaml(settings: Sequence[str]) -> str:
    """Return settings as an option of `conf/experiment/`."""
    defaults = []
    values = OmegaConf.create()
    for override in map(words.parse, settings):
        key = override.key_or_group
        value = override.value()
        if words.is_group(key):
            defaults.append({f"override /{key}": value})
        else:
            OmegaConf.update(values, key, value, force_add=True)
    content: dict[str, Any] = {}
    if defaults:
        content["defaults"] = defaults
    head = "# @package _global_\n# The winner of experiment=auto.\n"
    return head + OmegaConf.to_yaml(OmegaConf.merge(content, values))


def _is_of_search(word: str) -> bool:
    key = words.key_of(word)
    return key in _LEFT_OUT or key.startswith("hydra") or word == "latency.enabled=true"
