"""Names the runs of tables, figures and pages by the settings that vary, and writes titles."""

from collections.abc import Sequence

from resnet8ptq.tasks import registry
from resnet8ptq.tracking.params import applies
from resnet8ptq.tracking.record import RunRecord

_VARY = (  # further settings that may name runs
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
    "planned_bits",  # stands for precision.plan, which has a key for each layer
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
_MEASURES = ("evaluate.split", "latency.enabled")  # settings that change no model
_NAMED = ("backend.flow", "backend.path")


def varied(records: Sequence[RunRecord]) -> list[str]:
    """Return the keys of the settings that differ between runs of one backend, sorted.

    `label` names the runs by these settings. `_is_setting` leaves out other settings, such as those
    in the four columns of every table.
    """
    by_backend: dict[str, list[RunRecord]] = {}
    for record in records:
        by_backend.setdefault(record.backend, []).append(record)

    # Compare the runs of each backend, whose settings have the same defaults
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
    """Return whether the resolved values of a setting differ among the runs that it affects."""
    values = set()
    for record in records:
        if _is_resolved(record, key) and applies(key, record.params):
            values.add(record.params.get(key))
    return len(values) > 1


def _is_resolved(record: RunRecord, key: str) -> bool:
    """Return whether the logged value of a setting is resolved, and not only requested.

    A run without a result may have ended before it resolved some values.
    """
    if record.status == "unsupported":
        return key not in ("data.name", "planned_bits", "measured_on")
    return record.status != "failed" or record.params.get(key) not in (None, "null")


def _is_setting(key: str) -> bool:
    """Return whether a param may name runs, see `_VARY` and `_VARY_BELOW`."""
    shown = key.endswith(".name") or key in _NAMED  # separate columns show these
    return key in _VARY or (key.startswith(_VARY_BELOW) and not shown and key not in _MEASURES)


def asked(record: RunRecord, keys: Sequence[str]) -> tuple[str | None, ...]:
    """Return a run's values of settings, with `auto` for bits that the run itself has chosen."""
    params = record.params
    if params.get("precision.plan") == "auto":
        params = {**params, "planned_bits": "auto"}
    return tuple(map(params.get, keys))


def labels(records: Sequence[RunRecord]) -> list[str]:
    """Return each run's combination as text, with the other settings that vary."""
    keys = varied(records)
    return [label([record], keys) for record in records]


def label(members: Sequence[RunRecord], keys: Sequence[str]) -> str:
    """Return the name of a row's runs: the combination, then the settings that vary."""
    cells = name_cells(members, keys)
    first = len(cells) - len(keys)
    words = cells[:first]
    for key, value in zip(keys, cells[first:], strict=True):
        if value:
            words.append(f"{key}={value}")
    return " ".join(filter(None, words))


def name_cells(members: Sequence[RunRecord], keys: Sequence[str]) -> list[str]:
    """Return the cells that name the runs of a row: the combination, and settings that vary.

    Different values of a cell are joined, such as `int8/u8s8`.
    """
    named = []
    for member in members:
        settings = [member.params.get(key, "") for key in keys]
        named.append([*member.combination.cells, *settings])
    joined = []
    for values in zip(*named, strict=True):
        different = dict.fromkeys(values)
        joined.append("/".join(different))
    return joined


def headings(families: Sequence[Sequence[RunRecord]]) -> list[str]:
    """Return the heading of each family of `families.group_by_samples`.

    A heading is the `title`, with the settings of the task that not all families share. Equal
    headings get a digest of the samples.
    """
    changed = [_find_changed(family) for family in families]
    shared = set(changed[0]).intersection(*changed) if changed else set()
    titles = []
    for family, settings in zip(families, changed, strict=True):
        own = [setting for setting in settings if setting not in shared]
        titles.append(", ".join([title(family), *own]))

    # Add the digest to equal titles
    shown = []
    for text, family in zip(titles, families, strict=True):
        if titles.count(text) > 1:
            digest = max((record.samples_digest for record in family), default="")
            text = f"{text}, digest {digest[:16]}…"
        shown.append(text)
    return shown


def _find_changed(family: Sequence[RunRecord]) -> tuple[str, ...]:
    """Return the first run's settings of the task that differ from the defaults, as key=value."""
    return registry.find_changed(family[0].params) if family else ()


def title(records: Sequence[RunRecord]) -> str:
    """Return data sets and models of the runs as text, with number and kind of samples, and task.

    Number and kind are left out unless all runs have the same number, and the task if it is
    classification. Runs that scored no samples count only if no run scored any.
    """
    # Collect the parts of the measured runs
    names = set()
    scored = set()
    totals = set()
    measured = [record for record in records if record.samples is not None]
    for record in measured or records:
        names.add((record.dataset, record.model))
        scored.add(record.scored_as)
        if record.samples is not None:
            totals.add(int(record.samples_planned or record.samples))
    texts = []
    for data, model in sorted(names):
        texts.append(", ".join(filter(None, (data, model))))  # a failed run may lack one
    text = "; ".join(texts)

    # Add the number of samples, if it is the same for all runs
    if len(totals) == 1:
        most = ""
        if any(record.stopped_early for record in records):
            most = "up to "
        text += f", {most}{totals.pop():,} {samples_of(measured)} samples"
    for name in sorted(scored - {"classification"}):
        text += f", task={name}"
    return text


def samples_of(records: Sequence[RunRecord]) -> str:
    """Return the kind of the runs' samples: `selection`, `held-out training` or `test`.

    If the runs have several kinds, the first of these counts.
    """
    kinds = {record.samples_from for record in records}
    for kind in ("selection", "held-out training"):
        if kind in kinds:
            return kind
    return "test"
