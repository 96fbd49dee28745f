"""Two levels: regions as workers, their bytes between regions, and the advice."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn

import gossip_modules as gm
from gossip_modules import GossipDataParallel
from gossip_modules.lab import Compute, Digits, LinkSpec, Network, Setting, simulate
from gossip_modules.lab.levels import (
    GRADIENTS,
    SAME,
    LevelPrediction,
    advise_levels,
    as_level_table,
    methods_between,
    predict_levels,
    regions_as_workers,
    wrapping,
)
from gossip_modules.lab.plan import LabPlan
from gossip_modules.regions import Regions
from tests.harness.ranks import solo_group

NEAR, FAR, LINE = LinkSpec(1e10, 1e-4), LinkSpec(2e8, 0.01), 2e8
ROWS = [[NEAR, NEAR, FAR, FAR], [NEAR, NEAR, FAR, FAR], [FAR, FAR, NEAR, NEAR], [FAR, FAR, NEAR, NEAR]]
SITES = Setting(4, 2_500_000, Compute(0.2), Network(ROWS, (1,) * 4, lines=(0, 0, 1, 1), line_bit_s=LINE))
REGIONS = Regions.of("0-1,2-3")


def test_a_region_is_a_worker_with_the_line_of_its_processes() -> None:
    above = regions_as_workers(SITES, REGIONS)
    assert (above.world_size, above.network.lines, above.network.line_bit_s) == (2, (0, 1), LINE)
    links = above.network.on(np.arange(2))
    assert links.latency_s == FAR.latency_s
    assert links.wire_seconds(1e6) == pytest.approx(8e6 / (LINE * 0.957))  # two processes have one line
    apart = regions_as_workers(replace(SITES, network=Network(ROWS, (1,) * 4)), REGIONS)
    assert apart.network.on(np.arange(2)).wire_seconds(1e6) == pytest.approx(4e6 / (FAR.rate_bit_s * 0.957))
    inside = 8e7 / (NEAR.rate_bit_s * 0.957)  # two processes exchange halves, twice
    for seconds in np.atleast_1d(above.compute.seconds):
        assert 0.2 < seconds < 0.2 + 2 * inside


def test_an_average_between_regions_starts_late_and_ends_with_a_gather_inside() -> None:
    late = replace(SITES, network=replace(SITES.network, average_start_s=0.5))
    above = regions_as_workers(late, REGIONS).network.average_start_s
    gather = 8 * 5e6 / (NEAR.rate_bit_s * 0.957) + NEAR.latency_s  # half of the model from the other process
    assert above == pytest.approx(0.5 + gather)
    seconds = [simulate("LocalSGD(sync_every=10)", setting, Digits()).seconds for setting in (SITES, late)]
    num_averages = simulate("LocalSGD(sync_every=10)", SITES, Digits()).num_steps // 10
    assert seconds[1] - seconds[0] == pytest.approx(0.5 * num_averages)


def test_regions_keep_the_settings_of_their_processes() -> None:
    own = replace(SITES.network, message_byte_s=1e9, slow_share=0.25, slow_factor=4.0)
    above = regions_as_workers(replace(SITES, network=own), REGIONS).network
    assert (above.message_byte_s, above.memory_byte_s) == (2e9, 2 * own.memory_byte_s)
    assert above.slow_share == 0
    # The rate is twice the median of four links, of which two have a slow process.
    assert above.table()[0][1].rate_bit_s == pytest.approx(2 * np.median([2e8, 2e8, 5e7, 5e7]))


def test_unequal_regions_are_refused() -> None:
    with pytest.raises(ValueError, match="expected equally many consecutive ranks in each"):
        predict_levels(SITES, Regions.of("0-2,3"))


@pytest.mark.parametrize(("text", "models"), [("ar", 2 * 1.5), ("LocalSGD(sync_every=10)", 2 * 1.5 / 10)])
def test_a_ring_sends_its_share_of_the_model_over_both_lines(text: str, models: float) -> None:
    found = LevelPrediction(SAME, simulate(text, SITES, Digits()))
    assert found.line_bytes == pytest.approx(models * 1e7, rel=0.05)  # a model of 1e7 bytes


def test_the_delay_hides_an_average() -> None:
    above = regions_as_workers(SITES, REGIONS)
    seconds = above.network.on(np.arange(2)).all_reduce_seconds(1e7)
    delay = math.ceil(seconds / 0.2)
    assert f"DiLoCo(sync_every=30, delay={delay})" in methods_between(above)
    slow = replace(above, compute=Compute(1e-3))
    assert not [text for text in methods_between(slow) if "sync_every=100, delay" in text]


def test_the_advice_is_the_fastest_of_both_levels() -> None:
    flat = [LevelPrediction(SAME, simulate(text, SITES, Digits())) for text in ("ar", "sgp")]
    found = [*flat, *predict_levels(SITES, REGIONS)]
    chosen, sentences = advise_levels(found)
    assert chosen is not None
    assert chosen.inside == GRADIENTS
    good = [level.prediction for level in found if level.prediction.has_reached and level.prediction.has_agreed]
    assert chosen.prediction.seconds == min(prediction.seconds for prediction in good)
    assert sentences[0].startswith(f"Choose {chosen.prediction.name} between regions, and an all-reduce of gradients")
    assert chosen.prediction.plan.text in sentences[-1]
    table = as_level_table(found).splitlines()
    assert len(table) == len(found) + 1
    assert table[0].split()[:2] == ["inside", "a"]
    alone, (sentence, *_) = advise_levels(flat)
    assert alone is not None
    assert sentence.startswith(f"Choose {alone.prediction.name} among all ranks: ")
    assert advise_levels([])[0] is None


def test_each_advice_wraps_a_model() -> None:
    regions = SimpleNamespace(arguments=dict)
    names = {**vars(gm), "GossipDataParallel": partial(GossipDataParallel, process_group=solo_group())}
    for text in methods_between(regions_as_workers(SITES, REGIONS)):
        wrapper = eval(wrapping(LabPlan.of(text)), {**names, "regions": regions, "model": nn.Linear(2, 2)})
        wrapper.close()
