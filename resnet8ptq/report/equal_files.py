"""Groups runs with equal files, such as torch's int8 and u8s8: these are one model.

Such runs share one row of the table, and count once where tests are corrected for the number of
models. If they were measured in different ways, such as with other numbers of threads, they have
separate rows, but still count once. Runs on other kernels (`models_of`) count separately.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from resnet8ptq.report.naming import varied
from resnet8ptq.tasks.scoring.statistics import holm
from resnet8ptq.tracking.params import PROVIDER
from resnet8ptq.tracking.record import RunRecord

T = TypeVar("T")
R = TypeVar("R")

RUN_ON = (PROVIDER, "measured_on")  # params: the provider and the machine that ran the file
# Settings of the measurement, not of the file.
_MEASURED_BY = ("threads", "data.name", "evaluate.", "latency.", "task.")


def group(records: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Return the runs in groups of equal files, measured in the same way, on the same samples.

    In a group, the steps of a search follow the run that confirms their file. The first run stands
    for the group. FP32 and runs without a result are groups of one.
    """
    measured_by = [key for key in varied(records) if key.startswith(_MEASURED_BY)]
    groups: dict[tuple[object, ...], list[RunRecord]] = {}
    for record, model in zip(records, models_of(records), strict=True):
        # FP32 and runs without a file stay alone
        key: tuple[object, ...] = (record.run_id,)
        if record.status == "ok" and record.quantized:
            key = (model, record.samples_digest, record.select(*measured_by))
        groups.setdefault(key, []).append(record)
    for members in groups.values():
        members.sort(key=lambda member: member.split == "choice")
    return list(groups.values())


def distinct(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the first run of each group."""
    return [members[0] for members in group(records)]


def models_of(records: Sequence[RunRecord]) -> list[tuple[str | None, ...]]:
    """Return a key of each run's model, which is equal for equal files on the same kernels.

    Files are equal if their hashes are. Names in a file may change its hash. Files of the same size
    and dtypes therefore also count as equal if all their outputs on the scored samples are equal
    bit for bit. A dynamically quantized file takes its ranges from the batch, so the key contains
    the batch size.
    """
    first: dict[tuple[object, ...], tuple[str | None, ...]] = {}
    models: list[tuple[str | None, ...]] = []
    for record in records:
        kernels = (record.backend, record.engine, record.dynamic_batch, *record.select(*RUN_ON))
        model: tuple[str | None, ...] = (*kernels, record.artifact_sha256 or record.run_id)
        # A file with equal outputs takes the key of the first such file
        if record.outputs_sha256:
            dtypes = record.select("weight_dtype", "activation_dtype")
            outputs = (*kernels, *dtypes, record.size_bytes, record.outputs_sha256)
            model = first.setdefault(outputs, model)
        models.append(model)
    return models


def count_models(records: Sequence[RunRecord]) -> int:
    """Return the number of different models of these runs, see `models_of`."""
    return len({*models_of(records)})


def by_model(
    records: Sequence[RunRecord],
    items: Sequence[T],
    test: Callable[[list[T]], Sequence[R]],
    worst: Callable[[list[T]], T],
) -> list[R]:
    """Test the models of several runs together; return, for each run, the result of its model.

    Two settings may give the same file, and a correction for both would reduce the power.

    Args:
        items: the argument of the test for each run.
        test: returns a result for each item of its list, corrected for their number.
        worst: returns the least favourable item of one model. Its runs may have scored differently,
            such as with other numbers of threads.
    """
    models = models_of(records)
    by_key: dict[tuple[str | None, ...], list[T]] = {}  # the arguments of each model
    for model, item in zip(models, items, strict=True):
        by_key.setdefault(model, []).append(item)
    tested = test([worst(of_model) for of_model in by_key.values()])
    results = dict(zip(by_key, tested, strict=True))
    return [results[model] for model in models]


def adjusted_p(records: Sequence[RunRecord]) -> dict[str, float]:
    """Return the p-values of the differences from FP32, by run id, corrected for the models (Holm).

    Only quantized runs with a logged p-value are tested.
    """
    tested = []
    p_values = []
    for record in records:
        if record.quantized and record.p_alone is not None:
            tested.append(record)
            p_values.append(record.p_alone)
    corrected = by_model(tested, p_values, test=holm, worst=max)
    return {record.run_id: p for record, p in zip(tested, corrected, strict=True)}
