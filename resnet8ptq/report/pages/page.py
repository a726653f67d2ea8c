"""The report of a sweep or a single run: `report.md`, `report.html`, `runs.csv` and figures.

    resnet8ptq report                        the newest sweep or single run
    resnet8ptq report experiment=NAME        the newest of that MLflow experiment
    resnet8ptq report run_id=ID              the sweep with that parent run, or a run

`max_drop=0.05`, `min_accuracy=0.85` and, with task=deviation, `min_sqnr_db=30` replace limits that
the runs logged. `folder=PATH` is the folder of the files (default: that of the sweep or run if it
was made here, else the current one), `uri=` and `root=` set the MLflow store. The files are also
logged on the parent run, or on the single run.
"""

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure

from resnet8ptq.config.naming import Combination
from resnet8ptq.core import background, command, figures, files, templates
from resnet8ptq.core.console import waiting
from resnet8ptq.core.table import Table
from resnet8ptq.core.text import escape_markdown, safe_name
from resnet8ptq.report import answer, notes, table, verdicts
from resnet8ptq.report.families import (
    Family,
    all_records,
    best_first,
    class_power,
    headings_of,
    records_of,
)
from resnet8ptq.report.loading import MAX_BYTES, add_earlier_runs
from resnet8ptq.report.logged_limits import LIMITS, limits_of
from resnet8ptq.report.pages import (
    layer_errors,
    methodology,
    plots,
    run_pages,
    spread,
    trade_off,
    web_page,
    wrong_answers,
)
from resnet8ptq.report.pages.layer_errors import HeatMap
from resnet8ptq.report.pages.trade_off import Panel
from resnet8ptq.report.pages.wrong_answers import WrongAnswers
from resnet8ptq.report.recommend import (
    ModelSelection,
    families_of,
    other_choice,
    own_family,
    why_none,
)
from resnet8ptq.report.selection import load_selections
from resnet8ptq.report.table import Row
from resnet8ptq.report.terminal import REPORT
from resnet8ptq.report.verdicts import OUTCOMES
from resnet8ptq.tasks.scoring.metric import Metric
from resnet8ptq.tracking import history, origin
from resnet8ptq.tracking.mlflow_store import upload
from resnet8ptq.tracking.mlflow_store.store import Store, StoreArguments, open_store
from resnet8ptq.tracking.record import RunRecord
from resnet8ptq.tracking.sweep_file import is_sweep_folder

log = logging.getLogger(__name__)

Figures = Mapping[str, bytes]  # file name -> PNG or SVG


def write_report(
    store: Store, parent_id: str, chosen: Sequence[ModelSelection], folder: Path
) -> list[Path]:
    """Write the report of a sweep or a single run, and log it on that run.

    The verdicts are also logged, see `run_pages.log_answers`.

    Args:
        parent_id: the id of the sweep's parent run, or of the single run.
        chosen: a selection for each family; empty for a sweep of analyses, which has only
            `report.html`.

    Returns:
        The paths of the files, in `folder`.
    """
    # Draw the figures, and read those of the recommended runs
    families = families_of(chosen)
    panels = []
    wrong = []
    drawn: dict[str, bytes] = {}
    for prefix, selected in zip(_prefixes(families), chosen, strict=True):
        over = trade_off.panels(selected)
        panels.append(over)
        for name, content in _find_figures(store, selected, over).items():
            drawn[prefix + name] = content
        wrong.append(wrong_answers.load_wrong_answers(store, selected))

    # Write the pages and the table
    heat_maps = background.ask(layer_errors.load_heat_maps, store, parent_id)
    texts = {REPORT: to_html(chosen, panels, figures=drawn, wrong=wrong, heat_maps=heat_maps)}
    if chosen:
        texts["report.md"] = to_markdown(chosen, drawn)
        texts["runs.csv"] = table.to_csv(all_records(families))
    paths = []
    for name, content in (drawn | _encode(texts)).items():
        files.write_bytes(folder / name, content)
        paths.append(folder / name)

    # Log the files and the answers on the pages in MLflow
    background.ask(upload.log_files, store, parent_id, paths)
    run_pages.log_answers(store, parent_id, chosen)
    return paths


