"""Pictures in class folders: decoding, resizing, splits, and what is refused."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from resnet8ptq.config.schema import FolderConfig, PreprocessConfig
from resnet8ptq.core import files
from resnet8ptq.core.errors import ConfigError, DataError, PtqError
from resnet8ptq.data import locate, pictures, registry
from tests.helpers.pictures import RED, picture, spoil, write_classes


def read(root: Path, cache: Path | None = None, on_bad: str = "error", **preprocess):
    config = locate.find_data(FolderConfig(root=str(root), on_bad=on_bad))
    cache = cache or root.parent / "cache"
    return registry.read(config, PreprocessConfig(**preprocess), cache)


def test_class_folders_are_split(tmp_path):
    data = read(write_classes(tmp_path / "pictures"))
    assert (data.name, data.class_names, data.named) == ("pictures", ("green", "red"), True)
    assert (len(data.train), len(data.test)) == (4, 4)
    assert data.image_shape == (4, 6, 3)
    for split in (data.train, data.test):
        for image, label in zip(split.stored[:], split.labels, strict=True):
            assert image[0, 0].argmax() == (1 if label == 0 else 0)
            assert image[0, -1].max() == 0


def test_the_order_of_the_classes_may_be_given(tmp_path):
    root = write_classes(tmp_path / "p")
    config = FolderConfig(root=str(root), classes=["red", "green"])
    data = registry.read(locate.find_data(config), PreprocessConfig(), tmp_path / "cache")
    assert data.class_names == ("red", "green")
    assert np.array_equal(data.test.stored[:][:, 0, 0].argmax(1), data.test.labels)
    other = FolderConfig(root=str(root), classes=["red", "blue"])
    with pytest.raises(ConfigError, match=r"^data\.classes: got .* blue is in one of the two only"):
        registry.read(locate.find_data(other), PreprocessConfig(), tmp_path / "cache")


@pytest.mark.parametrize(
    ("train", "test"), [("train", "test"), ("train", "valid"), ("Training", "Testing")]
)
def test_a_split_of_its_own_is_kept(tmp_path, train, test):
    write_classes(tmp_path / "p" / train)
    write_classes(tmp_path / "p" / test, count=2)
    data = read(tmp_path / "p")
    assert (len(data.train), len(data.test)) == (8, 4)


def test_files_that_macos_adds_are_no_pictures(tmp_path):
    root = write_classes(tmp_path / "p")
    (root / "__MACOSX").mkdir()
    (root / "red" / "._0.png").write_bytes(b"attributes")
    data = read(root)
    assert data.class_names == ("green", "red") and len(data.train) + len(data.test) == 8


def test_pictures_are_decoded_once(tmp_path, monkeypatch):
    root = write_classes(tmp_path / "p")
    digest = read(root).test.digest
    registry._read.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(pictures, "decode", None)
        assert read(root).test.digest == digest
    registry._read.cache_clear()
    picture((1, 2, 3)).save(root / "red" / "0.png")  # another picture of that name
    assert 1 in {image[0, 0, 0] for image in whole(read(root))}


def whole(data):
    return np.concatenate([data.train.stored[:], data.test.stored[:]])


def read_masks(root: Path, masks: Path, on_bad: str = "error"):
    config = FolderConfig(root=str(root), masks=str(masks), on_bad=on_bad)
    return registry.read(locate.find_data(config), PreprocessConfig(), root.parent / "cache")


def write_masks(pictured: Path, masks: Path, ending: str = "") -> None:
    random = np.random.default_rng(0)
    for folder in (pictured, masks):
        folder.mkdir(exist_ok=True)
    for number in range(8):
        Image.fromarray(random.integers(0, 255, (4, 6, 3), np.uint8)).save(
            pictured / f"{number}.png"
        )
        mask = random.integers(0, 3, (4, 6), np.uint8)
        Image.fromarray(mask).save(masks / f"{number}{ending}.png")


def test_masks_beside_their_pictures_are_no_pictures(tmp_path):
    write_masks(tmp_path / "p", tmp_path / "p", ending="_mask")
    data = read_masks(tmp_path / "p", tmp_path / "p")
    assert len(data.train) + len(data.test) == 8
    assert data.test.labels.max() <= 2


def test_a_picture_may_be_its_own_target(tmp_path):
    write_masks(tmp_path / "p", tmp_path / "m")
    config = FolderConfig(root=str(tmp_path / "p"), targets=str(tmp_path / "p"))
    data = registry.read(locate.find_data(config), PreprocessConfig(), tmp_path / "cache")
    assert np.array_equal(data.test.stored[:], data.test.labels)


def test_masks_without_pictures_are_refused(tmp_path):
    """The message was an IndexError in words."""
    write_masks(tmp_path / "p", tmp_path / "m", ending="_mask")
    with pytest.raises(DataError, match="has only masks"):
        read_masks(tmp_path / "m", tmp_path / "m")


def test_a_picture_with_an_unreadable_mask_is_left_out_on_request(tmp_path):
    write_masks(tmp_path / "p", tmp_path / "m")
    (tmp_path / "m" / "3.png").write_text("no picture")
    with pytest.raises(DataError, match=r"3\.png"):
        read_masks(tmp_path / "p", tmp_path / "m")
    data = read_masks(tmp_path / "p", tmp_path / "m", on_bad="skip")
    assert len(data.train) + len(data.test) == 7
    assert not any("3.png" in name for split in (data.train, data.test) for name in split.names)


# Decoding: each kind of file becomes RGB of 8 bits.


def decoded(path, **preprocess):
    return pictures.decode(path, PreprocessConfig(**preprocess))


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".webp", ".jpg"])
@pytest.mark.parametrize("mode", ["RGB", "P", "L"])
def test_formats_and_modes(tmp_path, suffix, mode):
    path = tmp_path / f"a{suffix}"
    if suffix == ".jpg" and mode == "P":
        pytest.skip("JPEG has no palettes")
    lossless = {"lossless": True} if suffix == ".webp" else {}
    picture(RED, (32, 16), mode).save(path, **lossless)
    wanted = np.asarray(picture(RED, (32, 16), mode).convert("RGB"))
    result = decoded(path)
    assert result.dtype == np.uint8 and result.shape == (16, 32, 3)
    assert np.abs(result[:, :8].astype(int) - wanted[:, :8]).max() <= (8 if suffix == ".jpg" else 0)


def test_alpha_is_left_out(tmp_path):
    result = picture(RED, mode="RGBA")
    result.putalpha(10)
    result.save(tmp_path / "a.png")
    assert tuple(decoded(tmp_path / "a.png")[0, 0]) == RED


def test_cmyk_becomes_rgb(tmp_path):
    picture(RED, (32, 16), mode="CMYK").save(tmp_path / "a.jpg")
    assert np.abs(decoded(tmp_path / "a.jpg")[0, 0].astype(int) - RED).max() < 12


def test_16_bits_become_8(tmp_path):
    deep = np.array([[0, 256, 65535]], np.uint16)
    Image.fromarray(deep).save(tmp_path / "a.png")
    assert decoded(tmp_path / "a.png", channels="grey").ravel().tolist() == [0, 1, 255]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_upright(tmp_path, orientation):
    turned = picture(RED, (6, 4))
    exif = turned.getexif()
    exif[0x0112] = orientation  # what a viewer is to do with it
    turned.save(tmp_path / "a.png", exif=exif)
    result = decoded(tmp_path / "a.png")
    assert result.shape == ((4, 6, 3) if orientation < 5 else (6, 4, 3))
    red = {1: (0, 0), 2: (0, -1), 3: (0, -1), 4: (0, 0), 5: (0, 0), 6: (0, 0), 7: (-1, 0)}
    assert tuple(result[red.get(orientation, (-1, 0))]) == RED
    turned.save(tmp_path / "a.jpg", exif=exif)
    for name in ("a.png", "a.jpg"):
        assert pictures.read_size(tmp_path / name) == result.shape[1::-1]


# Resizing


def test_squash_stretches():
    result = pictures.fit(picture(RED, (40, 20)), PreprocessConfig(size=10))
    assert result.size == (10, 10)
    assert result.getpixel((0, 5)) == RED and result.getpixel((9, 5)) == (0, 0, 0)


def test_letterbox_keeps_all_of_it():
    settings = PreprocessConfig(size=[20, 20], resize="letterbox", pad=114)
    result = pictures.fit(picture(RED, (40, 20)), settings)
    assert result.getpixel((0, 0)) == result.getpixel((19, 19)) == (114, 114, 114)
    assert result.getpixel((0, 10)) == RED


def test_fit_fills_and_cuts_the_sides():
    result = pictures.fit(picture(RED, (40, 10)), PreprocessConfig(size=10, resize="fit"))
    assert result.size == (10, 10)
    assert result.getpixel((0, 0)) == RED and result.getpixel((9, 9)) == (0, 0, 0)


def test_crop_keeps_a_part_of_it():
    """As torchvision has it: resized to 256 for 224, then cut from the centre."""
    rows = np.arange(256, dtype=np.uint8)
    result = pictures.fit(
        Image.fromarray(np.broadcast_to(rows[:, None], (256, 256)).copy()),
        PreprocessConfig(size=224, resize="crop", channels="grey"),
    )
    np.testing.assert_array_equal(np.asarray(result)[:, 0], rows[16:240])


def test_grey_is_one_channel(tmp_path):
    assert read(write_classes(tmp_path / "p"), channels="grey").image_shape == (4, 6, 1)


# What is refused


KINDS = {  # how the reason begins
    **{
        "empty": "it is empty)",
        "truncated": "OSError: ",
        "text": "ValueError: it is no JPEG or PNG",
    },
    **{"gif": "", "bomb": "DecompressionBomb"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_no_picture_is_named(tmp_path, kind):
    root = write_classes(tmp_path / "p")
    path = spoil(root, kind)
    with pytest.raises(PtqError) as caught:
        read(root)
    assert str(caught.value).startswith(f"{path}: cannot be read ({KINDS[kind]}")
    assert str(caught.value).endswith("data.on_bad=skip leaves it out")
    assert "\n" not in str(caught.value)


def test_it_may_be_left_out(tmp_path, caplog):
    root = write_classes(tmp_path / "p")
    path = spoil(root, "truncated")
    data = read(root, on_bad="skip")
    assert len(data.train) + len(data.test) == 7
    assert "1 of 8 pictures cannot be read" in caplog.text and str(path) in caplog.text
    with pytest.raises(PtqError, match="cannot be read"):  # also where they lie decoded
        read(root)


def test_pictures_of_several_sizes_need_one(tmp_path):
    root = write_classes(tmp_path / "p")
    picture(RED, (8, 8)).save(root / "red" / "other.png")
    with pytest.raises(ConfigError, match=r"preprocess\.size: got null, .*0\.png is 4x6, .*other"):
        read(root)
    assert read(root, size=5).image_shape == (5, 5, 3)


def test_training_and_test_pictures_of_two_sizes_need_one(tmp_path):
    write_classes(tmp_path / "p" / "train")
    write_classes(tmp_path / "p" / "test")
    for path in (tmp_path / "p" / "test").rglob("*.png"):
        picture(RED, (8, 8)).save(path)
    with pytest.raises(ConfigError, match=r"preprocess\.size: got null, .* training pictures"):
        read(tmp_path / "p")
    assert read(tmp_path / "p", size=5).image_shape == (5, 5, 3)


def test_folders_that_hold_no_classes(tmp_path):
    (tmp_path / "empty").mkdir()
    picture(RED).save(tmp_path / "empty" / "a.png")
    with pytest.raises(PtqError, match="empty: has 0 class folders; expected 2 to 1000"):
        read(tmp_path / "empty")
    root = write_classes(tmp_path / "p")
    (root / "blue").mkdir()
    with pytest.raises(PtqError, match=r"blue: has no pictures; expected .jpg"):
        read(root)
    with pytest.raises(
        ConfigError, match=r"data\.root: got .*gone \(not there\), expected a folder"
    ):
        read(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"data\.root: got null, expected a folder"):
        locate.find_data(FolderConfig())


@pytest.mark.parametrize("split", [(), ("train", "test")])
def test_pictures_without_labels(tmp_path, split):
    for side in split or ("",):
        write_classes(tmp_path / "p" / side)
        picture(RED, (6, 4)).save(tmp_path / "p" / side / "beside.png")
    config = locate.find_data(FolderConfig(root=str(tmp_path / "p"), labels="none"))
    data = registry.read(config, PreprocessConfig(), tmp_path / "cache")
    assert data.class_names == () and data.test.labels is data.train.labels is None
    assert len(data.train) + len(data.test) == 9 * (len(split) or 1)


def test_a_class_that_only_the_test_folder_has(tmp_path):
    write_classes(tmp_path / "p" / "train")
    write_classes(tmp_path / "p" / "test")
    (tmp_path / "p" / "test" / "red").rename(tmp_path / "p" / "test" / "blue")
    with pytest.raises(PtqError, match=r"class 'blue' has no folder in .*train"):
        read(tmp_path / "p")


def test_a_line_of_pixels_is_not_cut_from_what_would_fill_the_memory(tmp_path):
    """Scaled until its short side fits, one of 100,000 pixels would have 256 x 25,600,000."""
    root = write_classes(tmp_path / "p")
    Image.new("RGB", (1, 100_000)).save(root / "red" / "line.png")
    with pytest.raises(
        PtqError, match=r"line\.png: cannot be read .*got 'crop', which makes 256 x"
    ):
        read(root, size=224, resize="crop")
    assert read(root, size=224, resize="fit").image_shape == (224, 224, 3)


def test_pictures_that_would_fill_the_disk_are_refused(tmp_path, monkeypatch):
    """Few bytes of a picture of one colour are many when it is decoded."""
    write_classes(tmp_path / "a")
    free = shutil.disk_usage(tmp_path)._replace(free=500)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda folder: free)
    with pytest.raises(
        DataError, match=r"^preprocess\.size: got null, .* 8 pictures of 4x6: .*500"
    ):
        read(tmp_path / "a")
    assert not list((tmp_path / "cache").rglob("images.npy"))


def test_a_file_larger_than_any_picture_is_not_read(tmp_path):
    root = write_classes(tmp_path / "p")
    path = next(root.rglob("*.png"))
    with path.open("wb") as file:
        file.truncate(2**43)  # of holes
    with pytest.raises(DataError, match=rf"{path.name}: cannot be read \(it is larger than "):
        read(root)


def test_large_pictures_are_not_in_memory_at_the_same_time():
    room, half = pictures._Room(), pictures.MAX_PIXELS // 2
    with room.hold(half), room.hold(half):
        assert room.free < 2  # a third waits
    with pytest.raises(ValueError), room.hold(10 * pictures.MAX_PIXELS):
        assert room.free == 0  # it is alone
        raise ValueError
    assert room.free == pictures.MAX_PIXELS


@pytest.mark.parametrize("sides", [("test", "val"), ("train", "eval")])
def test_sides_of_a_split_are_no_classes(tmp_path, sides):
    for side in sides:
        write_classes(tmp_path / "p" / side)
    with pytest.raises(ConfigError, match=r"^data\.root: got .* the sides of a split; expected"):
        read(tmp_path / "p")
    config = FolderConfig(root=str(tmp_path / "p"), classes=list(sides))
    data = registry.read(locate.find_data(config), PreprocessConfig(), tmp_path / "cache")
    assert data.class_names == sides


def test_a_class_may_be_called_train(tmp_path):
    for name in ("train", "bus"):
        (tmp_path / "p" / name).mkdir(parents=True)
        for shade in range(3):
            picture((shade, len(name), 0)).save(tmp_path / "p" / name / f"{shade}.png")
    assert read(tmp_path / "p").class_names == ("bus", "train")


def test_a_link_to_a_missing_picture_is_unreadable(tmp_path, caplog):
    root = write_classes(tmp_path / "p")
    (root / "red" / "9.png").symlink_to(tmp_path / "gone.png")
    with pytest.raises(DataError, match=r"9\.png: cannot be read \(no such file\)"):
        read(root)
    data = read(root, on_bad="skip")
    assert len(data.train) + len(data.test) == 8 and "1 of 9 pictures" in caplog.text


def test_pictures_beside_class_folders_are_counted(tmp_path, caplog):
    root = tmp_path / "p"
    for side in ("train", "test"):
        write_classes(root / side)
    for name in ("loose.png", "other.JPG", ".hidden.png"):
        picture(RED).save(root / "test" / name, "PNG")
    picture(RED).save(root / "one.png")
    assert len(read(root).train) == 8
    assert f"{root / 'test'}: 2 pictures beside the folders are not read" in caplog.text
    assert f"{root}: 1 pictures beside the folders are not read" in caplog.text
    assert caplog.text.count("beside the folders") == 2


def test_a_linked_folder_is_reported(tmp_path, caplog):
    root = write_classes(tmp_path / "p")
    write_classes(tmp_path / "other")
    (root / "red" / "more").symlink_to(tmp_path / "other" / "red")
    read(root)
    assert "1 files are not read" in caplog.text and "such as more" in caplog.text
