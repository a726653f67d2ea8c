"""Times sweeps against the bare library loop, round by round: `sweep4` and `sweep24`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.setting import FOUR, GRID, NO_LATENCY, Record, Setting
from benchmarks.tables import Row, usage_table

BARE = "bare"
FASTEST = "bare_shared"


@dataclass(frozen=True)
class Contender:
    """One side of a comparison; `once`: it runs in the first round only."""

    title: str
    run: Callable[[Setting], Record]
    once: bool = False


def _grid(*rest: str) -> Callable[[Setting], Record]:
    return lambda setting: setting.run_fresh(GRID, *rest)


SWEEP4 = {
    BARE: Contender("bare loop", lambda s: s.run_bare("--grid", "4")),
    "ours": Contender("run.py -m, default settings", lambda s: s.run_warm(*FOUR)),
    "ours_no_latency": Contender(
        "run.py -m, latency.enabled=false", lambda s: s.run_warm(*FOUR, NO_LATENCY)
    ),
    "again": Contender("run.py -m, repeated", lambda s: s.run_again(*FOUR)),
    "bare_empty": Contender("bare loop, with the conversion", lambda s: s.run_bare_empty()),
    "empty": Contender("run.py -m, empty cache", lambda s: s.run_empty(*FOUR)),
    "empty_no_latency": Contender(
        "run.py -m, empty cache, latency.enabled=false", lambda s: s.run_empty(*FOUR, NO_LATENCY)
    ),
}
SWEEP24 = {
    FASTEST: Contender(
        "fastest bare loop: MinMaxObserver, ONNX ranges shared by hand",
        lambda s: s.run_bare("--grid", "24", "--torch-observer", "minmax", "--share-ranges"),
    ),
    "warm": Contender("run.py, warm, default settings", lambda s: s.run_warm(GRID)),
    "warm_no_latency": Contender(
        "run.py, warm, latency.enabled=false", lambda s: s.run_warm(GRID, NO_LATENCY)
    ),
    "again": Contender("run.py, repeated", lambda s: s.run_again(GRID)),
    "cold": Contender("run.py, cold, default settings", _grid()),
    "cold_no_latency": Contender("run.py, cold, latency.enabled=false", _grid(NO_LATENCY)),
    BARE: Contender(
        "bare loop, HistogramObserver for entropy and percentile",
        lambda s: s.run_bare("--grid", "24"),
        once=True,
    ),
}


def measure(setting: Setting, contenders: Mapping[str, Contender]) -> Record:
    """Run each contender once a round; return every sample of each."""
    samples: dict[str, list[Record]] = {name: [] for name in contenders}
    _ = setting.swept  # made before the first turn
    for turn in range(setting.rounds):
        for name, contender in contenders.items():
            if turn == 0 or not contender.once:
                samples[name].append(contender.run(setting))
                wall_s = samples[name][-1]["usage"]["wall_s"]
                setting.say(
                    f"round {turn + 1} of {setting.rounds}: {contender.title}: {wall_s:.1f} s"
                )
    return {"samples": samples}


def measure_sweep4(setting: Setting) -> Record:
    """Time the sweep of the README: two frameworks, two dtypes."""
    return measure(setting, SWEEP4)


def measure_sweep24(setting: Setting) -> Record:
    """Time `experiment=grid`, and parts of it."""
    return measure(setting, SWEEP24)


def values(record: Record, name: str, key: str = "wall_s") -> list[float]:
    """Return the usage of a contender, round by round."""
    return [sample["usage"][key] for sample in record["samples"][name]]


def summarize_sweep4(record: Record) -> list[Row]:
    """Return this section's rows of the first table in RESULTS.md."""
    bare = values(record, BARE)
    converting = values(record, "bare_empty")
    return [
        Row(
            "sweep of 4, empty cache, with the conversion",
            values(record, "empty_no_latency"),
            theirs=converting,
            beside="bare loop with tf2onnx",
        ),
        Row(
            "sweep of 4, warm cache",
            values(record, "ours_no_latency"),
            theirs=bare,
            beside="bare loop",
        ),
        Row(
            "sweep of 4, warm cache, with latency",
            values(record, "ours"),
            theirs=bare,
            beside="bare loop, without latency",
        ),
        Row("sweep of 4, repeated", values(record, "again")),
    ]


def summarize_sweep24(record: Record) -> list[Row]:
    """Return this section's rows of the first table in RESULTS.md."""
    fastest = values(record, FASTEST)
    return [
        Row(
            "grid of 24, cache with the converted network only",
            values(record, "cold_no_latency"),
            theirs=fastest,
            beside="fastest bare loop",
        ),
        Row(
            "grid of 24, warm cache",
            values(record, "warm_no_latency"),
            theirs=fastest,
            beside="fastest bare loop",
        ),
        Row(
            "grid of 24, warm cache, with latency",
            values(record, "warm"),
            theirs=fastest,
            beside="fastest bare loop, without latency",
        ),
        Row("grid of 24, repeated", values(record, "again")),
    ]


def render_sweep4(record: Record) -> str:
    """Return the section in Markdown."""
    return "\n\n".join(
        [
            "`run.py -m backend=onnx,torch dtype=int8,uint8`: three configurations, and a fourth "
            "that torch does not support. The cache is warm where the row does not say otherwise. "
            "The conversion of the bare loop is tf2onnx's own function; ours also compares the "
            "converted network with the original.",
            _usage_table(record, SWEEP4, BARE),
            _accuracy_line(record, "ours"),
        ]
    )


def render_sweep24(record: Record) -> str:
    """Return the section in Markdown."""
    return "\n\n".join(
        [
            "`run.py experiment=grid`: 18 configurations, and 6 that torch does not support. Cold: "
            "an empty folder, and a cache with only the converted network. torch "
            "has no entropy or percentile observer. In their place, the bare loop uses "
            "MinMaxObserver, its cheapest observer, or HistogramObserver (measured once).",
            _usage_table(record, SWEEP24, FASTEST),
            _accuracy_line(record, "cold"),
        ]
    )


def _usage_table(record: Record, contenders: Mapping[str, Contender], base: str) -> str:
    samples = record["samples"]
    usages = {
        contender.title: [sample["usage"] for sample in samples[name]]
        for name, contender in contenders.items()
    }
    return usage_table(usages, {contenders[base].title: "bare loop"})


def _cell(run: Record) -> tuple[object, ...]:
    return run["backend"], run["dtype"], run["calib"], run["per_channel"]


def _accuracy_line(record: Record, name: str) -> str:
    """Return a sentence with the largest accuracy difference by framework and method."""
    bare, ours = (
        {_cell(run): run["accuracy"] for run in record["samples"][side][0]["runs"]}
        for side in (BARE, name)
    )
    worst: dict[str, float] = {}
    for cell in ours:
        label = f"{cell[0]} {cell[2]}"
        worst[label] = max(worst.get(label, 0.0), 100 * abs(ours[cell] - bare[cell]))
    differences = ", ".join(f"{label} {points:.2f}" for label, points in worst.items())
    return (
        "Both sides quantize the same configurations. Largest difference of accuracy, in points: "
        f"{differences}."
    )
