"""docs/voice.py: what it counts in a page, and what fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.voice import MOST_BENCHMARK_WORDS, benchmark_fault, listen, main, prose, visible

GOOD = """# Which method, that is, whose?

Wrap your model. Check that you see a lower loss, so that you know that it trains. That is all.

| a method that who which | for whom |
|---|---|
| a row | the same for all |

```python
which = "who"  # that which
```

!!! note "Your checkpoint"
    `which(that)` saves [your model](which.md), and $that$ is it.

::: gossip_modules.Which
    options:
      that: who
"""


def test_prose_has_no_code_table_heading_or_signature() -> None:
    read = prose(GOOD)
    assert "Wrap your model." in read
    assert '"Your checkpoint"' in read
    assert "which" not in read
    assert "who" not in read


def test_a_conjunction_is_no_relative_clause() -> None:
    voice = listen(GOOD)
    assert (voice.num_clauses, voice.num_you, voice.images, voice.num_same) == (0, 5, (), 0)
    assert listen("A worker that dies. A rank, which knows who it is: that is rank 0.").num_clauses == 3


def test_a_page_that_speaks_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "good.md"
    page.write_text(GOOD, encoding="utf-8")
    assert main([str(page)]) == 0
    assert "0.0 relative clauses" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("You see the worker that died. " * 3, "got 166.7 relative clauses in 1,000 words, expected at most 20"),
        ("The model trains. " * 3, 'got 0.0 "you" in 1,000 words, expected at least 5'),
        ("Your life is silent.", "got 'life', 'silent', expected plain words"),
        ("You.\n\n| graph |\n|---|\n| the same, slower |\n| ring | the same |", 'got 2 rows or cells "the same"'),
    ],
)
def test_a_page_that_does_not_speak_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, fault: str
) -> None:
    page = tmp_path / "bad.md"
    page.write_text(text, encoding="utf-8")
    assert main([str(page)]) == 1
    assert fault in capsys.readouterr().out
    assert main([str(page), "--report"]) == 0


BENCHMARK = """# A title

<!-- a comment -->

**The result** of [a method](page.md).

| a table | of figures |
|---|---:|

??? note "All rows"

    Folded.

    | more | rows |

Seen.

```sh
a command
```

## Measured with

A machine.
"""


def test_tables_code_folded_parts_and_commands_of_a_page_of_benchmarks_are_not_counted() -> None:
    assert " ".join(visible(BENCHMARK).split()) == "# A title **The result** of [a method]. Seen."
    assert benchmark_fault(["word " * (MOST_BENCHMARK_WORDS - 1), BENCHMARK.replace("Seen.", "")]).startswith(
        "docs/benchmarks: got 8,006 words, expected at most 8,000"
    )
    assert benchmark_fault(["word " * MOST_BENCHMARK_WORDS]) == ""
