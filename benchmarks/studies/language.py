"""Studies of outer methods on a language model: loss and bytes of DDP, local SGD, DiLoCo and its kin, as published."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.studies.small_decoder import Text
from benchmarks.studies.study import Study
from gossip_modules import QSGD, DiLoCo, GASLoC, IsoLoCo, LocalSGD, MuLoCo, NoLoCo, SparseLoCo, StreamingDiLoCo

STEPS, SEEDS = 3000, (1, 2, 3)
FOUR_BITS = QSGD(4, bucket_size=32, unbiased=True)
BY_ADAMW: Mapping[int, Mapping[str, Any]] = {
    8: {
        "all-reduce": "ar",
        "DiLoCo, H = 30": DiLoCo(sync_every=30),
        "DiLoCo, H = 500": DiLoCo(sync_every=500),
        "local SGD, H = 30": LocalSGD(sync_every=30),
        "DiLoCo, H = 100": DiLoCo(sync_every=100),
        "Streaming DiLoCo, H = 100, 4 bits": StreamingDiLoCo(
            sync_every=100, fragments=4, delay=5, compressor=FOUR_BITS
        ),
        "NoLoCo, H = 50": NoLoCo(sync_every=50),
        "SparseLoCo, H = 30": SparseLoCo(sync_every=30),
        "GASLoC, H = 30": GASLoC(sync_every=30),
        "IsoLoCo, H = 30": IsoLoCo(sync_every=30),
        "local SGD, H = 500": LocalSGD(sync_every=500),
    },
    1: {"one worker alone": "ar"},
    16: {
        "all-reduce": "ar",
        "DiLoCo, H = 30": DiLoCo(sync_every=30),
        "local SGD, H = 30": LocalSGD(sync_every=30),
        "IsoLoCo, H = 30": IsoLoCo(sync_every=30),
    },
}
"""By the number of workers, in the order in which they run. Other settings are the defaults, which the papers give."""
BY_MUON = {"all-reduce, Muon": "ar", "MuLoCo, H = 30": MuLoCo(sync_every=30)}
RATES = (0.016, 0.032, 0.008)


def study(batch_size: int, methods: Mapping[int, Mapping[str, Any]], *, muon: bool = False) -> Study:
    """Return the study of these methods, by the number of workers: all seeds of 8 workers or fewer, then the others."""
    few, many = [n for n in methods if n <= 8], [n for n in methods if n > 8]
    return Study(
        partial(Text, batch_size, muon=muon),
        methods.__getitem__,
        cells=tuple((n, STEPS, seed) for numbers in (few, many) for seed in SEEDS for n in numbers),
        rates=RATES,
        tuning=0.2,
        points=6,
    )


LANGUAGE: Mapping[str, Study] = {
    "outer_language": study(4, BY_ADAMW),
    "outer_language_muon": study(4, {8: BY_MUON}, muon=True),
    "outer_language_one": study(32, {1: {"DiLoCo of one worker, H = 30": DiLoCo(sync_every=30, momentum=0.8)}}),
    "outer_language_one_muon": study(32, {1: {"MuLoCo of one worker, H = 30": MuLoCo(sync_every=30)}}, muon=True),
    "many_workers": Study(
        partial(Text, 1),
        lambda workers: {"SGP": "sgp", "all-reduce": "ar", "DiLoCo, H = 30": DiLoCo(sync_every=30)},
        cells=((64, 300, 1), (1024, 300, 1)),
        rates=(0.016,),
        points=6,
    ),
}
"""The studies by name. The first four write one file, `outer_language.csv`. In each step the workers of a method
together read 32 sequences, or 64 with 16 workers; "one worker alone" reads four. A worker of the last one reads one."""
