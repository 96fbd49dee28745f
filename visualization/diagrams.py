"""The diagrams of the pages docs/learn/how_*.md, as SVG files that follow the light and dark colours of the page.

    python -m visualization.diagrams                 # writes docs/assets/how_*.svg
    python -m visualization.diagrams --output /tmp

Peers and numbers are computed by the library, so a picture cannot differ from it. Drawings are 420 wide: letters stay
legible on a phone.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from html import escape
from math import atan2, cos, hypot, pi, sin
from pathlib import Path

import numpy as np

from gossip_modules.graph_manager import NPeerDynamicDirectedExponentialGraph
from gossip_modules.mixing_manager import UniformMixing
from visualization.command import run_command

FOLDER = Path(__file__).parents[1] / "docs" / "assets"
WIDTH = 420
XMLNS = "http://www.w3.org/2000/svg"
LIGHT = {
    "ink": "#2b2b2b",
    "muted": "#666",
    "blue": "#3949ab",
    "orange": "#c2570c",
    "green": "#00796b",
    "purple": "#8e24aa",
    "pale": "#e4e7f2",
    "paper": "#fff",
}
DARK = {
    "ink": "#e4e4e4",
    "muted": "#a8a8a8",
    "blue": "#7f8ff0",
    "orange": "#ffab5c",
    "green": "#4fc3b0",
    "purple": "#d38ae6",
    "pale": "#3a3f55",
    "paper": "#1b1d28",
}
"""A browser takes DARK where the page, or else the reader's system, is dark."""
Point = tuple[float, float]


