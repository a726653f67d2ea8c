"""Act at one point of one job of a sweep.

`python strike.py JOB WORDS...` calls run.py, and kills it (SIGKILL) at that point of job JOB.
"""

import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resnet8ptq.experiment import outputs

RUN = Path(__file__).parents[1] / "run.py"


def before_results(job: int, act: Callable[[], object]) -> Callable[..., None]:
    """Return `outputs.write` that calls `act` before it writes the results of job number `job`."""
    write = outputs.write

    def acting(folder: Path, *args: Any) -> None:
        if folder.name.startswith(f"{job}_"):
            act()
        write(folder, *args)

    return acting


if __name__ == "__main__":
    number = int(sys.argv.pop(1))
    outputs.write = before_results(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
    sys.argv[0] = str(RUN)
    runpy.run_path(sys.argv[0], run_name="__main__")
