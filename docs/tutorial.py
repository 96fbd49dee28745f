"""The scripts of docs/learn/tutorial.md, and the files that follow from the page.

    python docs/tutorial.py          # writes the notebook, the quickstart, its curve and the script of the README
    python docs/tutorial.py --run    # runs the commands of the page first, and writes their output into it

A block with a title is a file. A diff makes a new file from an earlier one: `title="ddp.py, from plain.py"`; lines "@@"
separate its parts. A block of bash without a title is run, and the block of text after it is its output.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "learn" / "tutorial.md"
QUICKSTART = ROOT / "docs" / "learn" / "quickstart.md"
CURVE = ROOT / "docs" / "assets" / "quickstart.svg"
NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"
README = ROOT / "README.md"
METHODS = {"DistributedDataParallel": "ddp.py", "GossipDataParallel": "gossip.py"}
"""The lines of the curve, and the scripts of the page that make them; the first is the baseline."""
LAUNCH = "torchrun --standalone --nproc-per-node 4"
BLOCK = re.compile(
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```\n', re.MULTILINE | re.DOTALL
)
LOSS = re.compile(r"^step (\d+): test loss ([\d.]+)", re.MULTILINE)


class Part(NamedTuple):
    """A piece of the page.

    Attributes:
        kind: "prose", "file", "command" or "output".
        name: of the file.
        text: of the piece as the page has it; of a diff, the whole new file.
        source: the piece as the page has it, fences included.
    """

    kind: str
    name: str
    text: str
    source: str


def patched(text: str, diff: str) -> str:
    """A file with a diff applied, each part of which fits at one place only."""
    for part in re.split(r"^@@\n", diff, flags=re.MULTILINE):
        lines = [line if line.strip() else " \n" for line in part.splitlines(keepends=True)]
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        if text.count(old) != 1:
            raise ValueError(f"got {text.count(old)} places for a part of a diff, expected one:\n{part}")
        text = text.replace(old, new)
    return text


def parts(page: str) -> Iterator[Part]:
    """The pieces of the page in their order."""
    files: dict[str, str] = {}
    end = 0
    for block in BLOCK.finditer(page):
        yield Part("prose", "", page[end : block.start()], page[end : block.start()])
        end = block.end()
        text, (name, _, base) = block["text"], (block["title"] or "").partition(", from ")
        if block["language"] == "diff":
            text = patched(files[base], text)
        if name:
            files[name] = text
        kind = "file" if name else {"bash": "command", "text": "output"}[block["language"]]
        yield Part(kind, name, text, block[0])
    yield Part("prose", "", page[end:], page[end:])


def scripts(page: str) -> dict[str, str]:
    """The files of the page, by name."""
    return {part.name: part.text for part in parts(page) if part.kind == "file"}


def outputs(page: str) -> dict[str, str]:
    """The outputs of the page, by command."""
    found, command = {}, ""
    for part in parts(page):
        if part.kind == "command":
            command = part.text.strip()
        elif part.kind == "output":
            found[command] = part.text
    return found


def run(page: str) -> str:
    """The page with the output that its commands have now."""
    pieces, output = [], ""
    with tempfile.TemporaryDirectory() as folder:
        for part in parts(page):
            if part.kind == "file":
                (Path(folder) / part.name).write_text(part.text, encoding="utf-8")
            elif part.kind == "command":
                output = _shell(part.text, Path(folder))
            pieces.append(f"```text\n{output}```\n" if part.kind == "output" else part.source)
    return "".join(pieces)


def measure(page: str) -> None:
    """Write the losses of the curve: of DDP and of gossip, with three seeds each."""
    from benchmarks.record import write_rows  # which imports torch; `make docs` does not need it

    rows = []
    for method, name in METHODS.items():
        for seed in range(3):
            output = outputs(page)[f"{LAUNCH} {name}"] if seed == 0 else _output(scripts(page)[name], name, seed)
            rows += [{"seed": seed, "method": method, "step": k, "loss": loss} for k, loss in LOSS.findall(output)]
    write_rows(CURVE.with_suffix(".csv"), rows, seed=0)


def _output(script: str, name: str, seed: int) -> str:
    """What a script prints whose model and batches are drawn from another seed."""
    script = script.replace("torch.manual_seed(0)", f"torch.manual_seed({seed})")
    with tempfile.TemporaryDirectory() as folder:
        text = script.replace("manual_seed(rank)", f"manual_seed({4 * seed} + rank)")
        (Path(folder) / name).write_text(text, encoding="utf-8")
        return _shell(f"{LAUNCH} {name}", Path(folder))


def _shell(command: str, folder: Path) -> str:
    """What commands print, in a folder, with the Python of this process."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    print(command.strip(), flush=True)
    shell = ["bash", "-euc", command]
    done = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stdout}{done.stderr}")
    return done.stdout