class Drawing:
    """An SVG picture, element by element; colours are names of LIGHT and DARK.

    Args:
        title: says to a reader of the page's text what the picture shows.
        height: the width is WIDTH.
    """

    def __init__(self, title: str, height: float) -> None:
        self.title, self.height = title, height
        self._elements: list[str] = []

    def text(
        self, at: Point, text: str, *, color: str = "ink", size: float = 13, anchor: str = "middle", bold: bool = False
    ) -> None:
        """A line of text whose baseline is at that height."""
        weight = ' font-weight="bold"' if bold else ""
        self._add(
            f'<text x="{_n(at[0])}" y="{_n(at[1])}" class="f-{color}" font-size="{size:g}" text-anchor="{anchor}"'
            f"{weight}>{escape(text)}</text>"
        )

    def box(self, at: Point, size: Point, text: str = "", *, color: str = "pale", ink: str = "ink") -> None:
        """A box whose upper left corner is `at`, with text in it, a line for each line."""
        self._add(
            f'<rect x="{_n(at[0])}" y="{_n(at[1])}" width="{_n(size[0])}" height="{_n(size[1])}" rx="3" '
            f'class="f-{color}"/>'
        )
        lines = text.split("\n") if text else []
        for index, line in enumerate(lines):
            y = at[1] + size[1] / 2 + 4.5 + 15 * (index - (len(lines) - 1) / 2)
            self.text((at[0] + size[0] / 2, y), line, color=ink)

    def node(self, at: Point, text: str, *, radius: float = 16, color: str = "blue") -> None:
        """A circle with a few letters in it."""
        self.dot(at, radius=radius, color=color)
        self.text((at[0], at[1] + 4.5), text, color="paper", bold=True)

    def dot(self, at: Point, *, radius: float = 2.4, color: str = "blue") -> None:
        """A full circle."""
        self._add(f'<circle cx="{_n(at[0])}" cy="{_n(at[1])}" r="{_n(radius)}" class="f-{color}"/>')

    def ring(self, at: Point, *, radius: float = 3.6, color: str = "blue") -> None:
        """A circle whose inside is empty."""
        self._add(
            f'<circle cx="{_n(at[0])}" cy="{_n(at[1])}" r="{_n(radius)}" class="s-{color}" fill="none" '
            f'stroke-width="1.5"/>'
        )

    def line(self, points: Sequence[Point], *, color: str = "muted", dashed: bool = False, width: float = 1.5) -> None:
        """Straight lines from point to point."""
        path = "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self._add(f'<path d="{path}" class="s-{color}" stroke-width="{width:g}"{dashes}/>')

    def arrow(
        self,
        start: Point,
        end: Point,
        *,
        color: str = "muted",
        gap: float = 0,
        bend: float = 0,
        dashed: bool = False,
        width: float = 1.8,
    ) -> None:
        """An arrow that keeps `gap` from both points, and passes `bend` to the right of the straight line."""
        dx, dy = end[0] - start[0], end[1] - start[1]
        length = hypot(dx, dy)
        middle = ((start[0] + end[0]) / 2 - bend * dy / length, (start[1] + end[1]) / 2 + bend * dx / length)
        first, last = _towards(start, middle, gap), _towards(end, middle, gap)
        angle = atan2(last[1] - middle[1], last[0] - middle[0])
        head = [last, *((last[0] - 9 * cos(angle + turn), last[1] - 9 * sin(angle + turn)) for turn in (-0.4, 0.4))]
        neck = _towards(last, middle, 6)
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self._add(
            f'<path d="M{_n(first[0])} {_n(first[1])}Q{_n(middle[0])} {_n(middle[1])} {_n(neck[0])} {_n(neck[1])}" '
            f'class="s-{color}" stroke-width="{width:g}"{dashes}/>'
        )
        self._add(f'<path d="M{"L".join(f"{_n(x)} {_n(y)}" for x, y in head)}z" class="f-{color}"/>')

    def svg(self) -> str:
        """The picture as the text of a file."""
        used = set(re.findall(r'class="(\w-\w+)"', "".join(self._elements)))
        light, dark = ("".join(_rules(colors, used)) for colors in (LIGHT, DARK))
        style = f"{light}@media(prefers-color-scheme:dark){{{dark}}}"
        return "\n".join(
            [
                f'<svg xmlns="{XMLNS}" width="{WIDTH}" height="{_n(self.height)}" '
                f'viewBox="0 0 {WIDTH} {_n(self.height)}" font-family="sans-serif">',
                f"<title>{escape(self.title)}</title>",
                f"<style>path{{fill:none;stroke-linejoin:round}}{style}</style>",
                *self._elements,
                "</svg>\n",
            ]
        )

    def _add(self, element: str) -> None:
        self._elements.append(element)


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def _rules(colors: Mapping[str, str], used: Collection[str]) -> list[str]:
    kinds = {"f": "fill", "s": "stroke"}
    return [
        f".{kind}-{name}{{{what}:{color}}}"
        for name, color in colors.items()
        for kind, what in kinds.items()
        if f"{kind}-{name}" in used
    ]


def _towards(start: Point, end: Point, distance: float) -> Point:
    length = hypot(end[0] - start[0], end[1] - start[1])
    return start[0] + (end[0] - start[0]) * distance / length, start[1] + (end[1] - start[1]) * distance / length


def _fraction(value: float) -> str:
    fraction = Fraction(value).limit_denominator(12)
    return str(fraction) if abs(float(fraction) - value) < 1e-9 else f"{value:.3f}"


