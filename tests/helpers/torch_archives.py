"""Archives of torch with changed records."""

import zipfile
from collections.abc import Callable
from pathlib import Path

from resnet8ptq.models.gates import torch_archive


def forge(source: Path, target: Path, change: Callable[[dict[str, bytes]], object]) -> Path:
    """Copy an archive with its records changed in place."""
    with zipfile.ZipFile(source) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    change(records)
    target.write_bytes(torch_archive.pack(records).getvalue())
    return target
