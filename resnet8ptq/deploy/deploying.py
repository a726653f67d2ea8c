"""Exports a run's model as a folder for other machines: model, card, test vectors, example.

    resnet8ptq deploy                          the newest run; of a sweep, the recommended one
    resnet8ptq deploy use=smallest             or best, balanced, fastest, best_onnx, ...
    resnet8ptq deploy sweep=ID use=smallest    of the sweep with that parent run
    resnet8ptq deploy run_id=ID                of a run

`folder=PATH` is the output folder, new or empty (default: in `deployed/`, with the run's name and
id). The command runs its `example.py` in a fresh virtual environment, unless `verify=false`.
`register=NAME` registers the model in MLflow, under the alias `recommended`.
`target.onnxruntime=1.17` lowers an ONNX file for an older ONNX Runtime, in which `example.py` then
runs; `target.format=ort` writes ONNX Runtime's own format. `trust=true` accepts torch files,
modules, metrics and registration from a run that was not made below `runs/` here, and reads the
files that its settings name. Its code can then run; that of a registered model runs when it is
served. `measure=true` adds the program and the samples to measure the file on another machine, see
`resnet8ptq measured`. `max_drop=0.05`, or without labels `min_sqnr_db=30`, sets the limit of the
verdict and of a recommendation (default: the logged one). A run with a broken FP32 network is
refused. `experiment=`, `uri=` and `root=` name the MLflow store, `cache_dir=` the cache.
"""

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from resnet8ptq.config.limits import require
from resnet8ptq.core import cache, command, files, invocation
from resnet8ptq.core.console import say, silenced, stderr, stdout, waiting
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.text import redact, safe_name
from resnet8ptq.deploy import (
    card,
    example,
    interface,
    measured,
    older_runtime,
    reproducing,
    source,
    vectors,
)
from resnet8ptq.deploy.registering import register
from resnet8ptq.deploy.source import SourceRun
from resnet8ptq.experiment.outputs import TOKENIZER
from resnet8ptq.report.recommend import RECOMMENDED
from resnet8ptq.tracking import origin
from resnet8ptq.tracking.mlflow_store.store import Store, StoreArguments, open_store


@dataclass
class TargetFormat:
    """The conversion of an ONNX file; if both settings are null, the measured file is kept."""

    onnxruntime: str | None = None
    format: str | None = None


@dataclass
class Arguments(StoreArguments):
    """The settings of `resnet8ptq deploy`, as key=value."""

    run_id: str | None = None
    sweep: str | None = None
    use: str = RECOMMENDED
    folder: str | None = None
    verify: bool = True
    register: str | None = None
    target: TargetFormat = field(default_factory=TargetFormat)
    max_drop: float | None = None
    min_sqnr_db: float | None = None
    trust: bool = False
    measure: bool = False
    cache_dir: str | None = None


def main(words: list[str]) -> None:
    """Find the run, check its artifact, write the folder."""
    asked = command.parse_words(words, Arguments, __doc__, plain="use")
    _check(asked)
    limits = {"max_drop": asked.max_drop, "min_sqnr_db": asked.min_sqnr_db}
    with waiting("Reading the runs"):
        store = open_store(asked.tracking)
        record, use = source.find_run(store, asked.run_id, asked.sweep, use=asked.use, asked=limits)
    if asked.run_id is None and asked.sweep is None:
        run_words = f"{record.run_id} ({record.name or 'without a name'})"
        if use:
            say(stderr(), f"run {run_words} of the newest sweep, {record.sweep_id}, for use={use}")
        else:
            say(stderr(), f"the newest run {run_words}")

    # Write the folder completely, or not at all
    name = safe_name(record.name or "model") + f"-{safe_name(record.run_id[:8])}"
    folder = files.expand(asked.folder or Path("deployed", name)).absolute()
    with tempfile.TemporaryDirectory() as scratch, _new_folder(folder) as temporary:
        run = source.fetch_run(store, record, folder=Path(scratch), use=use, trust=asked.trust)
        _check_register(run, asked.register)
        lines, takes = _write(store, run, asked, folder=temporary)

    # Print the folder's content, and a command to try it
    console = stdout(None, 130)
    held = ", ".join(sorted(path.name for path in folder.iterdir()))
    for line in (*lines, f"Folder: {folder} ({held})"):
        say(console, line)
    here = Path.cwd()
    shown = folder
    if folder.is_relative_to(here):
        shown = folder.relative_to(here)
    say(console, f"Try:    {invocation.shell('python', str(shown / example.FILE), *takes)}")


def _check(asked: Arguments) -> None:
    if asked.run_id is not None and asked.sweep is not None:
        raise ConfigError("sweep: has no effect with run_id=; expected one of the two")
    if asked.run_id is not None and asked.use != RECOMMENDED:
        raise ConfigError("use: has no effect with run_id=; expected one of the two")
    file_format = asked.target.format
    require("target.format", got=file_format, ok=file_format in (None, "ort"), expected="ort")
    if asked.target.onnxruntime is not None:
        older_runtime.check_version(asked.target.onnxruntime)
        if file_format is not None:
            raise ConfigError(
                "target.format: got 'ort' with target.onnxruntime, but the installed ONNX Runtime "
                "writes an ORT file; expected one of the two"
            )
    name = asked.register
    is_name = name is None or re.fullmatch(r"[\w.-]+", name) is not None
    require("register", got=name, ok=is_name, expected="letters, digits, - . and _")


