"""The facts of algorithms whose classes do not declare them yet: short name, title, summary and paper, by class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..registry import Paper

FACTS: Mapping[str, Mapping[str, Any]] = {
    "LocalSGD": {
        "short_name": "localsgd",
        "title": "Local SGD",
        "summary": "trains alone, and averages parameters over all ranks every few steps",
        "paper": Paper("Stich", "Local SGD Converges Fast and Communicates Little", "ICLR 2019", "1805.09767"),
    },
    "DiLoCo": {
        "short_name": "diloco",
        "title": "DiLoCo",
        "summary": "trains alone, and takes a Nesterov step along the mean drift of all ranks every few steps",
        "paper": Paper(
            "Douillard et al.",
            "DiLoCo: Distributed Low-Communication Training of Language Models",
            "2023",
            "2311.08105",
        ),
    },
    "StreamingDiLoCo": {
        "short_name": "streamingdiloco",
        "title": "Streaming DiLoCo",
        "summary": "takes the outer steps of parts of the model at different times, under the next steps of training",
        "paper": Paper(
            "Douillard et al.",
            "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch",
            "2025",
            "2501.18512",
        ),
    },
    "EagerDiLoCo": {
        "short_name": "eagerdiloco",
        "title": "Eager DiLoCo",
        "summary": "takes a rank's own part of the mean drift at once, and that of the others one outer step later",
        "paper": Paper(
            "Kale et al.", "Eager Updates For Overlapped Communication and Computation in DiLoCo", "2025", "2502.12996"
        ),
    },
    "SparseLoCo": {
        "short_name": "sparseloco",
        "title": "SparseLoCo",
        "summary": "sends the few largest entries of drifts in two bits, and keeps the others for the next outer step",
        "paper": Paper(
            "Sarfi, Therien, Lidin, Belilovsky",
            "Communication Efficient LLM Pre-training with SparseLoCo",
            "2025",
            "2508.15706",
        ),
    },
    "SlowMo": {
        "short_name": "slowmo",
        "title": "SlowMo",
        "summary": "puts a slow momentum on the averages of local SGD or gossip",
        "paper": Paper(
            "Wang, Tantia, Ballas, Rabbat",
            "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum",
            "ICLR 2020",
            "1910.00643",
        ),
    },
    "NoLoCo": {
        "short_name": "noloco",
        "title": "NoLoCo",
        "summary": "takes outer steps in random pairs, which pull their anchors together",
        "paper": Paper(
            "Kolehmainen et al.",
            "NoLoCo: No-all-reduce Low Communication Training Method for Large Models",
            "2025",
            "2506.10911",
        ),
    },
    "GASLoC": {
        "short_name": "gasloc",
        "title": "GASLoC",
        "summary": "takes outer steps alone, and gossips their result along with the momentum",
        "paper": Paper(
            "Cagnasso, Belilovsky, Oyallon",
            "Unifying Local Communications and Local Updates for LLM Pretraining",
            "2026",
            "2606.11081",
        ),
    },
    "QGDSGDm": {
        "short_name": "qgdsgdm",
        "title": "QG-DSGDm",
        "summary": "gossips, with momentum that is made of how the mixed models move",
        "paper": Paper(
            "Lin, Karimireddy, Stich, Jaggi",
            "Quasi-Global Momentum: Accelerating Decentralized Deep Learning on Heterogeneous Data",
            "ICML 2021",
            "2102.04761",
        ),
    },
    "D2": {
        "short_name": "d2",
        "title": "D2",
        "summary": "gossips, and adds what earlier rounds have changed, so that uneven data leaves no bias",
        "paper": Paper(
            "Tang, Lian, Yan, Zhang, Liu",
            "D2: Decentralized Training over Decentralized Data",
            "ICML 2018",
            "1803.07068",
        ),
    },
    "ExactDiffusion": {
        "short_name": "exactdiffusion",
        "title": "Exact diffusion",
        "summary": "is D2 with (I + W) / 2, on every undirected graph",
        "paper": Paper(
            "Yuan, Ying, Zhao, Sayed",
            "Exact Diffusion for Distributed Optimization and Learning - Part I: Algorithm Development",
            "IEEE Transactions on Signal Processing 2019",
            "1702.05122",
        ),
    },
    "GradientTracking": {
        "short_name": "gradienttracking",
        "title": "Gradient tracking",
        "summary": "steps along an estimate of the mean step of all ranks, which is gossiped too",
        "paper": Paper(
            "Di Lorenzo, Scutari",
            "NEXT: In-Network Nonconvex Optimization",
            "IEEE Transactions on Signal and Information Processing over Networks 2016",
            "1602.00591",
        ),
    },
    "DecentLaM": {
        "short_name": "decentlam",
        "title": "DecentLaM",
        "summary": "gossips, with momentum that sees the gossip as part of the gradient",
        "paper": Paper(
            "Yuan, Chen, Huang, Zhang, Pan, Xu, Yin",
            "DecentLaM: Decentralized Momentum SGD for Large-batch Deep Training",
            "ICCV 2021",
            "2104.11981",
        ),
    },
    "RelaySGD": {
        "short_name": "relaysgd",
        "title": "RelaySGD",
        "summary": "relays sums of models through trees, so that every rank averages those of all",
        "paper": Paper(
            "Vogels, He, Koloskova, Lin, Karimireddy, Stich, Jaggi",
            "RelaySum for Decentralized Deep Learning on Heterogeneous Data",
            "NeurIPS 2021",
            "2110.04175",
        ),
    },
    "PowerGossip": {
        "short_name": "powergossip",
        "title": "PowerGossip",
        "summary": "sends low-rank approximations of the differences between neighbours, by power iteration",
        "paper": Paper(
            "Vogels, Karimireddy, Jaggi",
            "Practical Low-Rank Communication Compression in Decentralized Deep Learning",
            "NeurIPS 2020",
            "2008.01425",
        ),
    },
}
