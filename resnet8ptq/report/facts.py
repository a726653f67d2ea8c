"""Facts of several runs: families, task, settings that vary, titles, labels, corrected p-values."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from resnet8ptq.config.limits import check
from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.core.errors import TrackingError
from resnet8ptq.tasks import registry
from resnet8ptq.tasks.scoring.metric import CHOICE
from resnet8ptq.tasks.scoring.statistics import holm
from resnet8ptq.tasks.task import Task
from resnet8ptq.tracking.params import PROVIDER
from resnet8ptq.tracking.record import RunRecord

T = TypeVar("T")
R = TypeVar("R")

LIMITS = ("max_drop", "min_sqnr_db", "min_accuracy")  # keys of `report`
PREFER = "prefer"  # the same
_OF_TASK = ("task.join", "task.metric._target_")
_SCORED_BY = ("scored_as", "metric", *_OF_TASK)
RUN_ON = (PROVIDER, "measured_on")  # params: the provider and the machine that ran the file
_VARY = (  # settings beyond the four of every table
    "seed",
    "threads",
    "nodes_to_quantize",
    "nodes_to_exclude",
    "op_types",
    "data.name",
    "format",
    "reduce_range",
    "float_output",
    "float_tail",
    "attention",
    "slim",
    "max_drop",
    "held_out_images",
    "precision.max_bytes",
    "precision.max_drop",
    "precision.placement",
    "measured_on",
    "planned_bits",  # stands for precision.plan, which is a key for each layer
)
_VARY_BELOW = (
    "backend.",
    "calib.",
    "model.",
    "evaluate.",
    "latency.",
    "symmetric.",
    "corrections.",
    "weight_only.",
    "qat.",
    "task.",
)


def group(records: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Return families of runs, which were scored in the same way on the same samples.

    Families of selection samples come last, because they recommend nothing. Only runs of one family
    are ranked, tested and drawn together. A run without samples joins the family with the same
    settings for samples, else the first family. Without runs there is one empty family.
    """
    by_settings: dict[tuple[str | None, ...], tuple[str | None, ...]] = {}
    for record in records:
        if _has_samples(record):
            by_settings.setdefault(_asked(record), _scored(record))
    first = next(iter(by_settings.values()), ())

    # Runs without samples join by their settings
    families: dict[tuple[str | None, ...], list[RunRecord]] = {}
    for record in records:
        scored = _scored(record) if _has_samples(record) else by_settings.get(_asked(record), first)
        families.setdefault(scored, []).append(record)
    return sorted(families.values(), key=lambda f: samples_of(f) == "selection") or [[]]


def _has_samples(record: RunRecord) -> bool:
    """Return whether a run has scored samples; an unsupported one has at most drawn them."""
    return bool(record.samples_digest) and record.status != "unsupported"


def _scored(record: RunRecord) -> tuple[str | None, ...]:
    return (record.samples_digest, *record.select(*_SCORED_BY, "evaluate.stop"))


def _asked(record: RunRecord) -> tuple[str | None, ...]:
    """Return the settings that determine the scored samples and their metric."""
    keys = ["data", "evaluate.split", "evaluate.stop", "task", "task.primary", *_OF_TASK]
    if record.held_out:
        keys.append("held_out_images")
    return record.select(*keys)


def task_of(records: Sequence[RunRecord]) -> Task:
    """Return the task of a family; classification if no run has logged its task."""
    for record in records:
        if record.samples is not None:
            return record.task
    for record in records:
        if "scored_as" in record.params:
            return record.task
    return registry.recall({})


def best_first(records: Sequence[RunRecord]) -> list[int]:
    """Return the indices of the runs, the best metric first, runs without it last.

    Runs that stopped at different samples are ordered by the selection samples.
    """
    metric = task_of(records).metric
    prefix = ""  # the values of the table
    if any(map(is_stopped, records)):
        prefix = CHOICE

    def cost(index: int) -> float:
        value = records[index].value_of(metric, prefix)
        if value is None:
            return math.inf
        return metric.cost(value)

    return sorted(range(len(records)), key=cost)


def is_stopped(record: RunRecord) -> bool:
    """Return whether a run scored its samples until the verdict was decided."""
    return record.samples_planned is not None


