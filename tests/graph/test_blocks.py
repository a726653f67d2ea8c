"""Runs of steps, as blocks."""

from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.graph.blocks import split_into_blocks


def test_blocks_end_where_all_later_steps_pass():
    diamond = [set[int](), {0}, {0}, {1, 2}, {3}, {4}]
    assert split_into_blocks(diamond, most=3) == [[0, 1, 2, 3], [4, 5]]
    assert split_into_blocks([], most=3) == []


@given(
    back=st.lists(st.sets(st.integers(1, 40), max_size=3), min_size=1, max_size=200),
    most=st.integers(1, 20),
)
def test_blocks_hold_every_step_once_in_order(back, most):
    sources = [
        {max(index - step, 0) for step in steps} - {index} for index, steps in enumerate(back)
    ]
    blocks = split_into_blocks(sources, most)
    assert [index for block in blocks for index in block] == list(range(len(back)))
    assert len(blocks) <= most
