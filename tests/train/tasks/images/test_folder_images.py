"""Images: augmentation as a function of the key, decoding as Pillow and torchvision do it, files that do not decode."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from train.job.errors import DataError
from train.tasks.images.folder_images import (
    MEAN,
    NUM_TRIES,
    STD,
    CroppedImages,
    ShiftedImages,
    center,
    random_part,
    whole,
)
from train.tasks.images.image_file import Box, read_image
from train.tasks.images.images import BatchKey, TensorImages, random_shift


def smooth_image(height: int, width: int) -> Image.Image:
    """Red tells the row, green the column, blue waves."""
    rows, columns = np.mgrid[0:height, 0:width]
    waves = 128 + 100 * np.sin(rows / 9) * np.cos(columns / 11)
    return Image.fromarray(np.stack([rows * 255 / height, columns * 255 / width, waves], axis=2).astype(np.uint8))


def difference(first: Tensor, second: Tensor) -> float:
    """Mean of the absolute differences, in levels of 255."""
    return float((first.float() - second.float()).abs().mean())


def test_random_shift_moves_every_image_on_its_own() -> None:
    images = torch.zeros(64, 2, 9, 9)
    images[:, :, 4, 4] = 1
    shifted = random_shift(images, 2, torch.Generator().manual_seed(0))
    assert torch.equal(shifted.sum(dim=(2, 3)), torch.ones(64, 2))
    assert torch.equal(shifted[:, 0], shifted[:, 1])
    places = {tuple(place.tolist()) for place in shifted[:, 0].nonzero()[:, 1:]}
    assert len(places) > 15
    assert all(2 <= row <= 6 and 2 <= column <= 6 for row, column in places)
    assert random_shift(images, 0, torch.Generator()) is images


def test_augmentation_is_a_function_of_the_key() -> None:
    images = TensorImages(torch.rand(8, 3, 4, 4), np.arange(8), num_classes=8, max_shift=1, flip=True)
    key = BatchKey(np.arange(8), seed=5)
    assert torch.equal(images[key][0], images[key][0])
    assert not torch.equal(images[key][0], images[key._replace(seed=6)][0])
    assert torch.equal(images[key._replace(seed=None)][0], images.images)


@pytest.mark.parametrize(
    ("mode", "name", "options"),
    [
        ("RGB", "a.jpg", {"quality": 90}),
        ("RGB", "a.jpg", {"quality": 90, "progressive": True}),
        ("L", "a.jpg", {}),
        ("CMYK", "a.jpg", {}),
        ("RGB", "a.png", {}),
        ("L", "a.png", {}),
        ("P", "a.png", {}),
        ("RGBA", "a.png", {}),
        ("RGB", "a.bmp", {}),
    ],
)
def test_a_part_is_read_as_torchvision_does(tmp_path: Path, mode: str, name: str, options: dict[str, Any]) -> None:
    path = tmp_path / name
    smooth_image(90, 120).convert(mode).save(path, **options)
    with Image.open(path) as image:
        rgb = image.convert("RGB")
    expected = v2.functional.pil_to_tensor(v2.functional.resized_crop(rgb, 10, 20, 60, 75, [32, 32]))
    part = read_image(str(path), lambda height, width: Box(10, 20, height - 30, width - 45), size=32)
    assert part.shape == (3, 32, 32)
    assert part.dtype == torch.uint8
    assert int((part.int() - expected.int()).abs().max()) <= 1  # both round, at other places
    assert difference(part, expected) < 0.05


def test_an_image_of_the_right_size_is_not_scaled(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    smooth_image(32, 32).save(path)
    assert torch.equal(read_image(str(path), whole, size=32), v2.functional.pil_to_tensor(smooth_image(32, 32)))


@pytest.mark.parametrize("box", [Box(40, 104, 80, 96), Box(79, 143, 81, 97), Box(0, 0, 81, 97)])
@pytest.mark.parametrize(("size", "reduction"), [(64, 1), (41, 1), (40, 2), (21, 2), (20, 4), (11, 4), (10, 8), (4, 8)])
def test_of_a_large_jpeg_only_low_frequencies_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, box: Box, size: int, reduction: int
) -> None:
    path = tmp_path / "a.jpg"
    smooth_image(160, 240).save(path, quality=95)
    decoded: list[tuple[int, int]] = []

    def load(image: JpegImageFile) -> object:
        decoded.append(image.size)
        return original(image)

    with Image.open(path) as image:
        expected = v2.functional.pil_to_tensor(v2.functional.resized_crop(image, *box, [size, size]))
    original = JpegImageFile.load
    monkeypatch.setattr(JpegImageFile, "load", load)
    part = read_image(str(path), lambda height, width: box, size=size)
    assert decoded[0] == (240 // reduction, 160 // reduction)
    # Edges are off by half a reduced pixel at most, which is so many levels of red and green.
    tolerance = 1 + reduction / 2 * 255 / 160
    assert difference(part[0], expected[0]) < tolerance
    assert difference(part[1], expected[1]) < tolerance


def test_random_parts_have_the_areas_and_proportions_of_the_paper() -> None:
    height, width = 400, 500
    draws = torch.rand(2000, 2 * NUM_TRIES + 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    boxes = [random_part(height, width, draws=row) for row in draws.tolist()]
    assert all(box.top >= 0 and box.top + box.height <= height for box in boxes)
    assert all(box.left >= 0 and box.left + box.width <= width for box in boxes)
    areas = np.array([box.height * box.width / (height * width) for box in boxes])
    aspects = np.array([box.width / box.height for box in boxes])
    assert 0.079 < areas.min() < 0.09
    assert 0.95 < areas.max() <= 1
    assert 0.74 < aspects.min() < 0.76
    assert 1.32 < aspects.max() < 1.35
    # torchvision's own draws, of the same distribution: means within five standard errors.
    torchvision_draws = v2.RandomResizedCrop(224)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = [torchvision_draws.make_params([torch.empty(3, height, width)]) for _ in range(2000)]
    for ours, others in (
        (areas, [part["height"] * part["width"] / (height * width) for part in theirs]),
        (np.array([box.top for box in boxes]), [part["top"] for part in theirs]),
        (np.array([box.left for box in boxes]), [part["left"] for part in theirs]),
        (np.log(aspects), [math.log(part["width"] / part["height"]) for part in theirs]),
    ):
        assert abs(ours.mean() - np.mean(others)) < 5 * ours.std() * math.sqrt(2 / 2000)


@pytest.mark.parametrize(("height", "width", "expected"), [(10, 1000, (10, 13)), (1000, 9, (12, 9)), (1, 1, (1, 1))])
def test_of_a_strip_the_middle_is_taken(height: int, width: int, expected: tuple[int, int]) -> None:
    box = random_part(height, width, draws=[0.999] * (2 * NUM_TRIES + 2))
    assert (box.height, box.width) == expected
    assert box.top == (height - box.height) // 2
    assert box.left == (width - box.width) // 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ImageFolder:
    root = tmp_path_factory.mktemp("images")
    for label in ("cat", "dog"):
        (root / label).mkdir()
        for index in range(8):
            smooth_image(300, 400).save(root / label / f"{index}.jpg")
    return ImageFolder(str(root))


def test_validation_sees_the_center_that_torchvision_cuts(folder: ImageFolder) -> None:
    images, _ = CroppedImages(folder, size=224)[BatchKey(np.array([3]), seed=None)]
    cut = v2.Compose([v2.Resize(256), v2.CenterCrop(224), v2.PILToTensor()])
    assert difference(images[0], cut(folder[3][0])) < 1.5  # of 100 in the waves: scales of 256 / 300 and 224 / 262
    box = center(300, 400)
    assert (box.height, box.width, box.top, box.left) == (262, 262, 19, 69)


@pytest.mark.parametrize("kind", [ShiftedImages, CroppedImages])
def test_folder_images_are_a_function_of_the_key(
    folder: ImageFolder, kind: type[ShiftedImages] | type[CroppedImages]
) -> None:
    images = kind(folder, size=16)
    assert (len(images), images.num_classes, images.num_channels) == (16, 2, 3)
    key = BatchKey(np.array([3, 9, 0]), seed=5)
    pixels, labels = images[key]
    assert pixels.dtype == torch.uint8
    assert pixels.is_contiguous(memory_format=torch.channels_last)
    assert labels.tolist() == [0, 1, 0]
    assert torch.equal(pixels, images[key][0])
    assert not torch.equal(pixels, images[key._replace(seed=6)][0])
    assert not torch.equal(pixels[0], pixels[2])  # the files are equal, their augmentation is not
    plain = images[key._replace(seed=None)][0]
    assert torch.equal(plain[0], plain[2])


@pytest.mark.parametrize("kind", [ShiftedImages, CroppedImages])
def test_half_of_the_training_images_are_mirrored(
    folder: ImageFolder, kind: type[ShiftedImages] | type[CroppedImages]
) -> None:
    pixels, _ = kind(folder, size=16)[BatchKey(np.arange(200) % 16, seed=1)]
    green = pixels[:, 1].float()  # tells the column
    is_mirrored = green[:, :, 5].mean(1) > green[:, :, 10].mean(1)
    assert 70 < int(is_mirrored.sum()) < 130  # four standard deviations


def test_shifted_images_move_by_an_eighth_at_most(folder: ImageFolder) -> None:
    images = ShiftedImages(folder, size=16)
    pixels, _ = images[BatchKey(np.arange(60) % 16, seed=1)]
    is_black = (pixels.sum(1) == 0).float()
    num_rows, num_columns = is_black.mean(2).round().sum(1), is_black.mean(1).round().sum(1)
    assert set(num_rows.tolist()) == set(num_columns.tolist()) == {0.0, 1.0, 2.0}


def test_prepare_normalises_as_torchvision_does(folder: ImageFolder) -> None:
    images = CroppedImages(folder, size=16)
    pixels, _ = images[BatchKey(np.arange(4), seed=1)]
    before = pixels.clone()
    normalise = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    prepared = images.prepare(pixels)
    torch.testing.assert_close(prepared, normalise(pixels), rtol=1e-5, atol=1e-6)
    assert prepared.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(pixels, before)
    floats = TensorImages(torch.rand(2, 3, 4, 4), np.arange(2), num_classes=2)
    assert floats.prepare(floats.images) is floats.images


@pytest.mark.parametrize("name", ["a.jpg", "a.png"])
@pytest.mark.parametrize("num_bytes", [0, 10, 60, -200])
def test_a_broken_file_is_named(tmp_path: Path, name: str, num_bytes: int) -> None:
    path = tmp_path / name
    smooth_image(64, 64).save(path)
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(DataError, match=rf"^got .*{name} that does not decode \(.*\), expected an image; replace it"):
        read_image(str(path), whole, size=32)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"^got .*a\.jpg that cannot be read \(No such file or directory\), expected an"
    ):
        read_image(str(tmp_path / "a.jpg"), whole, size=32)