def _find_figures(
    store: Store, selected: ModelSelection, over: Sequence[Panel]
) -> dict[str, bytes]:
    """Return the figures of a family, with those of the first recommended run, by file name."""
    drawn = _draw(selected)
    if over:
        drawn["trade_offs.svg"] = trade_off.to_svg(over).encode()
    recommended = selected.recommendations
    if recommended and recommended[0].choice is not None:
        names = selected.family.task.files.captions
        drawn |= _load_figures(store, recommended[0].choice.record, names)
    return drawn


def _encode(texts: Mapping[str, str]) -> dict[str, bytes]:
    return {name: text.encode() for name, text in texts.items()}


def _load_figures(store: Store, record: RunRecord, names: Collection[str]) -> dict[str, bytes]:
    """Read the figures of a run; leave out missing or damaged ones, with a warning.

    The background process may draw the figures after the run has ended. If the process was
    killed before, they are missing.
    """
    lacks = "the report leaves out a figure"
    loaded = {}
    for name in names:
        content = history.read_if_sound(store, record, name, reader=_read_png, lacks=lacks)
        if content is not None:
            loaded[name] = content
    return loaded


def _read_png(path: Path) -> bytes:
    return figures.check_png(files.read_bytes(path, MAX_BYTES))


def to_markdown(chosen: Sequence[ModelSelection], figures: Collection[str]) -> str:
    """Return the report in Markdown, with a section for each family of runs.

    The text links to those figures whose file names are in `figures`.
    """
    families = families_of(chosen)
    titles = headings_of(families)
    sections = []
    for heading, selected, prefix in zip(titles, chosen, _prefixes(families), strict=True):
        sections.append((heading, _render(selected, figures, prefix)))
    text = templates.load("resnet8ptq.report.pages", "report.md.j2").render(
        title="; ".join(titles),
        note=notes.FAMILIES_NOTE.format(count=len(families)),
        sections=sections,
    )
    return templates.tidy(text)


def to_html(
    chosen: Sequence[ModelSelection],
    panels: Sequence[list[Panel]],
    figures: Figures,
    wrong: Sequence[WrongAnswers | None] | None = None,
    heat_maps: Sequence[HeatMap] = (),
) -> str:
    """Return the report as one page, see `web_page`.

    Args:
        panels: trade-off panels of each family, drawn as inline SVG.
        figures: image files of the details, by name.
        wrong: wrong answers of the first recommended model of each family.
        heat_maps: the errors by layer, see `layer_errors`.
    """
    families = families_of(chosen)
    details = []
    for selected, prefix in zip(chosen, _prefixes(families), strict=True):
        details.append(_render(selected, figures, prefix, page=True))
    heads = headings_of(families)
    wrong = wrong or [None] * len(chosen)
    return web_page.to_html(
        heads, chosen, panels, details=details, wrong=wrong, images=figures, heat_maps=heat_maps
    )


def _prefixes(families: Sequence[Family]) -> list[str]:
    """Return the prefix of the figure names of each family; empty for a single family."""
    if len(families) < 2:
        return [""] * len(families)
    return [f"set{number}_" for number, _ in enumerate(families, 1)]


