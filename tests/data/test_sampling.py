"""The draws of calibration, held-out and selection samples."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resnet8ptq.core import console
from resnet8ptq.core.errors import ConfigError, DataError
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.sampling import (
    LEAST_TO_CHOOSE,
    draw_calibration,
    draw_held_out,
    draw_selection,
    halve,
    leave_out,
)
from resnet8ptq.experiment.samples import draw
from tests.helpers.configs import make_config
from tests.helpers.datasets import SMALL, make_dataset


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 20))
@settings(max_examples=50)
def test_a_draw_takes_n_of_each_class_once(seed, count):
    drawn = draw_calibration(SMALL, count, seed)
    assert np.bincount(drawn.split.labels, minlength=3).tolist() == [count] * 3
    assert (np.diff(drawn.indices) > 0).all()  # sorted, and none twice
    assert np.array_equal(drawn.split.stored, SMALL.train.stored[drawn.indices])
    assert np.array_equal(drawn.split.labels, SMALL.train.labels[drawn.indices])


def test_the_digest_is_of_the_indices():
    drawn = draw_calibration(SMALL, 2, 0)
    stored = np.array(drawn.indices.tolist(), dtype="<i8").tobytes()
    assert drawn.digest == hashlib.sha256(stored).hexdigest()


def test_more_than_a_class_has_is_refused_by_its_name():
    with pytest.raises(ConfigError) as caught:
        draw_calibration(SMALL, 21, 0)
    message = str(caught.value)
    assert message.startswith("calib.samples_per_class: got 21, expected at most 20")
    assert message.endswith("of class 'a' in small")


def test_a_class_with_fewer_images_gives_all_of_them(caplog):
    few = SMALL.train.take(np.flatnonzero(SMALL.train.labels != 1))
    drawn = draw_calibration(Dataset("small", SMALL.class_names, few, SMALL.test), 3, 0)
    assert np.bincount(drawn.split.labels).tolist() == [3, 0, 3]
    assert "got 3, but 1 of 3 classes of small have fewer training samples" in caplog.text


def test_a_training_image_that_is_a_test_image_does_not_calibrate():
    test = Split(SMALL.train.stored[[7, 9]], SMALL.train.labels[[7, 9]], "here")
    mixed = Dataset("small", SMALL.class_names, SMALL.train, test)
    assert not {7, 9} & {*draw_calibration(mixed, None, 0).indices.tolist()}
    same = Dataset("small", SMALL.class_names, SMALL.train, SMALL.train)
    with pytest.raises(DataError, match=f"small: {len(SMALL.train)} calibration samples are test"):
        draw_calibration(same, None, 0)


def test_many_classes_share_two_thousand_calibration_samples():
    labels = np.repeat(np.arange(50), 100)
    split = Split(np.arange(5000, dtype=np.float32)[:, None], labels, "here")
    test = Split(-1 - split.stored, labels, "here")
    many = Dataset("many", tuple(map(str, range(50))), split, test)
    drawn = draw_calibration(many, None, 0)
    assert np.bincount(drawn.split.labels).tolist() == [40] * 50
    assert len(draw_calibration(many, 60, 0).split) == 3000


def test_samples_of_their_own_calibrate_where_there_are_any():
    data = make_dataset()
    assert data.calibrating is data.train
    own = data.train.take(np.arange(5))
    given = replace(data, calibration=own)
    assert given.calibrating is own

    def limit(split: Split) -> Split:
        return replace(split, layout=(2, 0, 1), at_once=3)

    limited = given.with_splits(limit)
    for split in (limited.train, limited.test, limited.calibration):
        assert (split.layout, split.at_once) == ((2, 0, 1), 3)
    assert data.with_splits(limit).calibration is None


# Held-out images


def pixels(split: Split) -> set[bytes]:
    return {image.tobytes() for image in split.stored}


@given(images=st.integers(1, 140), taken=st.integers(0, 30))
@settings(max_examples=50)
def test_held_out_images_are_as_even_as_the_classes_allow(images, taken):
    """Seven classes of 30, or the last of fewer."""
    data = make_dataset(per_class=30, classes=7)
    last = data.train.take(np.flatnonzero(data.train.labels == 6)[:taken])
    drawn = draw_held_out(data, images, [last] if taken else [])
    assert len(drawn) == len(pixels(drawn)) == images
    counts = np.bincount(drawn.labels, minlength=7)
    assert counts[6] <= 30 - taken
    assert counts[:6].max() - counts[:6].min() <= 1
    assert counts[6] == 30 - taken or counts.max() - counts[6] <= 1


def test_held_out_images_are_neither_test_images_nor_taken():
    test = SMALL.train.take(np.arange(10))
    leaky = Dataset("small", SMALL.class_names, SMALL.train, test)
    scored = draw_held_out(leaky, 20)
    others = draw_held_out(leaky, 30, [scored])
    assert pixels(scored) | pixels(others) | pixels(test) == pixels(SMALL.train)
    with pytest.raises(ConfigError, match=r"held_out_images: got 31, expected at most 30"):
        draw_held_out(leaky, 31, [scored])


def test_what_is_held_out_leaves_some_to_calibrate_with():
    with pytest.raises(ConfigError, match=r"held_out_images: leaves none of the 60 training"):
        draw_calibration(SMALL, None, 0, [SMALL.train])


def test_a_draw_of_all_samples_says_that_the_seed_has_no_effect(caplog):
    caplog.set_level("INFO")
    for per_class, draws in ((None, 1), (2, 2)):
        console.log_once.cache_clear()
        caplog.clear()
        drawn = [draw_calibration(SMALL, per_class, seed).indices.tolist() for seed in (1, 2)]
        assert len({*map(tuple, drawn)}) == draws
        assert any("seed has no effect" in message for message in caplog.messages) == (draws == 1)


def test_few_images_are_held_out_by_halves(caplog):
    caplog.set_level("INFO")
    console.log_once.cache_clear()
    scored = draw_held_out(SMALL, None)
    others = draw_held_out(SMALL, None, [scored])
    free = len(SMALL.train)
    assert (len(scored), len(others)) == (free // 2, (free - free // 2) // 2)
    assert "small: 30 of 60 training samples are held out, half of them" in caplog.messages[0]
    [one] = draw_held_out(make_dataset(per_class=1, classes=1), None).labels
    assert one == 0


def test_2000_images_are_held_out_where_there_are_enough(shapes, caplog):
    caplog.set_level("INFO")
    scored = draw_held_out(shapes, None)
    assert scored.digest == draw_held_out(shapes, 2000).digest
    again = [draw_held_out(shapes, images, [scored]).digest for images in (None, 2000)]
    assert again[0] == again[1]
    assert caplog.messages == []


@pytest.mark.parametrize("count", [10, 20, 40])
def test_held_out_images_are_the_first_of_each_class_shuffled_by_seed_0(count):
    """So fewer are a part of more, whatever the machine."""
    random = np.random.default_rng(0)
    members = [random.permutation(np.flatnonzero(SMALL.train.labels == k)) for k in range(3)]
    turns = np.stack(members, axis=1).reshape(-1)
    expected = SMALL.train.stored[np.sort(turns[:count])]
    assert np.array_equal(draw_held_out(SMALL, count).stored, expected)


def test_what_is_left_out_is_every_copy_of_it():
    twice = SMALL.train.take(np.resize(np.arange(20), 40))
    left = leave_out(twice, [SMALL.train.take(np.arange(5)), SMALL.train.take(np.array([7]))])
    kept = [*range(5, 7), *range(8, 20)]
    assert np.array_equal(left.stored, SMALL.train.stored[kept + kept])


def test_scored_images_are_those_of_the_split():
    def draw_scored(split):
        words = ("calib.samples_per_class=5", "held_out_images=20", "evaluate.choice=none")
        config = make_config(*words, f"evaluate.split={split}")
        return draw(config, SMALL, False, lambda split: None).data

    assert draw_scored("test") is SMALL
    held_out = draw_scored("held_out")
    assert held_out.train is SMALL.train
    assert held_out.test.digest == draw_held_out(SMALL, 20).digest


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 10))
@settings(max_examples=25)
def test_held_out_images_do_not_calibrate(seed, count):
    held_out = draw_held_out(SMALL, 30)
    drawn = draw_calibration(SMALL, count, seed, [held_out])
    assert np.bincount(drawn.split.labels, minlength=3).tolist() == [count] * 3
    assert pixels(drawn.split).isdisjoint(pixels(held_out))
    assert np.array_equal(drawn.split.stored, SMALL.train.stored[drawn.indices])


def test_what_is_held_out_leaves_fewer_to_calibrate_with():
    message = (
        r"samples_per_class: got 11, expected at most 10: .*'a' in small that are not held out$"
    )
    with pytest.raises(ConfigError, match=message):
        draw_calibration(SMALL, 11, 0, [draw_held_out(SMALL, 30)])


def test_without_held_out_images_the_calibration_draw_is_the_plain_one():
    random = np.random.default_rng(42)
    members = [np.flatnonzero(SMALL.train.labels == label) for label in range(3)]
    plain = np.concatenate([random.choice(member, 5, replace=False) for member in members])
    assert draw_calibration(SMALL, 5, 42).indices.tolist() == sorted(plain.tolist())


# Groups, such as clips


def make_clips(sizes, classes=3, mixed=False):
    """Training clips of `sizes` windows in a random order, and four test samples."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    groups = np.random.default_rng(0).permutation(groups)
    labels = np.arange(len(groups)) % classes if mixed else groups % classes
    windows = np.arange(len(groups) + 4, dtype=np.float32)[:, None]
    train = Split(windows[4:], labels, "clips", groups=groups)
    test = Split(windows[:4], np.arange(4) % classes, "clips")
    return Dataset("clips", tuple("abcdef"[:classes]), train, test)