def varied(records: Sequence[RunRecord]) -> list[str]:
    """Return the settings that differ between runs, besides the four of every table.

    They name the runs of a table, a figure and a page: see `label`. Settings that differ only
    between backends count as defaults.
    """
    by_backend: dict[str, list[RunRecord]] = {}
    for record in records:
        by_backend.setdefault(record.backend, []).append(record)
    varying: set[str] = set()
    for members in by_backend.values():
        keys: set[str] = set()
        for record in members:
            keys.update(record.params)
        for key in filter(_is_setting, keys):
            if _differs(members, key):
                varying.add(key)
    return sorted(varying)


def _differs(records: Sequence[RunRecord], key: str) -> bool:
    """Return whether the resolved values of a setting differ."""
    values = {record.params.get(key) for record in records if _is_resolved(record, key)}
    return len(values) > 1


def asked(record: RunRecord, keys: Sequence[str]) -> tuple[str | None, ...]:
    """Return the requested settings: bits that a run chose itself are `auto`."""
    params = record.params
    if params.get("precision.plan") == "auto":
        params = {**params, "planned_bits": "auto"}
    return tuple(map(params.get, keys))


def _is_resolved(record: RunRecord, key: str) -> bool:
    """Return whether a setting is a resolved value and not only the requested one."""
    if record.status == "unsupported":
        return key not in ("data.name", "planned_bits", "measured_on")
    return record.status != "failed" or record.params.get(key) not in (None, "null")


_MEASURES = ("evaluate.split", "latency.enabled")  # they change no model
_NAMED = ("backend.flow", "backend.path")


def _is_setting(key: str) -> bool:
    """Return whether a key is a user's setting, and not a derived value or a path."""
    shown = key.endswith(".name") or key in _NAMED  # in separate columns
    return key in _VARY or (key.startswith(_VARY_BELOW) and not shown and key not in _MEASURES)


def labels(records: Sequence[RunRecord]) -> list[str]:
    """Return each run's combination as text, with the other settings that vary."""
    keys = varied(records)
    return [label([record], keys) for record in records]


def name_cells(members: Sequence[RunRecord], keys: Sequence[str]) -> list[str]:
    """Return the cells that name the runs of a row: the combination, and settings that vary.

    Different values of a cell are joined, such as `int8/u8s8`.
    """
    named = []
    for member in members:
        settings = [member.params.get(key, "") for key in keys]
        named.append([*member.combination.cells, *settings])
    return ["/".join(dict.fromkeys(values)) for values in zip(*named, strict=True)]


def label(members: Sequence[RunRecord], keys: Sequence[str]) -> str:
    """Return a row's name: backend, dtype and calibration, then the settings that vary."""
    cells = name_cells(members, keys)
    first = len(cells) - len(keys)
    words = cells[:first]
    for key, value in zip(keys, cells[first:], strict=True):
        if value:
            words.append(f"{key}={value}")
    return " ".join(filter(None, words))


def headings(families: Sequence[Sequence[RunRecord]]) -> list[str]:
    """Return the title of each family of `group`.

    Equal titles get `task.join` if it differs, else the digest of the samples.
    """
    joins = [_find_join(family) for family in families]
    titles = []
    for family, join in zip(families, joins, strict=True):
        text = title(family)
        if join and len(set(joins)) > 1:
            text += f", task.join={join}"
        titles.append(text)

    # The digest tells equal titles apart
    shown = []
    for text, family in zip(titles, families, strict=True):
        if titles.count(text) > 1:
            digest = max((record.samples_digest for record in family), default="")
            text = f"{text}, digest {digest[:16]}…"
        shown.append(text)
    return shown


def _find_join(family: Sequence[RunRecord]) -> str:
    """Return how a family joins the scores of a sample; empty for the task's default."""
    if not family:
        return ""
    join = family[0].params.get("task.join", "null")
    return "" if join == "null" else join


def title(records: Sequence[RunRecord]) -> str:
    """Return the data sets and models of the runs, and the number of scored samples."""
    names = set()
    scored = set()
    totals = set()
    measured = [record for record in records if record.samples is not None]
    for record in measured or records:
        names.add((record.dataset, record.model))
        scored.add(record.scored_as)
        if record.samples is not None:
            totals.add(int(record.samples_planned or record.samples))
    text = "; ".join(f"{data}, {model}" for data, model in sorted(names))

    # The number of samples, if it is the same
    if len(totals) == 1:
        most = ""
        if any(map(is_stopped, records)):
            most = "up to "
        text += f", {most}{totals.pop():,} {samples_of(measured)} samples"
    for name in sorted(scored - {"classification"}):
        text += f", task={name}"
    return text


