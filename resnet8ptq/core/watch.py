"""Prints the current step after a silence of the program, unless a bar already shows the step.

A thread checks the running steps, so slow code only has to name its step: see `console.waiting` and
`console.track`.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

QUIET_SECONDS = 2.5  # the silence before the first line of a step
LOOK_SECONDS = 0.5
LINE_SECONDS = 15.0  # the longest pause between the lines of a step that takes minutes
_FRAMEWORKS = {  # modules that users know by name
    "ai_edge_quantizer",
    "executorch",
    "keras",
    "mlflow",
    "nncf",
    "onnx",
    "onnxruntime",
    "openvino",
    "tensorflow",
    "torch",
    "torchao",
    "transformers",
}


def _now() -> float:
    return time.monotonic()


@dataclass(eq=False)
class WatchedStep:
    """A running step, with its progress if it has parts.

    Attributes:
        unit: the name of the parts, such as `batches`; empty for a step without progress.
        total: the number of parts; None if it is unknown.
        done: the number of finished parts.
        begin: the time of the start, by `time.monotonic`.
    """

    label: str
    unit: str = ""
    total: int | None = None
    done: int = 0
    begin: float = field(default_factory=lambda: _now())

    def describe(self) -> str:
        """Return the label with the progress; for a step without parts, with its seconds so far."""
        if not self.unit:
            return f"{self.label} ... {_now() - self.begin:.0f} s"
        if self.total is None or self.done == 0:
            return f"{self.label}: {self.done} {self.unit}"
        seconds = (_now() - self.begin) / self.done * (self.total - self.done)
        left = f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
        return f"{self.label}: {self.done} of {self.total} {self.unit}, {left} left"


class Watch:
    """The running steps of this process, outermost first, and the time of its last line.

    Args:
        write: a function that writes a line.
        draws: returns whether the terminal already shows running steps as bars.

    Attributes:
        between: the label between steps; if empty, no line is printed there.
        quiet_s: the silence before a line in seconds; during a long step, the silence grows up to
            `LINE_SECONDS`.
    """

    def __init__(
        self, write: Callable[[str], None], draws: Callable[[], bool] = lambda: False
    ) -> None:
        self._write = write
        self._draws = draws
        self._forget()
        # A forked child lacks the thread, and must not inherit a lock that the thread holds.
        os.register_at_fork(
            before=lambda: self._lock.acquire(),
            after_in_parent=lambda: self._lock.release(),
            after_in_child=self._forget,
        )

    def _forget(self) -> None:
        self.steps: list[WatchedStep] = []
        self.between = ""
        self.quiet_s = QUIET_SECONDS
        self._modules = len(sys.modules)
        # `turned` is the time of a line or another step
        self._heard = self._said = self._turned = _now()
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs in this process."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
                self._thread.start()

    def hear(self) -> None:
        """Restart the wait for the next line, because one was written."""
        self._heard = self._turned = _now()

    @contextmanager
    def step(self, label: str, unit: str = "", total: int | None = None) -> Iterator[WatchedStep]:
        """Register a running step during the block, and start the thread."""
        step = WatchedStep(label, unit, total)
        if not self.steps and not self.between:  # no line was due before
            self._heard = step.begin
        self.start()
        self.steps.append(step)
        self._turned = step.begin
        try:
            yield step
        finally:
            if step in self.steps:  # a fork within the block has no steps
                self.steps.remove(step)
            self._turned = _now()

    def look(self) -> float:
        """Write a line if it is due; return the seconds until the next one.

        The line has the innermost step, and the outer ones that have progress. Without steps, it
        has the label of `_find_import`, else `between`. No line is due while bars show the steps.
        """
        with self._lock:
            steps = [*self.steps]
            now = _now()
            # A long silent step needs fewer lines
            pause = min(max(self.quiet_s, (now - self._turned) / 30), LINE_SECONDS)
            left = max(self._heard, self._said) + pause - now
            if left > 0:
                return left
            if steps and not self._draws():
                *outer, inner = steps
                shown = [step for step in outer if step.unit]
                lines = [step.describe() for step in [*shown, inner]]
                self._write("; ".join(lines))
            elif self.between and not steps:
                self._write(f"{self._find_import() or self.between} ... {now - self._turned:.0f} s")
            self._said = now
            self._modules = len(sys.modules)
            return pause

    def _find_import(self) -> str:
        """Return a label for the imports since a line was last due; empty if there are none.

        The label names the latest of `_FRAMEWORKS`; without one, it is `Loading libraries`.
        """
        names = list(sys.modules)  # names in the order in which their imports began
        for name in reversed(names[self._modules :]):
            library = name.partition(".")[0]
            if library in _FRAMEWORKS:
                return f"Loading {library}"
        if len(names) > self._modules:
            return "Loading libraries"
        return ""

    def _run(self) -> None:
        with suppress(OSError, ValueError):  # the pipe or the stream is closed
            while True:
                time.sleep(min(self.look(), LOOK_SECONDS))  # a new step may need a line earlier
