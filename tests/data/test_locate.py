"""The data set that a run takes, and its place."""

import hashlib
import logging
import tarfile
from pathlib import Path

import pytest

from resnet8ptq.config.schema import DataConfig
from resnet8ptq.core import cache, console
from resnet8ptq.core.errors import ConfigError, DataNotFoundError
from resnet8ptq.data import locate, registry
from resnet8ptq.data.sources import cifar10
from tests.helpers.cifar_files import write_folder

CIFAR10 = DataConfig(name="cifar10")


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """No CIFAR-10 in any of the usual places; returns the tries to download it."""
    tries: list[Path] = []

    def refuse(folder: Path) -> Path:
        tries.append(folder)
        raise ConnectionError("no network in tests")

    monkeypatch.delenv("CIFAR10_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cifar10, "fetch", refuse)
    console.warn_once.cache_clear()
    return tries


def make_places(root: Path) -> dict[str, Path]:
    """Folders that stand for a data set each; they are told apart by path alone."""
    places = {
        "root": root / "given",
        "env": root / "named",
        "local": root / "data" / "cifar-10-batches-py",
    }
    for position in places.values():
        position.mkdir(parents=True)
    return places


def test_data_root_wins(nowhere, tmp_path, monkeypatch):
    places = make_places(tmp_path)
    monkeypatch.setenv("CIFAR10_DIR", str(places["env"]))
    settled = locate.find_data(DataConfig(name="cifar10", root=str(places["root"])))
    assert settled == DataConfig(name="cifar10", root=str(places["root"]))
    assert nowhere == []


def test_then_the_environment(nowhere, tmp_path, monkeypatch):
    places = make_places(tmp_path)
    monkeypatch.setenv("CIFAR10_DIR", str(places["env"]))
    assert locate.find_data(CIFAR10).root == str(places["env"])
    assert nowhere == []


def test_then_the_working_folder(nowhere, tmp_path):
    places = make_places(tmp_path)
    assert locate.find_data(CIFAR10).root == str(places["local"])
    assert nowhere == []


def test_a_named_folder_that_is_not_there_is_refused(nowhere, tmp_path, monkeypatch):
    """Results on other data than those that were named would mislead."""
    make_places(tmp_path)
    monkeypatch.setenv("CIFAR10_DIR", str(tmp_path / "gone"))
    with pytest.raises(
        ConfigError, match=r"^\$CIFAR10_DIR: got .*gone \(not there\), expected a folder"
    ):
        locate.find_data(CIFAR10)
    assert nowhere == []


def test_then_the_download_cache(tmp_path, monkeypatch):
    """What was downloaded once is found without a network."""
    archive = tmp_path / "downloads" / "cifar-10-python.tar.gz"
    archive.parent.mkdir()
    folder = write_folder(tmp_path / "packed" / cifar10.FOLDER)
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(folder, arcname=cifar10.FOLDER)
    monkeypatch.delenv("CIFAR10_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cifar10, "URL", "http://127.0.0.1:9/cifar-10-python.tar.gz")  # no server
    monkeypatch.setattr(cifar10, "MD5", hashlib.md5(archive.read_bytes()).hexdigest())
    monkeypatch.setattr(cache, "downloads_folder", lambda: archive.parent)

    settled = locate.find_data(CIFAR10)
    assert settled.name == "cifar10"
    assert Path(str(settled.root)).is_relative_to(archive.parent)
    loaded = registry.load(settled.name, settled.root)
    assert (len(loaded.train), len(loaded.test)) == (20, 3)


def test_a_relative_root_is_made_absolute(nowhere, tmp_path):
    (tmp_path / "here").mkdir()
    assert locate.find_data(DataConfig(name="cifar10", root="here")).root == str(tmp_path / "here")


def test_a_root_under_the_home_folder_is_found(nowhere, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate.find_data(DataConfig(name="cifar10", root="~/here")).root == str(
        tmp_path / "here"
    )


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_root_that_is_no_folder_is_refused(nowhere, tmp_path, kind):
    root = tmp_path / "root"
    if kind == "file":
        root.write_text("")
    with pytest.raises(
        ConfigError, match=rf"^data\.root: got {root}( \(not there\))?, expected a folder"
    ):
        locate.find_data(DataConfig(name="cifar10", root=str(root)))
    assert nowhere == []


def test_where_nothing_is_found_shapes_stands_in_and_says_so(nowhere, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        settled = locate.find_data(CIFAR10)
    assert (settled.name, settled.root) == ("shapes", None)
    [record] = caplog.records
    message = record.getMessage()
    assert record.levelno == logging.WARNING
    for part in ("shapes", str(tmp_path / "data"), cifar10.URL):
        assert part in message
    assert "ConnectionError" in message
    assert "\n" not in message


def test_where_nothing_is_found_error_refuses(nowhere, tmp_path):
    with pytest.raises(DataNotFoundError) as caught:
        locate.find_data(DataConfig(name="cifar10", on_missing="error"))
    message = str(caught.value)
    assert "data.root" in message
    assert str(tmp_path / "data") in message
    assert cifar10.URL in message


def test_a_download_is_tried_once_in_a_process(nowhere, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert locate.find_data(CIFAR10).name == "shapes"
    assert nowhere == [cache.downloads_folder()]
    assert len(caplog.records) == 1  # not a warning for each job of a sweep


def test_the_embedded_set_is_never_for_a_network_of_the_users_own(nowhere):
    with pytest.raises(DataNotFoundError) as caught:
        locate.find_data(CIFAR10, own_network=True)
    assert "CIFAR10_DIR" in str(caught.value)


def test_shapes_is_settled_without_a_search_or_a_root(nowhere, tmp_path):
    for root in (None, str(tmp_path)):
        assert locate.find_data(DataConfig(name="shapes", root=root)) == DataConfig(name="shapes")
    assert nowhere == []
