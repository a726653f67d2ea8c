"""Lets the user's modules, such as a metric or a network, be imported from a folder."""

import os
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def allow(folder: Path) -> None:
    """Search a folder for modules; append it to `sys.path`, unless it is there.

    `python -m` puts the current folder first, so a file such as `random.py` or `onnx.py` would
    replace a library. This function moves such an entry to the end, unless the folder is the
    checkout of this package. Later child processes do not search their current folder first.
    """
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # for `-m` and `-c` in child processes
    path = str(folder)
    # Whether Python was called with `-m`
    is_module = getattr(sys.modules["__main__"], "__spec__", None) is not None
    by_option = is_module and not sys.flags.safe_path
    if by_option and sys.path[:1] == [path] and folder != PACKAGE.parent:
        del sys.path[0]
    if path not in sys.path:
        sys.path.append(path)
