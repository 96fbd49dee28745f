"""Pages of the studies of `benchmarks.studies`, and their rows of the page Reproduction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.pages.attack_study import ATTACK_STUDY
from benchmarks.pages.base import Page
from benchmarks.pages.computed_studies import COMPUTED_HEADLINES, COMPUTED_STUDIES
from benchmarks.pages.founding import FOUNDING
from benchmarks.pages.headline import Headline
from benchmarks.pages.image_studies import IMAGE_STUDIES
from benchmarks.pages.language_studies import LANGUAGE_HEADLINES, LANGUAGE_STUDIES
from benchmarks.pages.outer_studies import OUTER_HEADLINES, OUTER_STUDIES
from benchmarks.pages.paper_studies import PAPER_STUDIES
from benchmarks.pages.region_study import REGION_HEADLINES, REGION_STUDY
from benchmarks.pages.resnet_study import RESNET_STUDY
from benchmarks.pages.translation_study import TRANSLATION_HEADLINES, TRANSLATION_STUDY
from benchmarks.pages.uneven_studies import UNEVEN_HEADLINES, UNEVEN_STUDIES

STUDIES: Mapping[str, Page] = {
    **IMAGE_STUDIES,
    **RESNET_STUDY,
    **PAPER_STUDIES,
    **LANGUAGE_STUDIES,
    **OUTER_STUDIES,
    **TRANSLATION_STUDY,
    **REGION_STUDY,
    **COMPUTED_STUDIES,
    **UNEVEN_STUDIES,
    **ATTACK_STUDY,
}
"""By the name of the page."""

REPRODUCED: Sequence[Headline] = [
    each
    for each in (
        *FOUNDING,
        *LANGUAGE_HEADLINES,
        *OUTER_HEADLINES,
        *TRANSLATION_HEADLINES,
        *REGION_HEADLINES,
        *COMPUTED_HEADLINES,
        *UNEVEN_HEADLINES,
    )
    if each.page in STUDIES
]
"""The headlines of papers that the studies measure; see `benchmarks.pages.reproduction`."""
