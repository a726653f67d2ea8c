"""What a sweep tells its jobs, in a file of its folder.

Environment variables do not reach jobs on another machine, and a shared folder does.
"""

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from resnet8ptq.core import files
from resnet8ptq.core.errors import ConfigError, TrackingError
from resnet8ptq.core.text import one_line
from resnet8ptq.tracking import journal

if TYPE_CHECKING:  # Hydra imports this module at every start, --help too
    from resnet8ptq.tracking.store import Store


MAX_BYTES = 2**20


@dataclass(frozen=True)
class Worker:
    """What a job in a process of its own needs to know, wherever that process is.

    Attributes:
        at_once: how many jobs run at the same time, at most.
        threads: of each, where `threads` is not set.
        folder: the program's current folder, which relative paths in settings start from.
        variables: those of the environment that jobs depend on, for a cluster's nodes, which do
            not inherit them; what a node has set itself wins.
    """

    at_once: int
    threads: int
    folder: str = field(default_factory=os.getcwd)
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    """The running sweep as its jobs know it: its store, its parent run, its folder.

    Attributes:
        worker: how the jobs run; None: one after the other in the sweep's own process.
        resume: finished runs of other sweeps count.
        several: there may be more than one job.
    """

    store: "Store"
    parent_id: str
    folder: Path
    worker: Worker | None = None
    resume: bool = False
    several: bool = True

    def save(self) -> None:
        """Leave it where the jobs find it."""
        kept = {key: value for key, value in asdict(self).items() if key != "folder"}
        # Nobody else's: the URI of a database may hold its password, as may a variable.
        text = json.dumps(kept, indent=2)
        files.write_text(self.folder / journal.SWEEP_FILE, text, mode=0o600)

    @classmethod
    def load(cls, folder: Path) -> "Sweep":
        """Read what `save` left.

        Raises:
            ConfigError: this machine does not see the file.
            TrackingError: the file is damaged.
        """
        from resnet8ptq.tracking.store import Store

        path = folder / journal.SWEEP_FILE
        try:
            kept = json.loads(files.read_bytes(path, MAX_BYTES))
            worker = None if kept["worker"] is None else Worker(**kept["worker"])
            store = Store(**kept["store"])
            return cls(store, kept["parent_id"], folder, worker, kept["resume"], kept["several"])
        except FileNotFoundError as error:
            raise ConfigError(
                f"hydra.sweep.dir: {platform.node()} does not see {path}; takes a folder that "
                "every node of the cluster sees"
            ) from error
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise TrackingError(f"{path}: not what the sweep wrote ({one_line(error)})") from None
