"""The choices for one network are those of the settings, until a step makes others."""

import pytest

from resnet8ptq.precision.decisions import Decisions
from tests.helpers.configs import make_config


@pytest.mark.parametrize(
    ("words", "bits", "in_float"),
    [
        ((), {}, []),
        (("precision.plan={conv: 32}", "nodes_to_exclude=[last]"), {"conv": 32}, ["last"]),
        (("nodes_to_exclude=auto",), {}, ()),
        (("precision.plan=auto", "precision.max_bytes=9"), None, []),
    ],
)
def test_auto_is_left_to_the_steps(words, bits, in_float):
    assert Decisions.of(make_config(*words)) == Decisions(bits, in_float)
