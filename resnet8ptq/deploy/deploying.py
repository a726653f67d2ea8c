"""A run's model as a folder that runs elsewhere: the model, its card, test vectors, an example.

    python -m resnet8ptq deploy                          what the newest sweep calls best
    python -m resnet8ptq deploy use=smallest             or fastest, fastest_batch, best_onnx, ...
    python -m resnet8ptq deploy sweep=ID use=smallest    of the sweep with that parent run
    python -m resnet8ptq deploy run_id=ID                of a run

`folder=PATH` is where (`deployed/` and the run's name), new or empty. Its `example.py` is run in a
fresh virtual environment; `verify=false` leaves that out. `register=NAME` registers the model in
MLflow, under the alias `recommended`. `target.onnxruntime=1.17` lowers an ONNX file for an older
ONNX Runtime, and runs it there; `target.format=ort` writes ONNX Runtime's own format.
`trust=true` takes torch files, modules and metrics of a run that was not made below `runs/` here:
they run as code.
`max_drop=0.05`, or without labels `min_sqnr_db=30`, sets the limit that a recommendation must keep
(the sweep's own). A run whose FP32 network is broken is refused. `experiment=`, `uri=` and `root=`
name the MLflow store, `cache_dir=` where converted networks are kept.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import TrackingConfig
from resnet8ptq.core import command
from resnet8ptq.core.console import stdout
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.text import redact, safe_name, show
from resnet8ptq.deploy import (
    card,
    example,
    interface,
    older_runtime,
    registering,
    reproducing,
    source,
    vectors,
)
from resnet8ptq.deploy.card import Facts
from resnet8ptq.deploy.reproducing import Scored
from resnet8ptq.deploy.source import Source
from resnet8ptq.deploy.vectors import Vectors
from resnet8ptq.tracking.store import Store, open_store


@dataclass
class Target:
    """What an ONNX file is made into; null: as it was measured."""

    onnxruntime: str | None = None
    format: str | None = None


@dataclass
class Arguments:
    """What the command takes, as key=value."""

    run_id: str | None = None
    sweep: str | None = None
    use: str = "best"
    folder: str | None = None
    verify: bool = True
    register: str | None = None
    target: Target = field(default_factory=Target)
    max_drop: float | None = None
    min_sqnr_db: float | None = None
    trust: bool = False
    experiment: str = "resnet8ptq"
    uri: str | None = None
    root: str = "mlruns"
    cache_dir: str | None = None


def main(words: list[str]) -> None:
    """Find the run, check its artifact, write the folder.

    Raises:
        ConfigError: a key is wrong, there is no such run, or the folder is not empty.
        PtqError: the artifact, or the example in its environment, does not do what was measured.
    """
    given = command.parse_words([_as_text(word) for word in words], Arguments, __doc__)
    _check(given)
    store = open_store(TrackingConfig(given.uri, given.root, given.experiment))
    asked = {"max_drop": given.max_drop, "min_sqnr_db": given.min_sqnr_db}
    record, use, verdict = source.find(store, given.run_id, given.sweep, given.use, asked)
    name = safe_name(record.name or "model") + f"-{record.run_id[:8]}"
    folder = Path(given.folder or Path("deployed", name)).expanduser().absolute()
    with tempfile.TemporaryDirectory() as scratch, _new_folder(folder) as temporary:
        found = source.fetch(store, record, Path(scratch), use, verdict, given.trust)
        lines = _write(store, found, given, temporary)
    console = stdout(None, 130)
    for line in (*lines, f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}"):
        console.print(show(line), soft_wrap=True, markup=False, highlight=False)


def _as_text(word: str) -> str:
    """Quote what may look like a number and is none: 1.20 is not 1.2."""
    key, separator, value = word.partition("=")
    named = key in ("run_id", "sweep", "use", "register", "target.onnxruntime")
    return f"{key}={json.dumps(value)}" if separator and named and value != "null" else word


def _check(given: Arguments) -> None:
    if given.run_id is not None and given.sweep is not None:
        raise ConfigError("sweep: has no effect with run_id=; takes one of the two")
    if given.target.format not in (None, "ort"):
        raise ConfigError(f"target.format: got {given.target.format!r}, takes ort")
    if given.target.onnxruntime is not None:
        older_runtime.check_version(given.target.onnxruntime)
        if given.target.format is not None:
            raise ConfigError(
                "target.format: got 'ort' with target.onnxruntime; an ORT file is written by the "
                "ONNX Runtime that is installed: takes one of the two"
            )
    if given.register is not None and not re.fullmatch(r"[\w.-]+", given.register):
        raise ConfigError(f"register: got {given.register!r}, takes letters, digits, - . and _")


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder that becomes `folder` if the block ends well.

    Raises:
        ConfigError: it is there and not empty, or cannot be made.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"folder: got {folder}, which is not empty; takes a new or empty folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ConfigError(f"folder: cannot write to {folder} ({error})") from None
    try:
        yield temporary
        temporary.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(store: Store, found: Source, given: Arguments, folder: Path) -> list[str]:
    """Fill the folder; return what is to be said of it."""
    runtime = reproducing.runtime_of(found, given.cache_dir)
    model, change = _convert(found, given.target, folder)
    scored = reproducing.open_samples(found, given.cache_dir)
    older = given.target.onnxruntime is not None
    ran = reproducing.run(found, scored, runtime, many=given.verify and older)
    if isinstance(scored, Scored):
        names = [output.name for output in scored.evaluator.network.contract.outputs]
    else:
        names = [f"output_{number}" for number in range(len(ran.tested.outputs))]
    tested, figures = _add_integers(found, ran.tested, folder)
    tested.save(folder / vectors.FILE)
    facts = Facts(
        found.call(interface.read, model, tested, names),
        tested,
        ran.said,
        microcontroller=figures,
        change=change,
    )
    needs = example.requirements(model.suffix, example.reads_pictures(found, tested))
    if given.target.onnxruntime is not None:
        version = older_runtime.check_version(given.target.onnxruntime)
        needs = [*older_runtime.requirements(version), *needs[2:]]
    (folder / example.REQUIREMENTS).write_text("".join(f"{each}\n" for each in needs))
    code = example.render(found, tested, model.name, [t.name for t in facts.interface.given])
    (folder / example.FILE).write_text(code, encoding="utf-8")
    lines = [*found.cautions, ran.said]
    if change:
        lines.append(change)
    if given.verify:
        facts = replace(facts, verified=example.verify(folder, ran.more))
        lines += ["in a fresh environment:", *facts.verified.splitlines()]
    if given.register is not None:
        uri = registering.register(store, found, given.register)
        facts = replace(facts, registered=uri)
        serve = f"mlflow models serve -m {uri} --env-manager local -p 5001"
        lines.append(f"registered as {uri}; MLFLOW_TRACKING_URI={redact(store.uri)} {serve}")
    (folder / card.FILE).write_text(card.render(found, model, facts), encoding="utf-8")
    return lines


def _convert(found: Source, target: Target, folder: Path) -> tuple[Path, str]:
    """Put the model into the folder as the target asks for it; return it, and what was changed.

    Raises:
        ConfigError: the target is one of ONNX files, and the artifact is none.
        UnsupportedError: an operator is not to be had in the target.
    """
    asked = next((key for key, value in vars(target).items() if value is not None), None)
    if asked is None:
        return Path(shutil.copyfile(found.artifact, folder / found.artifact.name)), ""
    if found.artifact.suffix != ".onnx":
        raise ConfigError(f"target.{asked}: takes an ONNX file; the run has {found.artifact.name}")
    if target.format == "ort":
        path = folder / "model.ort"
        found.call(older_runtime.to_ort, found.artifact, path)
        return path, f"written in the ORT format by {example.requirements('.ort', False)[0]}"
    assert target.onnxruntime is not None
    path, version = folder / found.artifact.name, older_runtime.check_version(target.onnxruntime)
    lowered = found.call(_lower, found.artifact, path, version)
    return path, f"for ONNX Runtime {target.onnxruntime}: {lowered}"


def _lower(artifact: Path, path: Path, version: int) -> str:
    """Write a file for ONNX Runtime 1.`version`; return what was changed."""
    import onnx

    proto = onnx.load(artifact)
    lowered = older_runtime.lower(proto, version)
    onnx.save(proto, path)
    return lowered


def _add_integers(
    found: Source, tested: Vectors, folder: Path
) -> tuple[Vectors, dict[str, str] | None]:
    """Write the C files of a TFLite file, and add what it takes and returns to the vectors."""
    if found.artifact.suffix != ".tflite":
        return tested, None
    figures, raw = found.call(_write_integers, found.artifact, folder, tested.inputs)
    return replace(tested, raw=raw), figures


def _write_integers(
    artifact: Path, folder: Path, inputs: NDArray[Any]
) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Write the C files; return their figures, and inputs and outputs as the file has them."""
    from resnet8ptq.deploy import microcontroller  # imports LiteRT

    content = artifact.read_bytes()
    figures = microcontroller.write(content, folder / microcontroller.FOLDER, inputs[:1])
    runs = [microcontroller.run(content, inputs[n : n + 1]) for n in range(len(inputs))]
    raw = {"raw_inputs": np.concatenate([taken for taken, _ in runs])}
    for number, each in enumerate(zip(*(given for _, given in runs), strict=True)):
        raw[f"raw_output_{number}"] = np.concatenate(each)
    return figures, raw
