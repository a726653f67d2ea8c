"""Judges quantized files of any program by comparing them with their FP32 network.

    resnet8ptq judge FP32 FILE... DATA              a verdict for each file, one a line
    resnet8ptq judge fp32.onnx int8.onnx samples.npz
    resnet8ptq judge fp32.h5 a.onnx b.tflite c.xml data=folder data.root=pictures preprocess=unit

FP32: any network for `resnet8ptq run model.path=`. FILE: .onnx (QDQ, QOperator, dynamic,
weights in blocks, float16), .tflite, OpenVINO's .xml with its .bin or a .zip of both,
ExecuTorch's .pte, torch's .pt2.
All files run on the same samples. Their loss against FP32 is judged as in a sweep
(docs/verdict.md).

Exit codes, the worst first; the worst file decides: 1 an error; 2 wrong input, such as a file that
is damaged, not quantized or of other sizes; 3 one fails; 4 one is undecided, void or unsupported; 0
all pass; 130 interrupted. `max_drop=0.05`, `min_sqnr_db=30` and `min_accuracy=0.85` set limits.
`format=json` prints a list of verdicts in the form of docs/verdict.md, `format=markdown` a summary
for a pull request. Other words are settings of `resnet8ptq run`, such as `latency.enabled=false`.
`resnet8ptq run +analysis=inspect backend=file backend.path=FILE` describes a file.
"""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from resnet8ptq import run
from resnet8ptq.backends.file import reading
from resnet8ptq.config import words as grammar
from resnet8ptq.core import background, command, files, invocation
from resnet8ptq.core.errors import ConfigError, TrackingError
from resnet8ptq.core.text import no_such_name
from resnet8ptq.data.sources import name_file
from resnet8ptq.report.logged_limits import LIMITS
from resnet8ptq.report.verdicts import UNSUPPORTED
from resnet8ptq.results import RunRecord, load_sweep
from resnet8ptq.results.continuous_integration import assess_run
from resnet8ptq.results.document import Answer, describe, to_json, to_markdown
from resnet8ptq.sweeps import running

_FORMATS = ("text", "json", "markdown")
_WORSE = (0, 4, 3, 2, 1)  # the exit codes from best to worst
# Other keys of `model`, such as `model.fold`, apply to the FP32 file
_CHOOSES_NETWORK = {"model", "model.path", "model.module", "benchmark", "benchmark.name"}


@dataclass(frozen=True)
class Arguments:
    """The words of the command.

    Attributes:
        files: the quantized files, after the FP32 file unless a setting names the network.
        settings: words of `resnet8ptq run`: settings and paths of data.
        format: the output format, one of `_FORMATS`.
    """

    files: list[str]
    settings: list[str]
    format: str = "text"

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Arguments":
        """Split the command line into files, settings and the output format.

        Raises:
            ConfigError: the words name no quantized file beside the FP32 network, or the output
                format is unknown.
        """
        files: list[str] = []
        settings = []
        chosen = "text"
        for word in words:
            if files and _holds_samples(word):
                settings.append(word)  # `run` takes it as data.root
            elif _is_file(word):
                files.append(word)
            elif word.startswith("format="):
                chosen = word.partition("=")[2]
            else:
                settings.append(_of_report(word))

        # Refuse words that name nothing to judge
        parsed = cls(files, settings, chosen)
        if parsed.format not in _FORMATS:
            raise ConfigError(no_such_name("format", parsed.format, _FORMATS))
        if not parsed.judged:
            raise ConfigError(
                f"judge: got {' '.join(files) or 'no files'}, expected FP32 FILE...; --help "
                "explains"
            )
        return parsed

    @property
    def names_network(self) -> bool:
        """Whether a setting names the FP32 network."""
        return not _CHOOSES_NETWORK.isdisjoint(map(grammar.key_of, self.settings))

    @property
    def judged(self) -> Sequence[str]:
        """The quantized files."""
        if self.names_network:
            return self.files
        return self.files[1:]

    def to_sweep(self) -> list[str]:
        """Return the command-line arguments of the sweep that scores the files."""
        words = ["-m", "backend=file", "evaluate.choice=none"]
        if not self.names_network:
            words.append(grammar.assign("model.path", self.files[0]))
        paths = ",".join(map(grammar.quote, self.judged))
        return [*words, f"backend.path={paths}", *self.settings]


