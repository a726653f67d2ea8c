"""Peak memory of calibrating on more images."""

import re
from dataclasses import asdict

from benchmarks.setting import NO_LATENCY, Record, Setting, find_runs, read_run
from benchmarks.tables import megabytes, table

METHODS = ("entropy", "percentile")
SAMPLES = (100, 500, 2000)  # of each of ten classes


def measure(setting: Setting) -> Record:
    """Run each method on 1,000, 5,000 and 20,000 images; note the imported packages."""
    runs = []
    for method in METHODS:
        cache = setting.copy_cache()  # its own: histograms serve every method
        setting.run(setting.fresh(), cache, NO_LATENCY)  # makes the baseline
        for samples in SAMPLES:
            # Importing is listed by Python itself, on stderr.
            done = setting.call(
                folder := setting.fresh(),
                cache,
                f"calib={method}",
                f"calib.samples_per_class={samples}",
                NO_LATENCY,
                flags=("-X", "importtime"),
            )
            run = {**read_run(next(find_runs(folder))), "usage": asdict(done.usage)}
            run |= {"images": 10 * samples, "imported": imported(done.err)}
            runs.append(run)
            peak = megabytes(run["usage"]["max_rss_bytes"])
            setting.say(f"{method}, {10 * samples} images: {peak} MB")
    return {"runs": runs}


def imported(log: str) -> list[str]:
    """Return which of the large libraries a log of `-X importtime` names."""
    names = set(re.findall(r"^import time:.*\| +(\w+)$", log, flags=re.MULTILINE))
    return sorted(names & {"tensorflow", "keras", "torch", "tf2onnx"})


def render(record: Record) -> str:
    """Return the section in Markdown."""
    rows = []
    for run in record["runs"]:
        cells = [run["calib"], f"{run['images']:,}", megabytes(run["usage"]["max_rss_bytes"])]
        logged = run["peak_memory_bytes"]
        cells += [megabytes(logged) if logged else "", f"{run['quantize_s']:.1f}"]
        rows.append([*cells, ", ".join(run["imported"]) or "none"])
    header = ["calib", "images", "process MB", "`peak_memory_bytes` MB", "quantize s", "imported"]
    return "\n\n".join(
        [
            "Peak resident memory of one run of `backend=onnx`: of the whole process, and as the "
            "run logs it. Network and baseline are cached, statistics are not. `imported`: those "
            "of TensorFlow, Keras, tf2onnx and torch that the run imports.",
            table(header, rows),
            *(
                f"{method}: largest divided by smallest, {_growth(record, method):.3f}."
                for method in METHODS
            ),
            "![Memory against calibration images](images/memory.png)",
        ]
    )


def _growth(record: Record, method: str) -> float:
    runs = [run for run in record["runs"] if run["calib"] == method]
    peaks = [run["usage"]["max_rss_bytes"] for run in runs]
    return float(max(peaks) / min(peaks))