def sgp() -> Drawing:
    """Two rounds of four ranks on the default graph, with the value of one parameter before and after each."""
    drawing = Drawing("Two rounds of SGP on four ranks: after both, every rank has the mean 1.5", 262)
    mixing = UniformMixing(NPeerDynamicDirectedExponentialGraph(4))
    x = np.arange(4.0)
    for t in range(mixing.period):
        weights = np.asarray(mixing.matrix(t))
        after = weights @ x
        left = 210 * t
        places = [(left + 60, 85), (left + 150, 85), (left + 150, 175), (left + 60, 175)]
        hop = mixing.graph.out_peers(0, t)[0]
        drawing.text((left + 105, 20), f"round {t}", bold=True)
        drawing.text((left + 105, 38), f"rank i sends to rank i + {hop}", color="muted")
        for sender in range(4):
            for receiver in mixing.graph.out_peers(sender, t):
                is_mutual = sender in mixing.graph.out_peers(receiver, t)
                drawing.arrow(places[sender], places[receiver], gap=20, bend=18 if is_mutual else 0)
        for rank, place in enumerate(places):
            drawing.node(place, str(rank))
            above = place[1] - 26 if place[1] < 130 else place[1] + 37
            drawing.text((place[0], above), f"{x[rank]:g} → {after[rank]:g}", color="orange")
        x = after
    drawing.text((210, 240), "orange: one parameter, before → after the round", color="muted")
    drawing.text((210, 256), "both weights are 1/2: the own value, and the value received", color="muted")
    return drawing


def push_sum() -> Drawing:
    """The shares on a graph where ranks send to different numbers of peers, and a round of x, w and z = x / w."""
    shares = np.array([[1 / 3, 1 / 2, 1 / 2], [1 / 3, 1 / 2, 0], [1 / 3, 0, 1 / 2]])
    drawing = Drawing("Push-sum on three ranks: rank 0 sends to two peers and the others to one", 250)
    x, w = np.arange(3.0), np.ones(3)
    after, weight = shares @ x, shares @ w
    places = [(210.0, 50.0), (330.0, 170.0), (90.0, 170.0)]
    for sender, receiver, label in ((0, 1, (296, 92)), (1, 0, (243, 132)), (0, 2, (177, 132)), (2, 0, (124, 92))):
        drawing.arrow(places[sender], places[receiver], gap=20, bend=-12)
        drawing.text(label, _fraction(shares[receiver, sender]), color="muted")
    for rank, (label_x, label_y, anchor) in enumerate(((238, 30, "start"), (330, 206, "middle"), (90, 206, "middle"))):
        drawing.node(places[rank], str(rank))
        for row, (name, before, now) in enumerate((("x", x, after), ("w", w, weight))):
            text = f"{name}: {_fraction(before[rank])} → {_fraction(now[rank])}"
            drawing.text((label_x, label_y + 17 * row), text, color="orange" if name == "x" else "green", anchor=anchor)
    for rank, (kept_x, kept_y, anchor) in enumerate(((186, 46, "end"), (352, 174, "start"), (68, 174, "end"))):
        drawing.text((kept_x, kept_y), f"keeps {_fraction(shares[rank, rank])}", color="muted", anchor=anchor)
    for rank, (y, anchor, label_x) in enumerate(((64, "start", 238), (240, "middle", 330), (240, "middle", 90))):
        drawing.text((label_x, y), f"z = x / w = {_fraction(after[rank] / weight[rank])}", anchor=anchor, bold=True)
    return drawing


