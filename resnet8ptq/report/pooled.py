"""Verdicts on a network over several data sets: on its mean loss, and on all data sets.

Each row is a configuration of a network. Two rules answer two questions:

- *pooled*: is the loss within the limit on average? The mean of the data sets' paired losses, each
  with the same weight; a gain on one data set can hide a loss on another.
- *on all*: is the loss within the limit on every data set? Pass if each data set passes by itself
  at 5%, without a correction for their number: an intersection-union test (Berger,
  "Multiparameter Hypothesis Testing and Acceptance Sampling", Technometrics 24, 1982). Fail if one
  data set fails, corrected for their number (Holm).

Both are corrected for the number of configurations (Holm). Only hits of fully scored samples are
pooled: other losses have no common unit, and sequential tests have no common plan.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.report import verdicts
from resnet8ptq.report.comparison import Cell, Family
from resnet8ptq.report.facts import asked, varied
from resnet8ptq.report.table import VOID
from resnet8ptq.tasks.hits import Hits
from resnet8ptq.tasks.metric import Metric
from resnet8ptq.tasks.statistics import UNKNOWN, Interval, Margin, holm, invert, tango
from resnet8ptq.tracking.record import RunRecord

HEADS = ("configuration", "mean loss", "95%", "pooled", "worst data set", "its loss", "on all")
_NETWORKS = ("model.path", "model.module")
_OF_DATA = ("data.", "task.")  # settings that differ between data sets by nature

Key = tuple[object, ...]


@dataclass(frozen=True)
class Stratum:
    """The samples of one data set that a model lost and won against FP32, out of `total`."""

    lost: int
    won: int
    total: int

    @property
    def loss(self) -> float:
        """The paired loss, a fraction."""
        return (self.lost - self.won) / self.total


@dataclass(frozen=True)
class Part:
    """A configuration on one data set, identified by `source`."""

    source: Key
    cell: Cell
    stratum: Stratum

    @classmethod
    def of_cell(cls, cell: Cell) -> Self | None:
        """Return the part; None without hits by sample or a set network, or with early stopping.

        A network without a name is the data set's own.
        """
        record, paired = cell.record, cell.paired
        if paired is None or all(record.params.get(key, "null") == "null" for key in _NETWORKS):
            return None
        model, baseline = paired.model, paired.baseline
        if not isinstance(model, Hits) or not isinstance(baseline, Hits):
            return None
        source = record.select("data", "dataset", "data.root")
        return cls(source, cell, Stratum(*model.changes(baseline)))


@dataclass(frozen=True)
class Configuration:
    """A configuration on several data sets, with its two verdicts."""

    label: str
    loss: float  # mean over the data sets
    interval: Interval  # 95%, not corrected
    worst: str  # name of the data set with the largest loss
    worst_loss: float
    pooled: str
    on_all: str

    def cells(self, metric: Metric) -> list[str]:
        """Return the cells of the columns `HEADS`."""
        low, high, loss, worst = map(
            metric.show_change, (*self.interval, self.loss, self.worst_loss)
        )
        return [self.label, loss, f"{low} to {high}", self.pooled, self.worst, worst, self.on_all]


@dataclass(frozen=True)
class Pool:
    """The configurations of one network on the same data sets.

    Attributes:
        left_out: configurations that were not measured exactly once on every data set.
    """

    network: str
    data_sets: tuple[str, ...]
    metric: Metric
    configurations: tuple[Configuration, ...]
    left_out: int

    @property
    def title(self) -> str:
        """The network, its data sets and the metric."""
        return f"{self.network} on {', '.join(self.data_sets)}: {self.metric.title}"


def mean_loss(strata: Sequence[Stratum]) -> float:
    """Return the mean loss, with equal weights for the strata."""
    return math.fsum(stratum.loss for stratum in strata) / len(strata)


def stratified(strata: Sequence[Stratum], limit: float) -> Margin:
    """Return the margin of the mean loss over strata of equal weight, by the score test.

    This is the stratified form of `tango` by Nam, "Non-inferiority of New Procedure to Standard
    Procedure in Stratified Matched-pair Design", Biometrical Journal 48, 2006. Nam assumes the same
    loss in all strata. But losses differ between data sets, so the variance of each stratum is
    taken at its own loss, shifted by the distance of the mean loss from the limit. The continuity
    correction is half of the largest step. For one stratum, the result equals `tango`.
    """
    excess = mean_loss(strata) - limit
    error = math.hypot(*(_error(stratum, stratum.loss - excess) for stratum in strata))
    if not error:
        return UNKNOWN
    step = 1 / min(stratum.total for stratum in strata)
    return Margin(len(strata) * excess / error, step / 2 / error)


def _error(stratum: Stratum, loss: float) -> float:
    """Return the standard error of a stratum's loss if the true loss is `loss` (Tango)."""
    limit = min(max(loss, -1.0), 1.0)
    correction = tango(stratum.lost, stratum.won, stratum.total, limit).correction
    return 0.5 / correction / stratum.total  # it is half a sample in standard errors