def notebook(page: str) -> str:
    """The page as a notebook: prose and diffs are text, files and commands are cells, with the page's outputs."""
    setup = "import os\nimport tempfile\n\nos.chdir(tempfile.mkdtemp())  # the cells below write their files there"
    title, _, rest = page.partition("\n\n")
    cells, prose = [_cell("markdown", title), _cell("code", setup)], ""
    for part in parts(rest):
        if part.kind == "prose" or part.source.startswith("```diff"):
            prose += part.source
        if part.kind in {"file", "command"} and (text := _for_notebook(prose)):
            cells, prose = [*cells, _cell("markdown", text)], ""
        if part.kind == "file":
            cells.append(_cell("code", f"%%writefile {part.name}\n{part.text}"))
        elif part.kind == "command":
            cells.append(_cell("code", "\n".join(f"!{line}" for line in part.text.splitlines())))
        elif part.kind == "output":
            cells[-1]["outputs"] = [{"name": "stdout", "output_type": "stream", "text": part.text.splitlines(True)}]
    cells.append(_cell("markdown", _for_notebook(prose)))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    content = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _cell(kind: str, text: str) -> dict[str, Any]:
    cell = {"cell_type": kind, "metadata": {}, "source": text.strip("\n").splitlines(True)}
    return {**cell, "execution_count": None, "outputs": []} if kind == "code" else cell


def _for_notebook(prose: str) -> str:
    """Markdown for Jupyter: boxes become quotes, links lead from examples/ to docs/, blocks have no titles."""
    box = re.compile(r'^!!! \w+(?: "(.*)")?\n\n((?:    .*\n|\n)+)', re.MULTILINE)

    def quote(found: re.Match[str]) -> str:
        lines = [f"**{found[1]}**", *found[2].strip().splitlines()]
        return "\n".join(f"> {line.strip()}" for line in lines) + "\n\n"

    prose = re.sub(r"^<!--.*-->\n", "", box.sub(quote, prose), flags=re.MULTILINE)
    prose = re.sub(r"\]\((?!https?:|#)([^)]+)\)", lambda link: f"]({_path_from_examples(link[1])})", prose)
    return re.sub(r'^```diff title="[^"]+"', "```diff", prose, flags=re.MULTILINE).strip("\n")


def _path_from_examples(link: str) -> str:
    path, mark, anchor = link.partition("#")
    return os.path.relpath((PAGE.parent / path).resolve(), NOTEBOOK.parent) + mark + anchor


def with_whole_files(page: str) -> str:
    """The page with a folded copy of each whole file below its diff, which a reader may copy."""
    pieces = []
    for part in parts(page):
        pieces.append(part.source)
        if part.source.startswith("```diff"):
            whole = "".join(f"    {line}" for line in f"```python\n{part.text}```\n".splitlines(keepends=True))
            pieces.append(f'\n??? example "The whole {part.name}"\n\n{whole}')
    return "".join(pieces)


def summary(page: str) -> str:
    """A table of the last lines of the outputs: a row for each script that says how many bytes it has sent."""
    rows = ["| script | test loss after 500 steps | MB sent by a worker |", "|---|---:|---:|"]
    for command, output in outputs(page).items():
        if sent := re.search(r"^sent ([\d.]+) MB$", output, re.MULTILINE):
            rows.append(f"| `{command.split()[-1]}` | {LOSS.findall(output)[-1][1]} | {sent[1]} |")
    return "\n".join(rows) + "\n"