def overlap() -> Drawing:
    """The time of three steps, with rounds before the forward and with rounds beside training."""
    drawing = Drawing("Three steps without overlap and with it: communication runs beside the computation", 330)
    left, compute, message = 74, 82, 46

    def lane(y: float, name: str) -> None:
        drawing.text((left - 8, y + 18), name, color="muted", anchor="end")

    drawing.text((left, 20), "overlap=False: a round, then the step", anchor="start", bold=True)
    lane(30, "training")
    lane(62, "messages")
    x = float(left)
    for step in range(2):
        drawing.box((x, 30), (message - 2, 26), "wait", color="pale", ink="muted")
        drawing.box((x, 62), (message - 2, 26), f"x({step})", color="orange", ink="paper")
        drawing.box((x + message, 30), (compute - 2, 26), f"step {step}", color="blue", ink="paper")
        x += message + compute
    drawing.box((x, 30), (message - 2, 26), "wait", color="pale", ink="muted")
    drawing.box((x, 62), (message - 2, 26), "x(2)", color="orange", ink="paper")
    drawing.line([(x + message, 43), (416, 43)], color="blue", width=2, dashed=True)
    drawing.text((left, 128), "overlap=True: the round runs beside the step", anchor="start", bold=True)
    lane(142, "training")
    lane(206, "messages")
    x = float(left)
    for step in range(4):
        drawing.box((x, 142), (compute - 2, 26), f"step {step}", color="blue", ink="paper")
        drawing.box((x + 4, 206), (message, 26), f"s({step})", color="orange", ink="paper")
        drawing.arrow((x + 6, 169), (x + 6, 205), color="orange", width=1.5)
        if step < 3:
            drawing.arrow((x + message + 6, 205), (x + compute + 1, 169), color="green", width=1.5)
        x += compute
    drawing.line([(left, 246), (414, 246)], color="muted", width=1)
    drawing.text((412, 262), "time →", color="muted", anchor="end")
    for y, color, text in (
        (278, "orange", "s(k): a copy of x, sent to the peers of round k"),
        (299, "green", "the correction (W - I) s(k), added to x before the next step"),
        (320, "blue", "forward, backward and optimizer.step()"),
    ):
        drawing.box((left - 62, y - 10), (14, 12), color=color)
        drawing.text((left - 40, y), text, anchor="start")
    return drawing


def outer_step() -> Drawing:
    """Workers that train alone from a common anchor, their mean, and the outer step; then the same in time."""
    drawing = Drawing(
        "An outer step: three workers drift from the anchor, and the anchor moves along their mean drift", 400
    )
    anchor, ends = (60.0, 190.0), [(232.0, 66.0), (262.0, 130.0), (196.0, 178.0)]
    mean = (sum(x for x, _ in ends) / 3, sum(y for _, y in ends) / 3)
    after = (anchor[0] + 1.45 * (mean[0] - anchor[0]), anchor[1] + 1.45 * (mean[1] - anchor[1]))
    for worker, end in enumerate(ends):
        steps = 5
        points = []
        for k in range(steps + 1):
            x, y = (anchor[i] + (end[i] - anchor[i]) * k / steps for i in range(2))
            side = 7 * sin(pi * k) if k in (0, steps) else (7 if (k + worker) % 2 else -7)
            slope = atan2(end[1] - anchor[1], end[0] - anchor[0]) + pi / 2
            points.append((x + side * cos(slope), y + side * sin(slope)))
        drawing.line([*points[:-1], end], color="blue", width=1.6)
        for point in points[1:-1]:
            drawing.dot(point)
        drawing.node(end, str(worker), radius=11)
    drawing.arrow(anchor, after, color="orange", gap=10, width=2.4)
    drawing.node(anchor, "φ", radius=11, color="orange")
    drawing.node(after, "φ'", radius=12, color="orange")
    drawing.dot(mean, radius=5, color="green")
    drawing.text((60, 218), "anchor", color="orange")
    drawing.text((18, 40), "blue: H optimizer steps", color="blue", anchor="start")
    drawing.text((18, 57), "of each worker, alone", color="blue", anchor="start")
    drawing.line([(mean[0] + 3, mean[1] + 5), (268, 196)], color="green", width=1)
    drawing.text((262, 212), "mean of the workers:", color="green", anchor="start")
    drawing.text((262, 228), "mean drift D from φ", color="green", anchor="start")
    drawing.text((after[0] + 16, after[1] - 22), "the outer optimizer", color="orange", anchor="middle")
    drawing.text((after[0] + 16, after[1] - 38), "new anchor: a step of", color="orange", anchor="middle")
    left = 74
    for worker in range(3):
        y = 262 + 30 * worker
        drawing.text((left - 8, y + 16), f"worker {worker}", color="muted", anchor="end")
        for start in (0, 1):
            for k in range(5):
                drawing.box((left + start * 172 + 25 * k, y), (23, 22), color="blue")
    for start in (0, 1):
        drawing.box((left + start * 172 + 127, 262), (42, 82), "mean\nof\ndrifts", color="orange", ink="paper")
    drawing.text((left + 65, 362), "H steps, no messages", color="muted")
    drawing.text((left + 172 + 65, 362), "H steps, no messages", color="muted")
    drawing.line([(left, 374), (412, 374)], color="muted", width=1)
    drawing.text((412, 391), "time →", color="muted", anchor="end")
    return drawing


