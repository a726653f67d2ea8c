"""Errors of libraries, raised as those of this package."""

import pytest

from resnet8ptq.core.alarm import AlarmError
from resnet8ptq.core.errors import ModelError, UnsupportedError, errors_as


@pytest.mark.parametrize("error", [ModelError("a"), AlarmError("the time is up")])
def test_an_error_of_this_package_stays(error):
    """Running out of time does not make a network unsupported."""
    with pytest.raises(type(error)) as caught, errors_as(UnsupportedError, "cannot convert"):
        raise error
    assert caught.value is error


def test_an_error_of_a_library_names_the_work():
    named = pytest.raises(UnsupportedError, match=r"cannot convert \(.*no")
    with named, errors_as(UnsupportedError, "cannot convert"):
        raise KeyError("no")
