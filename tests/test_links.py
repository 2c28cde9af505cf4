"""Test that links lead somewhere, and that every file of results is cited and says where it is from."""

import json
import re

import pytest

from tests.documentation import PAGES, ROOT, text_without_code

RESULTS = sorted((ROOT / "docs" / "results").iterdir())
LINKING_PAGES = [*PAGES, ROOT / "CONTRIBUTING.md", *(path for path in RESULTS if path.suffix == ".md")]


def links(page):
    """Yield the path and the anchor, which may be "", of every link to a file of this project."""
    for target in re.findall(r"\]\(([^)\s]+)\)", text_without_code(page)):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            yield (page.parent / path).resolve() if path else page, anchor


def anchors(page):
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text_without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKING_PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for path, anchor in links(page):
        assert path.exists(), path
        assert not anchor or anchor in anchors(path), f"{path}#{anchor}"


def test_every_file_of_results_is_cited():
    cited = set()
    for page in LINKING_PAGES:
        cited |= {path for path, _ in links(page)}

    assert set(RESULTS) <= cited


@pytest.mark.parametrize("path", [path for path in RESULTS if path.suffix == ".json"], ids=lambda path: path.stem)
def test_every_result_names_its_commit(path):
    """Of the oldest ones, which name none, it is the commit that added them."""
    for rows in json.loads(path.read_text()).values():
        if isinstance(rows, list):
            for row in rows:
                assert row.get("versions", row.get("provenance", {})).get("commit") or row["added"]
