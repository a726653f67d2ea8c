"""Models chosen from sweeps made by hand."""

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.evaluation.paired_latency import PairedLatency
from resnet8ptq.report import selection
from resnet8ptq.report.families import Family
from resnet8ptq.report.recommend import ModelSelection, Recommendation, recommend
from tests.helpers.cells import sweep

LIMITS = ReportConfig(max_drop=0.02, min_accuracy=0.85)


def select(
    family: Family, timing: PairedLatency | None = None, limits: ReportConfig = LIMITS
) -> ModelSelection:
    """Return an assessed family with its timing in turns."""
    (selected,) = selection.select([family], limits, [timing])
    return selected


def by_use(
    *cells: object,
    timing: PairedLatency | None = None,
    limits: ReportConfig = LIMITS,
    **options: object,
) -> dict[str, Recommendation]:
    """Return the recommendations for a sweep of these cells, by their titles."""
    return {r.title: r for r in recommend(select(sweep(*cells, **options), timing, limits))}


def chosen(result: Recommendation) -> str:
    """Return the id of the recommended run."""
    assert result.choice is not None
    return result.choice.record.run_id


def best_of(selected: ModelSelection) -> Recommendation:
    """Return the recommendation for accuracy."""
    (best,) = [chosen for chosen in recommend(selected) if chosen.use == "best"]
    return best