def hold_on_all(margins: Sequence[Margin]) -> tuple[float, float]:
    """Return the p-values of "some loss is at the limit or above" and "none is above the limit"."""
    beyond = min(holm([margin.p_beyond for margin in margins]))
    return max(margin.p_within for margin in margins), beyond


def judge(families: Sequence[Family], limits: ReportConfig) -> list[Pool]:
    """Return a pool for each network and metric with several data sets; empty if there are none."""
    keys = varied([record for family in families for record in family.records])
    keys = [key for key in keys if not key.startswith(_OF_DATA)]
    models = [key for key in keys if key.startswith("model.")]
    networks: dict[Key, dict[Key, list[Part]]] = {}
    for family in families:
        for part in filter(None, map(Part.of_cell, family.measured)):
            record = part.cell.record
            network = (family.metric, record.model, *record.select(*_NETWORKS, *models))
            configuration = (record.combination, *asked(record, keys))
            networks.setdefault(network, {}).setdefault(configuration, []).append(part)
    pools = (_pool(list(rows.values()), limits) for rows in networks.values())
    return [pool for pool in pools if pool is not None]


def _pool(rows: Sequence[list[Part]], limits: ReportConfig) -> Pool | None:
    """Return the pool of a network's configurations; None unless one ran on several data sets."""
    names = _name({part.source: part.cell.record for row in rows for part in row})
    whole = [row for row in rows if Counter(part.source for part in row) == Counter(list(names))]
    if len(names) < 2 or not whole:
        return None
    first = whole[0][0].cell.record
    metric = first.task.metric
    judged = tuple(_judge(whole, names, metric.limit(limits)))
    return Pool(first.model, tuple(names.values()), metric, judged, len(rows) - len(whole))


def _name(records: Mapping[Key, RunRecord]) -> dict[Key, str]:
    """Return the names of data sets; equal names get the digest of the samples."""
    counts = Counter(record.dataset for record in records.values())
    return {
        source: record.dataset
        + (f", digest {record.samples_digest[:16]}…" if counts[record.dataset] > 1 else "")
        for source, record in records.items()
    }


def _judge(
    rows: Sequence[list[Part]], names: Mapping[Key, str], limit: float
) -> Iterator[Configuration]:
    """Yield the configurations, judged together; they are void if FP32 is in doubt."""
    sound = [row for row in rows if not any(part.cell.record.doubt for part in row)]
    whole = [_margin(row, limit) for row in sound]
    single = [[_margin([part], limit) for part in row] for row in sound]
    pooled = verdicts.outcomes([(margin.p_within, margin.p_beyond) for margin in whole])
    on_all = verdicts.outcomes([hold_on_all(margins) for margins in single])
    outcomes = {id(row): pair for row, *pair in zip(sound, pooled, on_all, strict=True)}
    for row in rows:
        strata, worst = [part.stratum for part in row], max(row, key=lambda part: part.stratum.loss)
        yield Configuration(
            row[0].cell.label,
            mean_loss(strata),
            invert(partial(stratified, strata)),
            names[worst.source],
            worst.stratum.loss,
            *outcomes.get(id(row), (VOID, VOID)),
        )


def _margin(parts: Sequence[Part], limit: float) -> Margin:
    """Return the margin of the mean loss; unknown if samples of groups were scored one by one."""
    if any(part.cell.record.grouped for part in parts):
        return UNKNOWN
    return stratified([part.stratum for part in parts], limit)