@given(
    sizes=st.lists(st.integers(1, 12), min_size=12, max_size=40),
    part=st.integers(3, 12),
    seed=st.integers(0, 99),
    mixed=st.booleans(),
)
@settings(max_examples=50)
def test_no_group_has_two_roles(sizes, part, seed, mixed):
    data = make_clips(sizes, mixed=mixed)
    count = max(1, sum(sizes) // part)
    scored = draw_held_out(data, count)
    others = draw_held_out(data, count, [scored])
    calibrating = draw_calibration(data, None, seed, [scored, others]).split
    left = leave_out(data.train, [scored, others])
    roles = [{*split.groups.tolist()} for split in (scored, others, calibrating)]
    assert sum(map(len, roles)) == len(set.union(*roles))
    for split, drawn in zip((scored, others, calibrating), roles, strict=True):
        assert len(split) == np.isin(data.train.groups, [*drawn]).sum()  # whole
    assert {*left.groups.tolist()} == {*data.train.groups.tolist()} - roles[0] - roles[1]


@given(count=st.integers(1, 20), seed=st.integers(0, 99), taken=st.booleans())
@settings(max_examples=25)
def test_groups_of_one_sample_are_drawn_as_samples(count, seed, taken):
    grouped = replace(SMALL, train=replace(SMALL.train, groups=np.arange(60)[::-1]))
    both = []
    for data in (SMALL, grouped):
        held_out = draw_held_out(data, count)
        drawn = draw_calibration(data, None, seed, [held_out] if taken else [])
        both.append((drawn.indices.tolist(), held_out.stored[:].tolist()))
    assert both[0] == both[1]


def test_groups_are_balanced_by_the_samples_of_each_class():
    data = make_clips([20, 5, 2] * 20)  # clips of class a have 20 windows, of b 5, of c 2
    counts = np.bincount(draw_held_out(data, 120).labels, minlength=3)
    assert counts.max() - counts.min() <= 20
    counts = np.bincount(draw_calibration(data, 40, 0).split.labels, minlength=3)
    assert counts.tolist() == [40] * 3
    few = draw_calibration(data, 3, 0).split  # a clip of each class at least, never a part
    assert np.bincount(few.labels, minlength=3).tolist() == [20, 5, 2]


def test_samples_of_other_arrays_have_other_groups():
    data = make_clips([4] * 10)
    other = Split(np.full((4, 1), 99, np.float32), None, "other", groups=np.arange(4))
    assert len(leave_out(data.train, [other])) == len(data.train)


def test_too_few_groups_are_refused():
    with pytest.raises(ConfigError, match=r"data\.groups: got 1 .* expected 2 groups or more"):
        draw_held_out(make_clips([30]), 5)
    assert draw_selection(make_clips([10] * 99), None, SMALL.test) is None
    assert len(draw_calibration(make_clips([10] * 9), None, 0).split) == 90


# Selection samples


def test_halves_have_as_many_of_each_class_and_keep_groups_together():
    labels = np.repeat(np.arange(3), 100)
    images = np.arange(300, dtype=np.float32)[:, None]
    groups = np.repeat(np.arange(150), 2)
    for grouped in (None, groups):
        split = Split(images, labels, "here", groups=grouped)
        one, other = halve(split, 3)
        assert np.bincount(one.labels).tolist() == np.bincount(other.labels).tolist() == [50] * 3
        places = np.concatenate([one.stored[:], other.stored[:]])[:, 0]
        assert sorted(places) == sorted(images[:, 0])
        again, _ = halve(split, 3)
        assert np.array_equal(one.stored[:], again.stored[:])
    assert not set(one.groups) & set(other.groups)


def test_too_few_samples_are_not_halved():
    images = np.zeros((99, 1), np.uint8)
    assert halve(Split(images, np.zeros(99, np.int64), "here"), 1) is None
    one, other = halve(Split(np.zeros((100, 1), np.uint8), None, "here"), 0)
    assert len(one) == len(other) == LEAST_TO_CHOOSE


def test_too_few_samples_for_a_selection_are_chosen_on_and_reported():
    assert len(SMALL.test) < 2 * LEAST_TO_CHOOSE
    config = make_config("evaluate.split=choice", "evaluate.choice=half")
    config = replace(config, calib=replace(config.calib, samples_per_class=5))
    drawn = draw(config, SMALL, False, lambda split: None)
    assert len(drawn.reported) == len(SMALL.test) and drawn.selection is None


def test_what_chooses_neither_calibrates_nor_tests_and_depends_little_on_the_draw():
    data = make_dataset(per_class=100)
    draws = [draw_calibration(data, 10, seed).split for seed in (1, 2)]
    first, second = (draw_selection(data, 120, drawn) for drawn in draws)
    assert pixels(first).isdisjoint(pixels(draws[0]) | pixels(data.test))
    whole = pixels(draw_held_out(data, 120))
    assert pixels(first) == whole - pixels(draws[0])
    assert len(pixels(first) & pixels(second)) > 80
    assert draw_selection(data, 50, draws[0]) is None  # some of them calibrate
    assert draw_selection(SMALL, None, draws[0]) is None
    bare = replace(data, train=replace(data.train, labels=None))
    assert draw_selection(bare, 120, draws[0]) is None


@pytest.mark.parametrize(("per_class", "left"), [(100, True), (180, True), (220, False)])
def test_of_few_samples_those_that_choose_do_not_calibrate(per_class, left):
    """Three classes, of which 100 each would calibrate: more than half, or less."""
    data = make_dataset(per_class=per_class)
    drawn = [draw_calibration(data, None, seed).split for seed in (1, 2)]
    calibrating = pixels(drawn[0]) | pixels(drawn[1])
    assert pixels(draw_held_out(data, None)).isdisjoint(calibrating) == left
    if left:
        chosen = [pixels(draw_selection(data, None, split)) for split in drawn]
        assert chosen[0] == chosen[1] == pixels(draw_held_out(data, None))
    # What is asked for is given.
    assert len(draw_calibration(data, per_class, 1).split) == 3 * per_class