def _check_register(run: SourceRun, name: str | None) -> None:
    """Raise `ConfigError` if `name` is set for an untrusted run: its logged model can run code.

    MLflow registers the model that the run has logged, not the file that was checked.
    """
    if name is not None and not run.trusted:
        raise ConfigError(
            f"register: got {name!r} for run {run.record.run_id}, which was not made below "
            f"{origin.RUNS.absolute()}: serving its logged model can run code; expected a run that "
            "was made there; if you trust its author, add trust=true"
        )


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder` if the block succeeds.

    Raises:
        ConfigError: `folder` is a file, is not empty, or cannot be created.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"folder: got {folder}, which is not empty; expected a new or empty folder"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ConfigError(f"folder: cannot write to {folder} ({error})") from None

    # Rename it at the end, so that nobody sees half of a folder
    try:
        yield temporary
        temporary.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(
    store: Store, run: SourceRun, asked: Arguments, folder: Path
) -> tuple[list[str], Sequence[str]]:
    """Write the folder; return the lines to print, and the arguments of its example."""
    runtime = cache.runtime(asked.cache_dir or run.config.cache_dir, run.config.threads)
    version = asked.target.onnxruntime
    model, change, faults = _convert(run, asked.target, folder)
    with waiting("Reading the run's samples"), silenced():  # the run has logged these warnings
        scored = reproducing.open_samples(run, asked.cache_dir)

    # Run the artifact again, and keep test vectors
    many = asked.verify and version is not None
    again = run.call(reproducing.rerun, run, scored, runtime, many)
    if isinstance(scored, str):
        names = [f"output_{number}" for number in range(len(again.vectors.outputs))]
    else:
        names = [output.name for output in scored.evaluator.network.contract.outputs]
    tested = again.vectors
    figures = None
    if run.artifact.suffix == ".tflite":
        from resnet8ptq.deploy import microcontroller  # imports LiteRT

        target = folder / microcontroller.FOLDER
        figures, raw = run.call(microcontroller.write_sources, run.artifact, target, tested.inputs)
        tested = replace(tested, raw=raw)
    tested.save(folder / vectors.FILE)
    tensors = run.call(interface.read_interface, model, tested, names)
    facts = card.Facts(tensors, tested, again.summary, microcontroller=figures, change=change)

    # The example, and the packages that it needs
    others = []
    takes = []
    if example.reads_pictures(tested):
        others.append("pillow")
        takes.append("PICTURE")
    if example.reads_texts(run):
        others.append("tokenizers")
        shutil.copyfile(run.folder / TOKENIZER, folder / TOKENIZER)
    needs = example.requirements(run.backend.runtime, *others)
    if version is not None:
        needs[:2] = older_runtime.requirements(older_runtime.check_version(version))
    (folder / example.REQUIREMENTS).write_text("\n".join([*needs, ""]))
    outputs = [tensor.name for tensor in tensors.outputs]
    code = example.render_example(run, vectors=tested, file=model.name, outputs=outputs)
    (folder / example.FILE).write_text(code, encoding="utf-8")

    # Measure, verify and register if asked, before the card that has the results
    lines = [*run.cautions, again.summary]
    if change:
        lines.append(change)
    lines += faults
    if asked.measure:
        lines.append(measured.write_program(run, scored, folder / measured.FOLDER))
    if asked.verify:
        facts = replace(facts, verified=example.verify(folder, again.more))
        lines += ["in a fresh environment:", *facts.verified.splitlines()]
    if asked.register is not None:
        uri = register(store, run, asked.register)
        facts = replace(facts, registered=uri)
        serve = card.serve_command(uri, MLFLOW_TRACKING_URI=redact(store.uri))
        lines.append(f"registered as {uri}; {serve}")
    (folder / card.FILE).write_text(card.render_card(run, model, facts), encoding="utf-8")
    return lines, takes


def _convert(run: SourceRun, target: TargetFormat, folder: Path) -> tuple[Path, str, list[str]]:
    """Write the model into the folder, converted to the target.

    Returns:
        The path; the change in words, empty without one; and the known faults of the target that
        concern the file.

    Raises:
        ConfigError: a target is set, and the artifact is not an ONNX file of ONNX Runtime.
        PtqError: see `older_runtime.lower` and `SourceRun.call`.
    """
    asked = [key for key, value in vars(target).items() if value is not None]
    path = folder / run.artifact.name
    if not asked:
        shutil.copyfile(run.artifact, path)
        return path, "", []
    library = run.backend.runtime
    if (path.suffix, library) != (".onnx", "onnxruntime"):
        raise ConfigError(
            f"target.{asked[0]}: got {path.name} of {library}, expected a file of ONNX Runtime"
        )

    # ONNX Runtime's own format, or an older release
    if target.onnxruntime is None:
        path = path.with_suffix(".ort")
        run.call(older_runtime.to_ort, run.artifact, path)
        return path, f"written in the ORT format by {example.requirements('onnxruntime')[0]}", []
    version = older_runtime.check_version(target.onnxruntime)
    lowered, *faults = run.call(older_runtime.lower_file, run.artifact, path, version)
    return path, f"for ONNX Runtime {target.onnxruntime}: {lowered}", faults
