"""Jobs of submitit as plain child processes. Imports submitit: only for its launchers."""

import os
import shlex
import subprocess
import uuid
from typing import Any

from submitit.core.utils import JobPaths
from submitit.local.local import LocalExecutor, LocalJob


class ProcessExecutor(LocalExecutor):  # type: ignore[misc]
    """Starts the jobs themselves, where submitit's own starts a controller for each.

    That one would leave a job one second to end when it is interrupted, print a traceback, and
    take the job's exit code with it.
    """

    def _submit_command(self, command: str) -> "LocalJob[Any]":
        job_id = uuid.uuid4().hex
        paths = JobPaths(self.folder, job_id, 0)
        paths.folder.mkdir(parents=True, exist_ok=True)
        told = {
            **{"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_JOB_ID": job_id},
            **{"SUBMITIT_LOCAL_NTASKS": "1", "SUBMITIT_LOCAL_JOB_NUM_NODES": "1"},
            **{"SUBMITIT_LOCAL_NODEID": "0"},
            **{"SUBMITIT_LOCAL_GLOBALID": "0", "SUBMITIT_LOCAL_LOCALID": "0"},
        }
        with paths.stdout.open("ab") as out, paths.stderr.open("ab") as err:
            process = subprocess.Popen(
                shlex.split(command),
                env={**os.environ, **told},
                stdout=out,
                stderr=err,
                start_new_session=True,  # a terminal's Ctrl-C reaches the launcher, which tells it
            )
        return LocalJob(self.folder, job_id, process=process)
