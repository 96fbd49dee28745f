"""Images per second and core: the image pipeline of train/ against plain torchvision, in one run.

    .venv/bin/python -m benchmarks.loader --data-dir data/cifar10-jpeg
    .venv/bin/python -m benchmarks.loader --num-workers 0 4 16 --num-images 4096 --batch-size 256

"plain" is what every ImageNet example does: ImageFolder, RandomResizedCrop(224), RandomHorizontalFlip, ToTensor,
Normalize, DataLoader. Training batches are read from (a) JPEGs of 500 x 375 and 375 x 500 pixels at quality 90, made in
a temporary folder from the images of --data-dir and noise with a natural spectrum, to the 110 kB of an average file of
ImageNet; (b) the images of --data-dir as they are, at 32 x 32, where plain has RandomCrop(32, padding=4). --data-dir is
a folder with train/<class>/, by default GOSSIP_DATA; where there is none, (a) is made of noise and (b) of (a), shrunk.

Contenders take turns; numbers are medians over the repeats. The time of a pass is that of reading all batches, with
the start and end of the loader processes. "Images/s" is by the clock; "images/s per core" by the seconds of CPU that
this process and its loaders have used, which other work on the machine disturbs less. Ours normalises on the device of
the model: the column after it adds what that costs when it is a CPU. The last lines say how many cores keep a GPU busy.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, Python looks beside this file only

from train.tasks.images.folder_images import MEAN, STD, CroppedImages, FolderImages, ShiftedImages
from train.tasks.images.images import BatchKey
from train.tasks.images.loader import Batches

WIDTH, HEIGHT, QUALITY = 500, 375, 90
NOISE = 58.0  # standard deviation in levels of 255, for files of about 110 kB
SMALL = 32


@dataclasses.dataclass(frozen=True)
class LoaderBenchmark:
    """What is measured."""

    data_dir: str = os.environ.get("GOSSIP_DATA", "")
    """Folder with train/<class>/ of small images; empty: noise."""
    num_workers: tuple[int, ...] = (0, 1, 2)
    """Numbers of loader processes."""
    num_images: int = 384
    """Large images in a pass, and files made; of small ones a pass reads 8 times as many."""
    batch_size: int = 64
    """Images in a batch."""
    repeats: int = 5
    """Passes of every contender."""
    gpu_images_per_second: float = 2750.0
    """What a GPU trains on; ResNet-50 in bfloat16 on one H100: 2,500 to 3,000."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """One reading of all images."""

    seconds: float
    core_seconds: float
    """Of CPU, used by this process and its loaders."""


def make_large_images(target: Path, sources: list[str], num_images: int) -> None:
    """Write `num_images` JPEGs of `WIDTH` x `HEIGHT`, every fourth upright, into a class folder of `target`.

    Each is one of `sources`, enlarged, or nothing but grey, with noise whose amplitude falls as 1 / frequency: the
    spectrum of photographs.
    """
    (target / "class").mkdir(parents=True)
    generator = np.random.default_rng(0)
    for index in range(num_images):
        width, height = (HEIGHT, WIDTH) if index % 4 == 3 else (WIDTH, HEIGHT)
        frequencies = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
        frequencies[0, 0] = np.inf
        noise = np.fft.irfft2(np.fft.rfft2(generator.normal(size=(height, width))) / frequencies, (height, width))
        base: Image.Image = Image.new("RGB", (width, height), (128, 128, 128))
        if sources:
            with Image.open(sources[index * len(sources) // num_images]) as image:
                base = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
        pixels = np.asarray(base) + NOISE * (noise / noise.std())[:, :, None]
        path = target / "class" / f"{index:05d}.jpg"
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=QUALITY)


def make_small_images(target: Path, large: ImageFolder) -> None:
    """Write the images of `large` as JPEGs of `SMALL` x `SMALL`."""
    (target / "class").mkdir(parents=True)
    for path, _ in large.samples:
        with Image.open(path) as image:
            image.resize((SMALL, SMALL)).save(target / "class" / Path(path).name, quality=QUALITY)


def plain_batches(
    folder: ImageFolder, indices: np.ndarray, options: LoaderBenchmark, num_workers: int
) -> Iterable[Any]:
    """The batches as the examples of torchvision read them."""
    return DataLoader(
        folder,
        batch_size=options.batch_size,
        sampler=indices.tolist(),
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
    )


def our_batches(images: FolderImages, indices: np.ndarray, options: LoaderBenchmark, num_workers: int) -> Iterable[Any]:
    """The same images through train/."""
    parts = (indices[i : i + options.batch_size] for i in range(0, len(indices), options.batch_size))
    keys = [BatchKey(part, seed=seed) for seed, part in enumerate(parts)]
    return Batches(images, keys, num_workers=num_workers, timeout_seconds=300)


def core_seconds() -> float:
    """Seconds of CPU that this process and its ended children have used."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def read_all(batches: Iterable[tuple[Tensor, Tensor]], images: FolderImages | None = None) -> Pass:
    """One pass; with `images`, which normalises each batch in this process."""
    start, start_core = time.perf_counter(), core_seconds()
    for pixels, _ in batches:
        if images is not None:
            images.prepare(pixels)
    return Pass(time.perf_counter() - start, core_seconds() - start_core)


