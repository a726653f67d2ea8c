"""The comparison of a deployed artifact's predictions with those of its run."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.deploy import reproducing

boxes = st.lists(st.tuples(*[st.integers(0, 50)] * 6).map(list), max_size=6)


@given(boxes, st.randoms())
def test_boxes_are_the_same_in_any_order(ours, random):
    theirs = [[value + 1e-5 for value in box] for box in ours]
    random.shuffle(theirs)
    assert not reproducing._differ(ours, theirs)
    assert reproducing._differ(ours, [*theirs, [0.0] * 6])


@given(boxes.filter(lambda rows: len(rows) > 1))
def test_boxes_with_each_others_scores_differ(ours):
    """Each column by itself has the same values."""
    theirs = [
        [*box[:4], other[4], box[5]] for box, other in zip(ours, ours[1:] + ours[:1], strict=True)
    ]
    same = sorted(map(tuple, ours)) == sorted(map(tuple, theirs))
    assert reproducing._differ(ours, theirs) != same


def test_samples_with_other_values_that_are_not_finite_differ(tmp_path):
    kept = np.array([[np.nan, 1.0], [np.inf, 1.0], [0.5, 1.0], [0.5, 1.0]])
    now = np.array([[np.nan, 1.0], [np.inf, 1.0], [np.nan, 1.0], [0.5, 0.0]])
    np.savez(tmp_path / "predictions.npz", scores=kept)
    different = reproducing._count_different(tmp_path, {"scores": now}, {}, samples=4)
    assert different == 2