def curve(rows: Iterable[Mapping[str, str]]) -> str:
    """A picture of the test loss against steps, as SVG that follows dark mode.

    Args:
        rows: of the CSV file: method, step and loss, of several seeds.
    """
    points: dict[str, dict[int, list[float]]] = {method: {} for method in METHODS}
    for row in rows:
        points[row["method"]].setdefault(int(row["step"]), []).append(float(row["loss"]))
    steps = [step for own in points.values() for step in own]
    losses = [loss for own in points.values() for found in own.values() for loss in found]
    ticks = [tick / 5 for tick in range(int(min(losses) * 5), int(max(losses) * 5) + 2)]
    left, right, top, bottom = 48, 424, 34, 244

    def x(step: float) -> float:
        return left + (right - left) * step / max(steps)

    def y(loss: float) -> float:
        return bottom - (bottom - top) * (loss - ticks[0]) / (ticks[-1] - ticks[0])

    style = (
        "text{fill:#333}.g{stroke:#ccc}.l0{stroke:#767676;fill:#767676}.l1{stroke:#3f51b5;fill:#3f51b5}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}.g{stroke:#555}.l0{stroke:#aaa;fill:#aaa}"
        ".l1{stroke:#9fa8da;fill:#9fa8da}}.n{fill:none}.b{opacity:.25;stroke:none}"
    )
    found = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 440 320" width="440" height="320" '
        'font-family="system-ui, sans-serif" font-size="13" role="img">',
        f"<title>Test loss against steps: {', '.join(points)}</title>\n<style>{style}</style>",
        '<text x="4" y="16">test loss [nats per byte], 4 workers, 3 seeds</text>',
    ]
    for tick in ticks:
        found.append(f'<path class="g" d="M{left} {y(tick):.1f}H{right}"/>')
        found.append(f'<text x="{left - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.1f}</text>')
    for step in range(0, max(steps) + 1, 100):
        found.append(f'<text x="{x(step):.1f}" y="{bottom + 20}" text-anchor="middle">{step}</text>')
    found.append(f'<text x="{(left + right) / 2:g}" y="{bottom + 38}" text-anchor="middle">step</text>')
    for number, (method, own) in enumerate(points.items()):
        mean = "M" + "L".join(f"{x(step):.1f} {y(sum(found) / len(found)):.1f}" for step, found in own.items())
        lowest = [f"{x(step):.1f} {y(min(losses)):.1f}" for step, losses in own.items()]
        highest = [f"{x(step):.1f} {y(max(losses)):.1f}" for step, losses in own.items()]
        dash = ' stroke-dasharray="6 4"' if number == 0 else ""
        start = left + 200 * number
        found.append(f'<path class="l{number} b" d="M{"L".join([*lowest, *reversed(highest)])}z"/>')
        found.append(f'<path class="l{number} n" stroke-width="2.2"{dash} d="{mean}"/>')
        found.append(f'<path class="l{number}" stroke-width="2.2"{dash} d="M{start} {bottom + 62}h26"/>')
        found.append(f'<text x="{start + 34}" y="{bottom + 67}">{method}</text>')
    return "\n".join([*found, "</svg>"]) + "\n"


def written() -> dict[Path, str]:
    """The text of each file that follows from the page."""
    page = PAGE.read_text(encoding="utf-8")
    page = _between(page, "summary", summary(page))
    shown = {command.split()[-1]: output for command, output in outputs(page).items()}
    script = f"# {LAUNCH} quickstart.py\n{scripts(page)['gossip.py']}"
    readme = re.sub(
        rf"^```python\n# {LAUNCH} quickstart.py\n.*?^```\n",
        lambda _: f"```python\n{script}```\n",
        README.read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
    quickstart = BLOCK.sub(
        lambda block: {
            "python": f'```python title="quickstart.py"\n{script}```\n',
            "text": f"```text\n{shown['gossip.py']}```\n",
        }.get(block["language"], block[0]),
        QUICKSTART.read_text(encoding="utf-8"),
    )
    with CURVE.with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        picture = curve(csv.DictReader(file))
    return {PAGE: page, README: readme, QUICKSTART: quickstart, CURVE: picture, NOTEBOOK: notebook(page)}


def _between(page: str, name: str, text: str) -> str:
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    head, _, rest = page.partition(begin)
    return f"{head}{begin}{text}{end}{rest.partition(end)[2]}"


def main() -> None:
    """Write the files, after a run of the page's commands if `--run` is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run the commands of the page first")
    if parser.parse_args().run:
        sys.path.insert(0, str(ROOT))
        page = run(PAGE.read_text(encoding="utf-8"))
        measure(page)
        PAGE.write_text(page, encoding="utf-8")
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