def samples_of(records: Sequence[RunRecord]) -> str:
    """Return the kind of the scored samples."""
    kinds = {record.samples_from for record in records}
    for kind in ("selection", "held-out training"):
        if kind in kinds:
            return kind
    return "test"


def by_model(
    records: Sequence[RunRecord], items: Sequence[T], test: Callable[[list[T]], Sequence[R]]
) -> list[R]:
    """Test several models together, equal files once; return the result for each run.

    Two settings may give the same file. Correcting for both would reduce the power.

    Args:
        items: the argument of the test for each run.
        test: returns a result for each of its arguments, corrected for their number.
    """
    models = models_of(records)
    first: dict[tuple[str | None, ...], T] = {}  # the argument of each model
    for model, item in reversed(list(zip(models, items, strict=True))):
        first[model] = item
    results = dict(zip(first, test(list(first.values())), strict=True))
    return [results[model] for model in models]


def count_models(records: Sequence[RunRecord]) -> int:
    """Return the number of models of these runs; see `by_model`."""
    return len({*models_of(records)})


def models_of(records: Sequence[RunRecord]) -> list[tuple[str | None, ...]]:
    """Return a key of each run's model: equal for the same file on the same kernels.

    Files with one hash are the same. Hashes may differ only by the names in a file. So files of the
    same size and dtypes are also the same if all outputs on the scored samples are equal, bit for
    bit. A dynamically quantized file takes its ranges from the batch, so the key has its size.
    """
    first: dict[tuple[object, ...], tuple[str | None, ...]] = {}
    models: list[tuple[str | None, ...]] = []
    for record in records:
        kernels = (record.backend, record.engine, record.dynamic_batch, *record.select(*RUN_ON))
        model: tuple[str | None, ...] = (*kernels, record.artifact_sha256 or record.run_id)
        if record.outputs_sha256:
            dtypes = record.select("weight_dtype", "activation_dtype")
            outputs = (*kernels, *dtypes, record.size_bytes, record.outputs_sha256)
            model = first.setdefault(outputs, model)
        models.append(model)
    return models


def adjusted_p(records: Sequence[RunRecord]) -> dict[str, float]:
    """Return the p-value of each measured quantized run by its id, corrected for their number."""
    tested = []
    p_values = []
    for record in records:
        if record.quantized and record.p_alone is not None:
            tested.append(record)
            p_values.append(record.p_alone)
    adjusted = {}
    for record, p in zip(tested, by_model(tested, p_values, holm), strict=True):
        adjusted[record.run_id] = p
    return adjusted


def _find_preferred(records: Sequence[RunRecord]) -> str | None:
    """Return the preference that the runs have logged; None if they have not."""
    for record in records:
        [preferred] = record.select(f"report.{PREFER}")
        if preferred:
            return preferred
    return None


def _find_logged(records: Sequence[RunRecord]) -> tuple[str | None, ...]:
    """Return the `LIMITS` of the first run that has logged them, as texts; else empty."""
    keys = [f"report.{name}" for name in LIMITS]
    for record in records:
        texts = record.select(*keys)
        if texts[0] is not None:
            return texts
    return ()


def limits_of(records: Sequence[RunRecord], asked: Mapping[str, float | None]) -> ReportConfig:
    """Return the limits that the runs have logged, and their preference.

    Args:
        asked: requested limits, by the key of `report`; None: the logged limit.

    Raises:
        ConfigError: a limit is out of range.
        TrackingError: a logged limit is not a number; a store is untrusted.
    """
    limits: dict[str, Any] = {}
    preferred = _find_preferred(records)
    if preferred:
        limits[PREFER] = preferred
    try:
        for name, text in zip(LIMITS, _find_logged(records), strict=False):
            if text is not None:
                limits[name] = json.loads(text)
        for name, value in asked.items():
            if value is not None:
                limits[name] = value
        config = ReportConfig(**limits)
        check(config)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise TrackingError("report.max_drop: the runs have logged invalid limits") from None
    return config