def main(words: Sequence[str]) -> int:
    """Score the files in a sweep, and print a verdict for each.

    Returns:
        The exit code of the worst verdict, or 1 if the sweep failed without a failed file. Without
        verdicts, the exit code of the sweep, or 1 if that is 0. The code is 0 for `--help`, and 2
        without words.

    Raises:
        ConfigError: a word is wrong or missing, or the sweep has no runs. Errors in settings are
            printed instead.
        TrackingError: the sweep cannot be read back.
    """
    if not words or {"-h", "--help"} & {*words}:
        print(invocation.adapt(__doc__ or ""))
        return 0 if words else 2
    asked = Arguments.parse(words)
    for file in asked.judged:
        reading.find_suffix(Path(file), key="judge")

    # If a program reads the verdicts, standard output must hold nothing else
    progress = sys.stdout
    if asked.format != "text":
        progress = sys.stderr
    with contextlib.redirect_stdout(progress):
        with background.allowed():
            outcome = run.execute(asked.to_sweep(), _report)
        code = outcome.ending.code
        if outcome.sweep_folder is None or code not in (0, 1):
            return code or 1
        answers = [_answer(judged) for judged in load_sweep(folder=outcome.sweep_folder).runs]
    _print(asked.format, answers)
    codes = [*map(_exit_code, answers)]
    if code and not {1, 2} & {*codes}:  # the sweep failed, and not a file
        return 1
    return max(codes, key=_WORSE.index, default=1)


def _is_file(word: str) -> bool:
    """Return whether a word is a path, which may contain `=`, and not a setting."""
    if word.startswith(("-", "+", "~")):
        return False
    return "=" not in word or Path(word).is_file()


def _holds_samples(word: str) -> bool:
    """Return whether a word is a folder, or a file of samples by its name."""
    path = files.expand(word)
    return path.is_dir() or (path.is_file() and name_file(path) is not None)


def _report(error: Exception) -> int:
    """Print an error of the sweep; return its exit code.

    An expected error of a job in this process is not printed here: the log has it, and the verdicts
    repeat it.
    """
    begun = running.find_running_sweep()
    is_logged = begun is not None and command.explain(error) in begun.failures
    if is_logged and isinstance(error, command.EXPECTED):
        return command.exit_code(error)
    return command.print_error(error)


def _answer(judged: RunRecord) -> Answer:
    """Return the verdict on a run; for an unmeasured run `unsupported`, with its status."""
    try:
        return assess_run(judged)
    except TrackingError:
        return Answer(UNSUPPORTED, judged, because=f"{judged.status}: {judged.why_none}")


def _print(form: str, answers: Sequence[Answer]) -> None:
    if form == "json":
        print(f"[{', '.join(map(to_json, answers))}]")
    elif form == "markdown":
        print("\n".join(map(to_markdown, answers)))
    else:
        print()
        for answer in answers:
            assert answer.run is not None  # see `_answer`
            verdict = answer.verdict
            if not answer.run.finished:
                verdict = "error"
            print(f"{verdict}: {describe(answer)}")


def _exit_code(answer: Answer) -> int:
    """Return the exit code of a file; a failed job has 2 for a wrong input, and 1 otherwise."""
    assert answer.run is not None  # see `_answer`
    if answer.run.finished:
        return answer.exit_code
    return 2 if answer.run.has_wrong_input else 1


def _of_report(word: str) -> str:
    """Return a limit of `resnet8ptq verdict` as a setting of `resnet8ptq run`; else the word."""
    if word.partition("=")[0] in LIMITS:
        return f"report.{word}"
    return word
