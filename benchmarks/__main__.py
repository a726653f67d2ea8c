"""`python -m benchmarks [section ...]`: measure, and write RESULTS.md.

The measurements are kept in results.json, outside of git: without it, RESULTS.md begins anew.
"""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks import calibration, results
from benchmarks.setting import Setting

NEEDED = ("CIFAR10_DIR", "RESNET8_H5")
OPTIONAL = {
    "calibration": (calibration.is_available, "bench"),
}


def main() -> int:
    """Measure the sections asked for; return the exit code."""
    arguments = parse_arguments()
    record = results.load()
    missing = [name for name in NEEDED if not Path(os.environ.get(name) or "-").exists()]
    if missing and not arguments.render:
        print(f"error: expected {' and '.join(missing)} to name the real files", file=sys.stderr)
        return 2
    if arguments.render and not record:
        print("error: --render: there is no benchmarks/results.json to render", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the running child
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as scratch:
        setting = Setting(Path(scratch), arguments.rounds)
        for name in [] if arguments.render else _chosen(arguments):
            if name in arguments.skip:
                continue
            if name in OPTIONAL and not OPTIONAL[name][0]():
                setting.say(f"{name}: left out: pip install -e '.[{OPTIONAL[name][1]}]'")
                continue
            setting.say(f"== {name}")
            measured = results.describe(arguments.rounds)
            record[name] = {**results.SECTIONS[name].measure(setting), "measured": measured}
            results.write(record)  # after each: an interrupted benchmark keeps its sections
    results.write(record)
    return 0


def _chosen(arguments: argparse.Namespace) -> list[str]:
    return arguments.sections or [*results.SECTIONS]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = list(results.SECTIONS)
    sections = f"{', '.join(names)}; default: all"
    parser.add_argument("sections", nargs="*", metavar="section", help=sections)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side (default: 3)")
    parser.add_argument(
        "--skip", nargs="*", choices=names, default=[], help="sections to leave out"
    )
    parser.add_argument("--render", action="store_true", help="only RESULTS.md, from results.json")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.sections) - set(names))
    if unknown:
        parser.error(f"section: got {', '.join(unknown)}, expected {' | '.join(names)}")
    if arguments.rounds < 1:
        parser.error(f"--rounds: got {arguments.rounds}, expected 1 or more")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