def _render(
    selected: ModelSelection, figures: Collection[str], prefix: str, page: bool = False
) -> str:
    """Return the section of one family in Markdown.

    Args:
        figures: the file names of the figures that exist.
        prefix: prefix of the figure names of this family; empty if it is the only one.
        page: whether the section is for the HTML page, which has table and trade-off elsewhere.
    """
    family = selected.family
    limits = selected.limits
    recommended = selected.recommendations
    own = own_family(selected, recommended)

    # Make the table and its notes
    whole = table.make(family.records)
    shown, cut = table.shorten(family.records, whole)
    lines = notes.collect(family)
    if page:  # the page has the warnings above the section
        above = notes.collect_warnings(family)
        lines = [line for line in lines if line not in above]

    # Collect the classes that lose, by model and in total
    losses = []
    losing: Counter[str] = Counter()
    for cell in family.models:
        if cell.worse_classes:
            losses.append((cell.label, cell.worse_classes))
            losing.update(cell.worse_classes)

    # Name the figures; the template also asks for those that were not drawn
    own_figures: dict[str, str | None] = {"trade_offs": None, "class_impact": None}
    for name in ("trade_offs.svg", "class_impact.png"):
        if prefix + name in figures:
            own_figures[name.partition(".")[0]] = prefix + name
    of_task = {}
    for name, caption in family.task.files.captions.items():
        if prefix + name in figures:
            of_task[prefix + name] = caption

    # Headings lie one level deeper if there are several families
    level = "##"
    if prefix:
        level = "###"

    # Leave out parts that this family does not need
    folds = []
    if cut:
        folds = _fold(whole, family.metric)
    tested_classes = family.class_names
    if family.stopped:  # then no class is tested
        tested_classes = ()
    ranges = [name for name in figures if name.startswith(f"{prefix}ranges_")]
    return templates.load("resnet8ptq.report.pages", "family.md.j2").render(
        level=level,
        page=page,
        summary=summarize(selected),
        other_choice=other_choice(selected),
        selected=selected,
        recommendations=recommended,
        own=own.corrected,
        assessed_all=family.corrected,
        metric=family.metric,
        table=_to_markdown(shown),
        cut=cut,
        folds=folds,
        many=table.MANY,
        notes=lines,
        class_names=tested_classes,
        class_power=class_power(family),
        losses=losses,
        losing=losing.most_common(),
        figures=own_figures,
        drawn=of_task,
        ranges=ranges,
        spreads=spread.measure_spreads(family, limits),
        methodology=methodology.describe(family),
    )


def _to_markdown(shown: Table[Row]) -> str:
    return shown.without_empty().to_markdown(escape_markdown)


def _fold(whole: Table[Row], metric: Metric) -> list[tuple[str, str]]:
    """Return a heading and a table of runs for each combination, that of the best run first."""
    runs = table.rows_of_runs(whole)
    groups: dict[Combination, list[Row]] = {}
    for index in best_first(records_of(runs)):
        groups.setdefault(runs[index].record.combination, []).append(runs[index])
    folds = []
    for name, rows in groups.items():
        heading = _head(name, records_of(rows), metric)
        folds.append((heading, _to_markdown(replace(whole, rows=rows))))
    return folds


def _head(name: Combination, records: Sequence[RunRecord], metric: Metric) -> str:
    """Return the heading of the runs of a combination, with their number, metric and verdicts."""
    outcomes: Counter[str] = Counter()
    values = []
    for run in records:
        outcomes[run.verdict or run.status] += 1
        value = run.value_of(metric)
        if value is not None:
            values.append(value)

    # Join the parts: number of runs, range of the metric, verdicts
    parts = ["1 run"]
    if len(records) > 1:
        parts = [f"{len(records):,} runs"]
    if values:
        ends = sorted({metric.show(min(values)), metric.show(max(values))})
        parts.append(f"{metric.title} {' to '.join(ends)}")
    parts.append(table.say_counts(outcomes))
    combination = " ".join(filter(None, name.cells))
    return f"{combination}: {'; '.join(parts)}"


def summarize(selected: ModelSelection) -> list[str]:
    """Return sentences on the runs, the verdicts, and the recommended model or the lack of one."""
    family = selected.family
    measured = selected.family.measured
    # Count the runs, and state the limits and the verdicts
    lines = [_say_counts(family)]
    if len(family.models) < len(measured):
        lines.append(f"The measured runs wrote {len(family.models)} different files.")
    if not measured:
        return [*lines, "No quantized model was measured, so nothing can be recommended."]
    reference = family.task.reference
    if reference is not None:
        lines.append(reference.note)
    doubts = dict.fromkeys(cell.record.doubt for cell in measured)
    lines += filter(None, doubts)
    lines.append(_say_verdicts(selected))

    # Add the answer, or why there is none
    if not selected.recommendations:
        return [*lines, *why_none(selected)]
    best = answer.explain(selected)[0]
    lines.append(f"{best.headline}. {best.verdict}")

    # Explain a choice among models that are not shown to keep the limit
    if not selected.shown:
        none = "No model passes."
        if selected.apart:
            none = (
                "The verdicts above are on the reported samples. Models are chosen on the "
                "selection samples, and no model passes on those alone."
            )
        choice = "cannot be chosen"
        if selected.within:
            choice = "are chosen among the models with a measured loss within the limit"
        lines.append(
            f"{none} Therefore the smallest and the fastest {choice}. More samples may change this."
        )
    return lines


