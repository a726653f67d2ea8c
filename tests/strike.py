"""Call run.py, and strike at one point of one job: `python strike.py JOB PID WORDS...`.

When job number JOB is about to write its results, PID is killed with SIGKILL; 0 is this process.
"""

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from resnet8ptq.experiment import outputs

REPO = Path(__file__).parents[1]


def main(job: str, victim: int) -> None:
    write = outputs.write

    def strike(folder: Path, *args: Any) -> None:
        if folder.name.startswith(f"{job}_"):
            os.kill(victim or os.getpid(), signal.SIGKILL)
        write(folder, *args)

    outputs.write = strike
    runpy.run_path(str(REPO / "run.py"), run_name="__main__")


if __name__ == "__main__":
    _, number, pid, *words = sys.argv
    sys.argv = [str(REPO / "run.py"), *words]
    main(number, int(pid))
