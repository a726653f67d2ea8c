"""The file in a sweep's folder from which jobs in other processes read store and settings.

Jobs on another machine see the shared folder, but not the environment variables of the sweep.
"""

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from resnet8ptq.core import files
from resnet8ptq.core.errors import ConfigError, PtqError, TrackingError
from resnet8ptq.core.text import one_line

if TYPE_CHECKING:  # Hydra imports this module at every start, even for --help
    from resnet8ptq.tracking.mlflow_store.store import Store

FILE = "sweep.json"
MAX_BYTES = 2**20


@dataclass(frozen=True)
class ParallelJobs:
    """Settings for jobs in separate processes, here or on another machine."""

    at_once: int  # the largest number of jobs at the same time
    threads: int  # threads of each job, unless `threads` is set
    folder: str = field(default_factory=os.getcwd)  # relative paths in settings start here
    # Variables for the nodes of a cluster, which do not inherit the environment; a node's own value
    # has precedence.
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SharedSweep:
    """The data of a running sweep that its jobs need."""

    store: "Store"
    parent_id: str
    folder: Path
    parallel: ParallelJobs | None = None  # None if the jobs run one by one in the sweep's process
    resume: bool = False  # whether a finished run of another sweep counts as a job's run
    jobs: int | None = None  # the number of jobs; None if it is unknown
    varied: tuple[str, ...] = ()  # the settings that differ between jobs

    def save(self) -> None:
        """Write the file into the sweep's folder."""
        kept = asdict(self)
        del kept["folder"]
        # Readable by this user only: a database's URI or a variable may hold a password.
        text = json.dumps(kept, indent=2)
        files.write_text(self.folder / FILE, text, mode=0o600)

    @classmethod
    def load(cls, folder: Path) -> "SharedSweep":
        """Read the file of a sweep's folder.

        Raises:
            ConfigError: this machine does not see the file.
            TrackingError: the file is damaged, too large, or cannot be read.
        """
        from resnet8ptq.tracking.mlflow_store.store import Store

        path = folder / FILE
        try:
            kept = json.loads(files.read_bytes(path, MAX_BYTES))
            key = "parallel"
            if "worker" in kept:  # the key in files of earlier versions
                key = "worker"
            parallel = None
            if kept[key] is not None:
                parallel = ParallelJobs(**kept[key])
            store = Store(**kept["store"])
            return cls(
                store=store,
                parent_id=kept["parent_id"],
                folder=folder,
                parallel=parallel,
                resume=kept["resume"],
                jobs=kept["jobs"],
                varied=tuple(map(str, kept.get("varied", ()))),
            )
        except FileNotFoundError as error:
            raise ConfigError(
                f"hydra.sweep.dir: {platform.node()} does not see {path}; expected a folder that "
                "every node of the cluster sees"
            ) from error
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise TrackingError(f"{path}: is damaged ({one_line(error)})") from None


def is_sweep_folder(folder: Path, parent_id: str) -> bool:
    """Return whether a folder holds the file of the sweep with this parent run.

    An untrusted store may name any folder.
    """
    try:
        return SharedSweep.load(folder).parent_id == parent_id
    except PtqError:  # the file is missing, or is not a sweep's
        return False