def _say_counts(family: Family) -> str:
    """Return a sentence with the numbers of all, measured, unsupported, failed and killed runs."""
    statuses = Counter(cell.record.status for cell in family.cells)
    text = f"{len(family.cells)} combinations requested: {len(family.measured)} measured"
    for status in ("unsupported", "failed", "killed"):
        if status in statuses:
            text += f", {statuses[status]} {status}"
    return f"{text}."


def _say_verdicts(selected: ModelSelection) -> str:
    """Return the limits, and the number of models by verdict, as two sentences."""
    family = selected.family
    metric = family.metric
    limit = metric.say_limit(metric.limit(selected.limits))
    least = verdicts.least_of(metric, selected.limits)
    if least is not None:
        limit += f", and {metric.title} at least {metric.show(least)}"
    outcomes = Counter(cell.record.verdict for cell in family.models)
    numbers = []
    for name in OUTCOMES:
        if name in outcomes:
            numbers.append(f"{outcomes[name]} {name}")
    on_all = f"Verdicts on the {len(family.models)} quantized models: {', '.join(numbers)}."
    return f"Limit: {limit}. {on_all}"


def _draw(selected: ModelSelection) -> dict[str, bytes]:
    """Return the figures drawn from the family's values, without the trade-off, by file name."""
    family = selected.family
    # Let another process draw the ranges, which only some runs have, while this one draws the rest
    with_ranges = [cell for cell in family.cells if cell.ranges]
    having = Family(tuple(with_ranges))
    ranges = background.put(_draw_ranges, having)
    drawn: dict[str, Figure | None] = {}
    if not family.stopped:
        drawn["class_impact.png"] = plots.class_impact(family)
    drawn["ranges_of_weights.png"] = plots.weight_ranges(having)
    return _to_png(drawn) | background.result(ranges)


def _draw_ranges(family: Family) -> dict[str, bytes]:
    drawn: dict[str, Figure | None] = {}
    backends = {cell.record.backend for cell in family.measured}
    for backend in sorted(backends):
        drawn[f"ranges_{safe_name(backend)}.png"] = plots.activation_ranges(family, backend)
    return _to_png(drawn)


def _to_png(drawn: Mapping[str, Figure | None]) -> dict[str, bytes]:
    images = {}
    for name, figure in drawn.items():
        if figure is not None:
            images[name] = figures.to_png(figure)
    return images


@dataclass
class Arguments(StoreArguments):
    """The settings of `resnet8ptq report`, as key=value."""

    run_id: str | None = None
    max_drop: float | None = None
    min_sqnr_db: float | None = None
    min_accuracy: float | None = None
    folder: str | None = None


def main(words: list[str]) -> None:
    """Write the report of a sweep or a single run, and print the paths of its files."""
    asked = command.parse_words(words, Arguments, __doc__, plain="run_id")
    with waiting("Reading the runs"):
        store = open_store(asked.tracking)
        if asked.run_id is None:
            parent = history.require_newest(store)
        else:
            parent = history.load_named(store, "run_id", asked.run_id)

    # A store is untrusted: its paths may name any folder
    own = Path(parent.folder)
    is_own = is_sweep_folder(own, parent.run_id) or origin.own_folder(parent) is not None
    folder = Path()
    if asked.folder:
        folder = Path(asked.folder)
    elif is_own:
        folder = own
    folder.mkdir(parents=True, exist_ok=True)

    # Assess the runs again, by the requested limits
    records = [parent]
    if parent.kind == history.SWEEP:
        records = history.load_compared(store, parent.run_id)
    requested = {name: getattr(asked, name) for name in LIMITS}
    limits = limits_of(records, requested)
    chosen = []
    if records:
        for selected in load_selections(store, parent, records=records, limits=limits):
            [family] = add_earlier_runs(store, [selected.family])
            chosen.append(replace(selected, family=family))
    with waiting("Drawing the report"):
        paths = write_report(store, parent_id=parent.run_id, chosen=chosen, folder=folder)
    if asked.run_id is None:
        history.say_newest(parent)
    print(*paths, sep="\n")
