"""Names of other tools lead to settings and options that exist."""

import pytest

from resnet8ptq.config.schema import find_fields
from resnet8ptq.core import other_names
from tests.helpers.calling import REPO

OPTIONS = [
    (group, name, meant.partition(":")[0])
    for group, names in other_names.OPTIONS.items()
    for name, meant in names.items()
]


@pytest.mark.parametrize(("name", "key"), other_names.KEYS.items())
def test_a_key_leads_to_a_setting(name, key):
    assert not find_fields(name) or find_fields(key)
    assert find_fields(key) or key.startswith("hydra.")


@pytest.mark.parametrize(("group", "name", "option"), OPTIONS)
def test_an_option_leads_to_another_that_exists(group, name, option):
    folder = REPO / "conf" / group
    options = {path.stem for path in folder.glob("*.yaml")}
    if not folder.is_dir():  # a key that takes one of several words, such as device
        [[field]] = find_fields(group)
        [limit] = field.metadata["limits"]
        options = set(limit.choices)
    assert option in options
    assert name not in options
