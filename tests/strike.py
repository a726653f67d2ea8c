"""Kill a process at one point of one job of a sweep: `python strike.py JOB PID WORDS...`.

Calls run.py; before job number JOB writes its results, PID gets SIGKILL; 0 is this process, -PID a
group of processes.
"""

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from resnet8ptq.experiment import outputs

RUN = Path(__file__).parents[1] / "run.py"


def strike_before_results(job: int, victim: int) -> None:
    write = outputs.write

    def strike(folder: Path, *args: Any) -> None:
        if folder.name.startswith(f"{job}_"):
            os.kill(victim or os.getpid(), signal.SIGKILL)
        write(folder, *args)

    outputs.write = strike


if __name__ == "__main__":
    strike_before_results(int(sys.argv.pop(1)), int(sys.argv.pop(1)))
    sys.argv[0] = str(RUN)
    runpy.run_path(sys.argv[0], run_name="__main__")
