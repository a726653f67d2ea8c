"""Entries are made once, whole or not at all; files are written all or nothing."""

import errno
import json
import logging
import os
import time
import uuid
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.core import cache, code, files, machine
from resnet8ptq.core.errors import ConfigError
from tests.helpers import forked
from tests.helpers.originals import runtime_of_all_cores

KEY: cache.Key = {"model": "abc", "fold": True, "count": 3}


class Maker:
    """Writes two files, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        assert list(folder.iterdir()) == []
        self.calls += 1
        (folder / "one.txt").write_text("one")
        (folder / "two.bin").write_bytes(b"two")


@pytest.fixture
def make() -> Maker:
    return Maker()


def visible(root: Path) -> list[Path]:
    """Return what lies in the cache, except for the locks."""
    return [path for path in root.glob("*/*") if path.suffix != ".lock"]


# Entries


def test_an_entry_is_made_once(tmp_path, make):
    first = cache.entry(tmp_path, "models", KEY, make)
    second = cache.entry(tmp_path, "models", dict(reversed(KEY.items())), make)
    assert first == second
    assert make.calls == 1
    assert (first / "one.txt").read_text() == "one"
    assert (first / "two.bin").read_bytes() == b"two"


@pytest.mark.parametrize("used_again", [cache.entry, cache.find])
def test_what_no_run_has_used_for_long_is_removed(tmp_path, make, used_again):
    used, unused, new = ({**KEY, "count": count} for count in range(3))
    long_ago = time.time() - (cache.UNUSED_DAYS + 1) * 24 * 3600
    for path in [cache.entry(tmp_path, "models", key, make) for key in (used, unused)]:
        os.utime(path / cache.RECORD, (long_ago, long_ago))
    used_again(tmp_path, "models", used, *([make] if used_again is cache.entry else []))
    cache.entry(tmp_path, "other", new, make)
    assert cache.path_of(tmp_path, "models", unused).exists()
    os.utime(tmp_path / cache.CHECKED, (long_ago, long_ago))
    cache.entry(tmp_path, "models", new, make)
    assert not cache.path_of(tmp_path, "models", unused).exists()
    assert cache.find(tmp_path, "models", used)
    assert cache.find(tmp_path, "models", new)


def test_an_entry_says_what_it_is(tmp_path, make):
    folder = cache.entry(tmp_path, "models", KEY, make)
    record = json.loads((folder / "entry.json").read_text())
    assert record["key"] == KEY
    assert record["sha256"] == {
        name: files.sha256(folder / name) for name in ("one.txt", "two.bin")
    }


kinds = st.sampled_from(["models", "baselines"])
words = st.sampled_from(["", "1", "true", "a", "fold"])
keys = st.dictionaries(words, words | st.integers(0, 2) | st.booleans(), max_size=2)


@given(kinds, keys, kinds, keys)
def test_another_kind_or_key_is_another_entry(kind, key, other_kind, other):
    same = kind == other_kind and repr(sorted(key.items())) == repr(sorted(other.items()))
    root = Path("root")
    assert (cache.path_of(root, kind, key) == cache.path_of(root, other_kind, other)) is same


def write_package(root: Path) -> None:
    """Write a package in which `top` needs `direct`, `lazy`, `named`, and `below` through them."""
    sources = {
        "top": (
            "from resnet8ptq.part import direct as d, other  # a note\n"
            'NAMED = "resnet8ptq.part.named:load"\n'
            "def f():\n    from resnet8ptq.part.lazy import (\n        one,\n        two,\n    )\n"
        ),
        "part/__init__": "",
        "part/direct": "import resnet8ptq.below\n",
        "part/other": "",
        "part/lazy": "one = two = 1\n",
        "part/named": "",
        "below": "from resnet8ptq import top\n",
        "apart": "from resnet8ptq import top\n",
    }
    for name, text in sources.items():
        path = root / "resnet8ptq" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_code_is_known_by_every_byte_that_a_module_imports(tmp_path, monkeypatch):
    monkeypatch.setattr(code, "_ROOT", tmp_path)

    def behind() -> str:
        for kept in (code.behind, code.closure, code.imports):
            kept.cache_clear()
        return code.behind("resnet8ptq.top")

    write_package(tmp_path)
    try:
        before = behind()
        parts = {path for path in tmp_path.rglob("*.py") if path.stem != "apart"}
        assert len(parts) == 7
        for path in parts:
            path.write_text(path.read_text() + "# changed\n")
            assert behind() != before, path
            before = behind()
        (tmp_path / "resnet8ptq" / "apart.py").write_text("")
        assert behind() == before
        with pytest.raises(FileNotFoundError):
            code.behind("resnet8ptq.gone")
    finally:
        for kept in (code.behind, code.closure, code.imports):
            kept.cache_clear()


def test_a_run_depends_on_every_module_that_its_registries_name():
    behind = code.closure("resnet8ptq.dispatch")
    for position in ("backends/onnx/quantizer", "data/sources/coco", "tasks/detection/task"):
        assert f"resnet8ptq.{position.replace('/', '.')}" in behind
    assert not any(name.startswith(("resnet8ptq.report", "resnet8ptq.tracking")) for name in behind)


@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        (machine, "cpu", lambda: ("another CPU", ())),
        (machine, "versions", lambda: {"version.numpy": "0.1"}),
        (code, "behind", lambda module: "other code"),
    ],
)
def test_a_measurement_of_another_cpu_version_or_code_is_another_entry(
    tmp_path, make, monkeypatch, owner, name, other
):
    def measure() -> Path:
        return cache.entry(tmp_path, "times", cache.made_with("resnet8ptq.core.cache"), make)

    first = measure()
    assert measure() == first
    monkeypatch.setattr(owner, name, other)
    assert measure() != first


def folder_for_file(folder: Path) -> None:
    (folder / "one.txt").unlink()
    (folder / "one.txt").mkdir()


def link_for_file(folder: Path) -> None:
    secret = folder.parent / "secret"
    secret.write_text("one")  # the same content
    (folder / "one.txt").unlink()
    (folder / "one.txt").symlink_to(secret)


def pipe_for_file(folder: Path) -> None:
    (folder / "one.txt").unlink()
    os.mkfifo(folder / "one.txt")


def edit(folder: Path, **change: object) -> None:
    path = folder / "entry.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "other bytes": lambda folder: (folder / "one.txt").write_text("two"),
    "cut off": lambda folder: (folder / "two.bin").write_bytes(b""),
    "no file": lambda folder: (folder / "two.bin").unlink(),
    "folder": folder_for_file,
    "link": link_for_file,
    "pipe": pipe_for_file,
    "no record": lambda folder: (folder / "entry.json").unlink(),
    "no text": lambda folder: (folder / "entry.json").write_bytes(b"\xff{]"),
    "other key": lambda folder: edit(folder, key={**KEY, "count": 4}),
    "other hash": lambda folder: edit(folder, sha256={"one.txt": "0" * 64, "two.bin": "0" * 64}),
    "empty record": lambda folder: (folder / "entry.json").write_text("{}"),
    "nested record": lambda folder: (folder / "entry.json").write_text("[" * 100_000),
    "record is a list": lambda folder: (folder / "entry.json").write_text("[1, 2]"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_entry_is_made_again_with_a_warning(tmp_path, make, caplog, damage):
    folder = cache.entry(tmp_path, "models", KEY, make)
    damage(folder)
    with caplog.at_level(logging.WARNING):
        assert cache.entry(tmp_path, "models", KEY, make) == folder
    assert make.calls == 2
    assert (folder / "one.txt").read_text() == "one"
    assert not (folder / "one.txt").is_symlink()
    assert (folder / "two.bin").read_bytes() == b"two"
    [record] = caplog.records
    assert record.getMessage() == f"cache: {folder} is damaged; making it again"


def test_a_whole_entry_is_taken_without_a_warning(tmp_path, make, caplog):
    for _ in range(2):
        cache.entry(tmp_path, "models", KEY, make)
    assert caplog.records == []


def test_a_record_is_read_up_to_16_mib(tmp_path, make):
    record = cache.entry(tmp_path, "models", KEY, make) / "entry.json"
    text = record.read_bytes()
    for size, calls in ((2**24, 1), (2**24 + 1, 2)):
        record.write_bytes(text.ljust(size))
        cache.entry(tmp_path, "models", KEY, make)
        assert make.calls == calls


@pytest.mark.parametrize("instead", ["file", "link", "link to nothing"])
def test_a_file_or_link_in_place_of_an_entry_is_made_again(tmp_path, make, instead):
    folder = cache.entry(tmp_path, "models", KEY, make)
    elsewhere = folder.rename(tmp_path / "elsewhere")
    if instead == "file":
        folder.write_text("")
    else:
        folder.symlink_to(elsewhere if instead == "link" else tmp_path / "nothing")
    assert cache.entry(tmp_path, "models", KEY, make) == folder
    assert (folder / "one.txt").read_text() == "one"
    assert not folder.is_symlink()
    assert elsewhere.is_dir()  # where a link leads, nothing is removed


# Failure


def fail(folder: Path) -> None:
    (folder / "half").write_text("half")
    raise ValueError("half way")


def test_a_failed_build_leaves_nothing_behind(tmp_path):
    with pytest.raises(ValueError, match="half way"):
        cache.entry(tmp_path, "models", KEY, fail)
    assert visible(tmp_path) == []


def test_what_a_killed_build_left_is_cleared_away(tmp_path, make):
    path = cache.path_of(tmp_path, "kind", {"a": 1})
    left, others = path.with_name(f".{path.name}-x"), path.with_name(".another-x")
    for folder in (left, others):
        folder.mkdir(parents=True)
        (folder / "half").touch()
    path.with_name(f".{path.name}-y").touch()  # no folder: it stays, and is in nobody's way

    def look(folder: Path) -> None:
        """It is built where a rename is enough, under a name that the next one clears away."""
        assert folder.parent.parent == path.parent
        assert folder.parent.name.startswith(f".{path.name}-")
        make(folder)

    cache.entry(tmp_path, "kind", {"a": 1}, look)
    assert not left.exists()
    assert others.exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_only_a_full_disk_is_the_settings_fault(tmp_path, number):
    def fill(folder: Path) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.raises((ConfigError, OSError)) as caught:
        cache.entry(tmp_path, "models", KEY, fill)
    if number == errno.EIO:
        assert caught.type is OSError
    else:
        expected = f"cache_dir: cannot write to {tmp_path / 'models'} ({os.strerror(number)})"
        assert str(caught.value).startswith(
            f"{expected}; free some space, or try a folder on another disk"
        )


@pytest.mark.parametrize(
    "text",
    [
        "Not enough free space to write 153375744 bytes after offset 128",
        "153375744 requested and 40960 written",
    ],
)
def test_a_full_disk_that_numpy_reports_names_the_setting(tmp_path, text):
    """Its errors have no number; the data set was reported as unreadable instead."""

    def fill(folder: Path) -> None:
        raise OSError(text)

    with pytest.raises(ConfigError, match=r"cache_dir: cannot write .*; free some space"):
        cache.entry(tmp_path, "models", KEY, fill)


def test_a_failed_build_lets_go_of_the_lock(tmp_path):
    """Also while somebody, as Hydra does, keeps the exception and with it the frames."""
    with pytest.raises(ValueError, match="half way") as kept:
        cache.entry(tmp_path, "models", KEY, fail)
    [path] = tmp_path.glob("*/.*.lock")
    lock = FileLock(path, timeout=0)
    lock.acquire()
    lock.release()
    assert kept.tb is not None


def test_a_failed_build_can_be_tried_again(tmp_path, make):
    with pytest.raises(ValueError, match="half way"):
        cache.entry(tmp_path, "models", KEY, fail)
    folder = cache.entry(tmp_path, "models", KEY, make)
    assert sorted(path.name for path in folder.iterdir()) == ["entry.json", "one.txt", "two.bin"]


@pytest.mark.parametrize("in_the_way", ["root", "kind"])
def test_a_cache_that_cannot_be_written_is_refused(tmp_path, make, in_the_way):
    root = tmp_path / "cache"
    if in_the_way == "root":
        root.write_text("")
    else:
        root.mkdir()
        (root / "models").write_text("")
    with pytest.raises(ConfigError, match=r"^cache_dir: cannot write to .*cache/models"):
        cache.entry(root, "models", KEY, make)
    assert make.calls == 0


def test_a_cache_is_checked_before_work(tmp_path, monkeypatch):
    cache.check_writable(str(tmp_path / "new" / "cache"))
    assert list((tmp_path / "new" / "cache").iterdir()) == []  # nothing stays behind
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"^cache_dir: cannot write to .*/file .*; try cache_dir="
    ):
        cache.check_writable(str(tmp_path / "file"))

    # On a full disk, all entries may be there already
    def fill(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.TemporaryFile", fill)
    cache.check_writable(str(tmp_path))


# Processes


def ask_for_entry(root: Path, calls: Path, together: Barrier) -> None:
    def make(folder: Path) -> None:
        (calls / uuid.uuid4().hex).touch()
        for number in range(50):
            (folder / str(number)).write_text(str(number))

    together.wait(timeout=60)
    folder = cache.entry(root, "models", KEY, make)
    assert len(list(folder.iterdir())) == 51


def test_processes_that_ask_at_once_make_it_once(tmp_path):
    root, calls = tmp_path / "cache", tmp_path / "calls"
    calls.mkdir()
    context = forked.start_server()
    together = context.Barrier(2)
    processes = [
        context.Process(target=ask_for_entry, args=(root, calls, together)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(list(calls.iterdir())) == 1


# Where it lies


def test_the_setting_wins_over_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("RESNET8PTQ_CACHE", str(tmp_path / "env"))
    assert cache.folder(str(tmp_path / "set")) == tmp_path / "set"
    assert cache.folder(None) == tmp_path / "env"


def test_without_either_it_is_the_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("RESNET8PTQ_CACHE")
    result = cache.folder(None)
    assert result == cache.downloads_folder()
    assert result.is_absolute()
    assert result.name == "resnet8ptq"


def test_a_relative_or_home_folder_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.folder("here") == tmp_path / "here"
    assert cache.folder("~/there") == tmp_path / "home" / "there"


def test_a_run_may_use_the_threads_that_are_set_or_all(tmp_path):
    assert runtime_of_all_cores(str(tmp_path), 3) == machine.Runtime(tmp_path, 3, True)
    assert runtime_of_all_cores(str(tmp_path), None) == machine.Runtime(
        tmp_path, machine.threads(None), False
    )


# files


def test_an_atomic_write_appears_whole(tmp_path):
    target = tmp_path / "model.onnx"
    with files.atomic(target) as temporary:
        temporary.write_bytes(b"new")
        assert not target.exists()
        assert temporary.suffix == target.suffix  # frameworks look at it
    assert target.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [target]
    assert target.stat().st_mode & 0o777 == 0o644


def test_a_failed_write_leaves_neither_file(tmp_path):
    with (
        pytest.raises(RuntimeError, match="half way"),
        files.atomic(tmp_path / "target") as temporary,
    ):
        temporary.write_bytes(b"half")
        raise RuntimeError("half way")
    assert list(tmp_path.iterdir()) == []


def test_old_content_outlives_a_failed_write(tmp_path):
    target = tmp_path / "target"
    target.write_text("old")
    with pytest.raises(KeyboardInterrupt), files.atomic(target) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_old_content_is_replaced(tmp_path):
    target = tmp_path / "target"
    target.write_text("something much longer")
    files.write_text(target, "neu: ä")
    assert target.read_bytes() == "neu: ä".encode()
    assert list(tmp_path.iterdir()) == [target]


def test_sha256_of_known_bytes(tmp_path):
    path = tmp_path / "abc"
    path.write_bytes(b"abc")
    assert files.sha256(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_downloads_go_to_the_folder_that_the_environment_names(tmp_path, monkeypatch):
    monkeypatch.setenv("RESNET8PTQ_CACHE", str(tmp_path))
    assert cache.downloads_folder() == tmp_path
