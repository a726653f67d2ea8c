"""Paths as users write them."""

from pathlib import Path

from resnet8ptq.core import files


def test_a_home_that_is_not_known_stays_in_the_name(tmp_path, monkeypatch):
    """`Path.expanduser` raises a RuntimeError, whose text names neither key nor value."""
    assert files.expand("~nobody-of-this-name/my.onnx") == Path("~nobody-of-this-name/my.onnx")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.expand("~/my.onnx") == tmp_path / "my.onnx"