def membership_states() -> Drawing:
    """The states of a worker, from the start of its process to its end."""
    drawing = Drawing("The states of a worker: registered, receives the state, trains, suspected, excluded, ended", 446)
    size = (136.0, 40.0)
    boxes = {
        "registered": ((18.0, 52.0), "pale"),
        "receives the state": ((18.0, 146.0), "pale"),
        "trains": ((18.0, 240.0), "blue"),
        "suspected": ((258.0, 240.0), "orange"),
        "excluded": ((258.0, 146.0), "orange"),
        "ended": ((18.0, 376.0), "pale"),
    }
    for text, (place, color) in boxes.items():
        drawing.box(place, size, text, color=color, ink="ink" if color == "pale" else "paper")

    def notes(at: Point, *lines: str, color: str = "muted", anchor: str = "start") -> None:
        for index, line in enumerate(lines):
            drawing.text((at[0], at[1] + 16 * index), line, color=color, anchor=anchor)

    drawing.arrow((86, 36), (86, 52))
    notes((86, 16), "the process starts,", "the model is wrapped", anchor="middle")
    drawing.arrow((86, 92), (86, 146))
    notes((94, 115), "first step: a donor", "sends model and step")
    drawing.arrow((86, 186), (86, 240))
    notes((94, 209), "the next generation", "begins")
    drawing.arrow((154, 252), (258, 252), color="orange")
    notes((206, 246), "silence", color="orange", anchor="middle")
    drawing.arrow((258, 270), (154, 270), color="green")
    notes((206, 286), "a heartbeat", color="green", anchor="middle")
    drawing.arrow((326, 240), (326, 186), color="orange")
    notes((318, 200), "deadline", "passed, or", "link closed", color="orange", anchor="end")
    drawing.arrow((326, 146), (154, 66), color="green")
    notes((258, 84), "it lives:", "it joins again by itself", color="green")
    drawing.line([(394, 166), (410, 166), (410, 396)], color="muted", width=1.8)
    drawing.arrow((410, 396), (154, 396))
    notes((400, 386), "its process has died", anchor="end")
    drawing.arrow((86, 280), (86, 376))
    notes((94, 324), "all steps are done, or", "you call leave()")
    notes((18, 436), "A restarted process registers as a new worker.")
    return drawing


def membership_generations() -> Drawing:
    """The workers of three generations: one dies, another joins."""
    drawing = Drawing("Three generations of a job: worker 1 dies, worker 4 joins", 256)
    left, bounds, right, pitch = 74.0, (190.0, 306.0), 412.0, 36.0
    for index, (begin, end) in enumerate(((left, bounds[0]), (bounds[0], bounds[1]), (bounds[1], right))):
        drawing.text(((begin + end) / 2, 18), f"generation {index + 1}", bold=True)
    spans = {0: (left, right), 1: (left, 158.0), 2: (left, right), 3: (left, right), 4: (bounds[1], right)}
    for worker, (begin, end) in spans.items():
        y = 32.0 + pitch * worker
        drawing.text((left - 8, y + 16), f"worker {worker}", color="muted", anchor="end")
        drawing.box((begin, y), (end - begin - 2, 22), color="blue")
    drawing.box((234, 32 + 4 * pitch), (bounds[1] - 236, 22), "state", color="pale")
    drawing.arrow((269, 54 + 3 * pitch), (269, 32 + 4 * pitch), color="green", width=2)
    drawing.text((164, 85), "\u2715", color="orange", size=18, anchor="start", bold=True)
    for bound in bounds:
        drawing.line([(bound - 1, 26), (bound - 1, 208)], color="muted", dashed=True)
    drawing.text((left, 230), "worker 1 dies: the others skip it at once", color="orange", anchor="start")
    drawing.text((left, 248), "worker 4 joins: a donor sends it the state", color="green", anchor="start")
    return drawing


