"""The verdict on a run or a sweep, for continuous integration: JSON and an exit code.

    resnet8ptq verdict                         the newest run, or the newest sweep's recommendation
    resnet8ptq verdict use=smallest            or best, balanced, fastest, best_onnx, ...
    resnet8ptq verdict sweep=ID use=smallest   of the sweep with that parent run
    resnet8ptq verdict run_id=ID               of a run
    resnet8ptq verdict folder=PATH             of the run or the sweep in that folder
    resnet8ptq verdict format=markdown         a summary for a pull request

Exit codes: 0 pass; 3 fail; 4 undecided, void or unsupported; 2 wrong input; 1 an error, such as a
store that does not answer, or a sweep whose runs all ended with an error.
The recommendation is that of `deploy` for the same `use`. If every model of a sweep has the verdict
fail, none is recommended: `choice` is null, and the verdict is fail. A model below `min_accuracy`
fails, too, unless the verdict is void.
`max_drop=0.05`, `min_sqnr_db=30` and `min_accuracy=0.85` replace limits that the runs logged.
`experiment=`, `uri=` and `root=` name the MLflow store. The fields: docs/verdict.md.
"""

from dataclasses import dataclass
from pathlib import Path

from resnet8ptq.core import command
from resnet8ptq.core.console import waiting
from resnet8ptq.core.errors import ConfigError, TrackingError
from resnet8ptq.core.text import no_such_name, printable
from resnet8ptq.report.logged_limits import LIMITS
from resnet8ptq.report.recommend import RECOMMENDED, check_use, find_use
from resnet8ptq.report.table import VOID
from resnet8ptq.report.verdicts import FAIL, PASS, UNDECIDED, UNSUPPORTED
from resnet8ptq.results import lookup
from resnet8ptq.results.document import Answer, to_json, to_markdown
from resnet8ptq.results.summaries import SweepSummary
from resnet8ptq.tracking import history
from resnet8ptq.tracking.mlflow_store.store import StoreArguments, open_store
from resnet8ptq.tracking.record import RunRecord

FORMATS = {"json": to_json, "markdown": to_markdown}
# Uses that choose among the models within the limit. A sweep without such models has none of them.
_WITHIN = ("balanced", "smallest", "fastest", "fastest_batch")


@dataclass
class Arguments(StoreArguments):
    """The settings of `resnet8ptq verdict`, as key=value."""

    run_id: str | None = None
    sweep: str | None = None
    folder: str | None = None
    use: str = RECOMMENDED
    format: str = "json"
    max_drop: float | None = None
    min_sqnr_db: float | None = None
    min_accuracy: float | None = None


def main(words: list[str]) -> int:
    """Print the verdict; return its exit code.

    Raises:
        ConfigError: a setting is wrong, the run or sweep does not exist, or it has no verdict, see
            `assess_run` and `assess_sweep`.
        TrackingError: the store does not answer, a record is damaged, or nothing was measured.
    """
    asked = command.parse_words(words, Arguments, __doc__, plain="use")
    if asked.format not in FORMATS:
        raise ConfigError(no_such_name("format", asked.format, FORMATS))
    with waiting("Reading the runs"):
        answer = find_answer(asked)
    print(FORMATS[asked.format](answer))
    return answer.exit_code


def find_answer(asked: Arguments) -> Answer:
    """Return the verdict on the requested run or sweep, by default the newest.

    For errors, see `main`.
    """
    named = [key for key in ("run_id", "sweep", "folder") if getattr(asked, key) is not None]
    if len(named) > 1:
        raise ConfigError(f"{named[1]}: has no effect with {named[0]}=; expected one of the two")

    # Read the runs from the store or from a folder
    limits = {key: getattr(asked, key) for key in LIMITS}
    if asked.folder is not None:
        source = lookup.read_folder(Path(asked.folder), asked.tracking)
    elif named:
        source = lookup.find_in_store(open_store(asked.tracking), asked.run_id, asked.sweep)
    else:
        source = lookup.find_newest(asked.tracking)

    # Judge the run, or the recommendation of the sweep
    if source.run is None:
        answer = assess_sweep(source.assess_sweep(limits), asked.use)
    elif asked.use != Arguments.use:
        raise ConfigError("use: has no effect with a run; expected sweep= or a sweep's folder")
    else:
        answer = assess_run(source.assess_run(limits))
    newest = source.run or source.parent
    if newest and not named:
        history.say_newest(newest)
    return answer


def assess_run(run: RunRecord) -> Answer:
    """Return the verdict on a run.

    Raises:
        ConfigError: the run is of FP32 itself.
        TrackingError: the run has not ended with a result.
    """
    if run.verdict is not None:
        return Answer(run.verdict, run)
    if run.status == "ok":
        raise ConfigError(f"run_id: run {run.run_id} is FP32 itself, expected a quantized run")
    raise TrackingError(f"run {run.run_id} is {run.status} and has no verdict ({run.why_none})")


def assess_sweep(sweep: SweepSummary, use: str = RECOMMENDED) -> Answer:
    """Return the verdict on the run that a sweep recommends for a use.

    The verdict is on all models of the sweep, see `_overall`, if the sweep recommends nothing, or
    if the use is `RECOMMENDED` and the sweep has no headline. The same holds if the use needs
    models within the limit, and the sweep has none.

    Raises:
        ConfigError: the use is unknown, or the sweep recommends FP32 itself or several runs for it,
            or only models for other uses.
        TrackingError: no run was measured, and at least one has neither ended as `ok` nor as
            `unsupported`.
    """
    uses = {choice.use for choice in sweep.choices}
    is_known = use == RECOMMENDED or (use in _WITHIN and "smallest" not in uses)
    if use in uses or (uses and not is_known):
        run, because = find_use(use, sweep.choices, sweep.run_id)
        return Answer(run.verdict or UNDECIDED, run, sweep, use=use, because=because)

    # Without a model for a known use, give the verdict on all models of the sweep
    check_use(use)
    because = sweep.why_none or "No model is within the limit on the selection samples."
    return Answer(_overall(sweep), run=None, sweep=sweep, use=use, because=because)


def _overall(sweep: SweepSummary) -> str:
    """Return the verdict on all models of a sweep that recommends none of them for the use.

    Simulated runs only count if no other run was measured, and never as a pass.

    Raises:
        TrackingError: see `assess_sweep`.
    """
    # Collect the verdicts of measured runs, and the runs without a result
    outcomes = set()
    deployable = set()
    failed = []
    for run in sweep.runs:
        if run.loss_verdict is not None:
            outcomes.add(run.verdict)
            if run.execution != "simulated":
                deployable.add(run.verdict)
        if run.status not in ("ok", UNSUPPORTED):
            failed.append(f"{run.label or run.name}: {run.why_none or run.status}")

    # Verdicts on deployable runs count; simulated runs only count without them
    if deployable & {PASS, UNDECIDED}:  # none is within the limit on the selection samples
        return UNDECIDED
    counted = deployable or outcomes
    if counted and counted <= {FAIL, VOID}:
        return FAIL if FAIL in counted else VOID
    if failed and not outcomes:
        first = printable(failed[0])
        more = f"; and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise TrackingError(
            f"sweep {sweep.run_id}: no run was measured; without a result: {first}{more}"
        )
    return UNSUPPORTED