def measure(title: str, images: FolderImages, plain: ImageFolder, options: LoaderBenchmark, num_images: int) -> float:
    """Print the table of one kind of images; returns our images per second and core, with the most loaders."""
    indices = np.random.default_rng(0).permutation(len(images))[:num_images]
    passes: dict[tuple[str, int], list[Pass]] = {}
    for repeat in range(options.repeats + 1):
        for num_workers in options.num_workers:
            results = {
                "plain": read_all(plain_batches(plain, indices, options, num_workers)),
                "ours": read_all(our_batches(images, indices, options, num_workers)),
                "prepared": read_all(our_batches(images, indices, options, num_workers), images),
            }
            for name, result in results.items() if repeat else ():  # the first pass warms caches up
                passes.setdefault((name, num_workers), []).append(result)

    def rate(name: str, num_workers: int, field: str) -> float:
        return len(indices) / statistics.median(getattr(a_pass, field) for a_pass in passes[name, num_workers])

    kilobytes = statistics.mean(os.path.getsize(plain.samples[index][0]) for index in indices) / 1e3
    print(f"\n{title}: {len(indices)} images a pass, of {kilobytes:.1f} kB on average\n")
    print(
        "| loaders | plain, images/s | ours, images/s | plain, per core | ours, per core | ratio | normalised on it |"
    )
    print("|---|---|---|---|---|---|---|")
    for n in options.num_workers:
        plain_rate, our_rate = rate("plain", n, "core_seconds"), rate("ours", n, "core_seconds")
        print(
            f"| {n} | {rate('plain', n, 'seconds'):,.0f} | {rate('ours', n, 'seconds'):,.0f} | {plain_rate:,.0f} | "
            f"{our_rate:,.0f} | {our_rate / plain_rate:.1f} | {rate('prepared', n, 'core_seconds'):,.0f} |"
        )
    return rate("ours", max(options.num_workers), "core_seconds")


def main(options: LoaderBenchmark) -> None:
    """Make the images, read them, print the tables."""
    torch.set_num_threads(1)
    to_tensor = [transforms.RandomHorizontalFlip(), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    crop_large = transforms.Compose([transforms.RandomResizedCrop(224), *to_tensor])
    crop_small = transforms.Compose([transforms.RandomCrop(SMALL, padding=SMALL // 8), *to_tensor])
    with tempfile.TemporaryDirectory() as name:
        small_root = Path(options.data_dir) / "train" if options.data_dir else Path(name) / "small"
        sources = [path for path, _ in ImageFolder(str(small_root)).samples] if options.data_dir else []
        make_large_images(Path(name) / "large", sources, options.num_images)
        large = ImageFolder(str(Path(name) / "large"), crop_large)
        if not options.data_dir:
            make_small_images(small_root, large)
        small = ImageFolder(str(small_root), crop_small)
        print(f"{torch.get_num_threads()} thread, {os.cpu_count()} cores, torch {torch.__version__}")
        per_core = measure("500 x 375 to 224 x 224", CroppedImages(large, size=224), large, options, len(large))
        cores = options.gpu_images_per_second / per_core
        print(f"\n{options.gpu_images_per_second:,.0f} images/s for one GPU: {cores:.1f} cores like these")
        measure("32 x 32", ShiftedImages(small, size=SMALL), small, options, 8 * options.num_images)


if __name__ == "__main__":
    main(tyro.cli(LoaderBenchmark, description=__doc__))