def mailbox() -> Drawing:
    """Two rounds of three workers over a store of objects; worker 2 misses the first round."""
    drawing = Drawing(
        "Two rounds over a mailbox: workers write messages, one of them closes the round, and a late worker counts in "
        "the next round",
        336,
    )
    left, right, lanes, store = 74.0, 414.0, (30.0, 62.0, 94.0), 168.0
    spans = {  # from, to, whether the worker trains; what it waits for is pale
        0: ((left, 112, True), (112, 204, False), (204, 288, True), (288, 380, False), (380, right, True)),
        1: ((left, 130, True), (130, 204, False), (204, 306, True), (306, 380, False), (380, right, True)),
        2: ((left, 252, True), (252, 284, False), (284, right, True)),
    }
    for worker, parts in spans.items():
        drawing.text((left - 8, lanes[worker] + 16), f"worker {worker}", color="muted", anchor="end")
        for begin, end, trains in parts:
            drawing.box((begin, lanes[worker]), (end - begin - 2, 22), color="blue" if trains else "pale")
    drawing.text((left - 8, store + 16), "store", color="muted", anchor="end")
    drawing.line([(left, store + 34), (right, store + 34)], color="muted", width=1)
    objects = {0: ((112.0, "0"), (130.0, "1")), 1: ((252.0, "2"), (288.0, "0"), (306.0, "1"))}
    for number, messages in objects.items():
        for x, sender in messages:
            drawing.line([(x, lanes[int(sender)] + 23), (x, store - 6)], color="orange", width=1.2)
            drawing.arrow((x, store - 14), (x, store), color="orange", width=1.2)
            drawing.box((x - 8, store), (16, 24), sender, color="orange", ink="paper")
        last = messages[-1][0] + 10
        drawing.box((last, store), (36, 24), "close", color="pale")
        drawing.box((last + 38, store), (40, 24), "mean", color="green", ink="paper")
        middle = (messages[0][0] - 8 + last + 78) / 2
        drawing.text((middle, store + 50), f"round {number}", bold=True)
        for worker in (0, 1) if number == 0 else (0, 1, 2):
            x = last + 48 + 7 * worker
            drawing.arrow((x, store), (x, lanes[worker] + 22), color="green", width=1.2)
    drawing.text((left, 20), "blue: a worker trains; pale: it waits", color="muted", anchor="start")
    for y, color, text in (
        (246, "orange", "the message of a worker, after H steps of its own"),
        (268, "pale", "close: the workers that count; the first one written stays"),
        (290, "green", "mean: one worker writes it, the others read it"),
    ):
        drawing.box((22, y - 10), (14, 12), color=color)
        drawing.text((44, y), text, anchor="start")
    drawing.text((22, 312), "Worker 2 misses round 0: its longer drift counts in round 1.", anchor="start")
    drawing.text((22, 328), "It trains on while it waits for the close.", anchor="start")
    return drawing


DIAGRAMS: Mapping[str, Callable[[], Drawing]] = {
    "how_sgp": sgp,
    "how_push_sum": push_sum,
    "how_overlap": overlap,
    "how_an_outer_step": outer_step,
    "how_a_membership": membership_states,
    "how_generations": membership_generations,
    "how_a_mailbox": mailbox,
}
"""By the name of the file."""


def main() -> None:
    """Write all diagrams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder to write to")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DIAGRAMS.items():
        path = folder / f"{name}.svg"
        path.write_text(draw().svg(), encoding="utf-8")
        print(f"drew {path}")


if __name__ == "__main__":
    run_command(main)
