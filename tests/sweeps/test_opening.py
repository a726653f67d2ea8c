"""How a sweep begins: the number of its jobs."""

import pytest
from omegaconf import OmegaConf

from resnet8ptq.config import words
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.sweeps import opening


@pytest.mark.parametrize(
    ("params", "typed", "jobs"),
    [
        ({}, ["dtype=int8"], 1),
        ({}, ["dtype=int8,uint8"], 2),
        ({"seed": "1,2"}, [], 2),
        ({"seed": "1,2"}, ["seed=1"], 1),
        ({"seed": "1,2"}, ["seed=1", "calib=minmax,mse"], 2),
        ({"seed": "range(1,4)"}, ["per_channel=choice(true,false)", "calib=minmax,mse"], 12),
        ({}, ["dtype=int8,uint8", "calib=glob(*)"], None),
    ],
)
def test_how_many_jobs_a_sweep_has(params, typed, jobs):
    sweeper = OmegaConf.create({"params": params})
    overrides = [*opening._find_swept(sweeper), *map(words.parse, typed)]
    assert opening._count_jobs(sweeper, overrides) == jobs


def test_several_limits_are_refused():
    """Before, all runs were judged by the default."""
    opening._refuse_several_limits(["dtype", "max_drop"])
    with pytest.raises(
        ConfigError, match=r"^report\.max_drop: got several .* report max_drop=VALUE"
    ):
        opening._refuse_several_limits(["dtype", "report.max_drop"])
