"""What the shell sees: one line for an error, and an exit code.

| code | what |
|---|---|
| 0 | every run ended; an unsupported combination is a result |
| 1 | a run failed: its traceback is in the run |
| 2 | a setting is wrong |
| 130, 143 | interrupted, terminated |
"""

import gc
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from resnet8ptq.errors import ConfigError, PtqError, redact


def main(run: Callable[[], object]) -> int:
    """Run Hydra's main function; close the sweep, report the error, return the exit code."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors on instead of printing them
    # Imports make 400,000 objects that stay. Collecting garbage among them every 700 new ones, as
    # Python does by default, takes a tenth of a sweep's time.
    gc.set_threshold(20_000, 20, 20)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    status = "killed"
    try:
        run()
        status = "ok"
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        status = "failed"
        return report(error)
    finally:
        _close_sweep(status)


_WANTS_TRACEBACK = bool(os.environ.get("HYDRA_FULL_ERROR"))  # as the user set it
_COMPOSING = (HydraException, OmegaConfBaseException)
EXPECTED = (*_COMPOSING, PtqError, OSError)
_EXTRAS = {"launcher/joblib": "joblib", "sweeper/optuna": "search"}  # option of Hydra's: extra


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Report an error and leave, before Hydra announces a single run's failure in its own words.

    Not for a job of a sweep: there it would end the sweep.
    """
    try:
        yield
    except Exception as error:
        raise SystemExit(report(error)) from error


def report(error: Exception) -> int:
    """Print an error in one line, with its traceback where it is a surprise; return the code."""
    if _WANTS_TRACEBACK or not isinstance(error, EXPECTED):
        print(redact("".join(traceback.format_exception(error))), file=sys.stderr)
    print(f"error: {one_line(error)}", file=sys.stderr)
    # A wrong setting of one cell is that cell's failure: the others have run.
    settings = _COMPOSING if _sweep() else (*_COMPOSING, ConfigError)
    return 2 if isinstance(error, settings) else 1


def one_line(error: BaseException) -> str:
    """Join an error and its cause: Hydra puts the key in one and the reason in the other."""
    text = str(error)
    if isinstance(error, HydraException) and error.__cause__ is not None:
        text += f": {error.__cause__}"
    # What follows speaks of Hydra's and OmegaConf's insides.
    text = re.split(r"\s(?:Config search path:|reference_type=|object_type=)", text)[0]
    for option, extra in _EXTRAS.items():
        if f"'hydra/{option}'" in text:
            text += f"; {extra}: pip install -c constraints.txt -e '.[{extra}]'"
    return redact(" ".join(text.split())) or type(error).__name__


def _close_sweep(status: str) -> None:
    sweep = _sweep()
    if sweep and sweep.close(status) == "failed" and status == "ok":
        raise SystemExit(1)


def _sweep() -> Any:
    # Only where a job or the sweep's callback has imported it: --help does without MLflow.
    module = sys.modules.get("resnet8ptq.sweep")
    return module and module.current
