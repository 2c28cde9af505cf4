"""Read the code blocks of README.md and docs/."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted(ROOT.glob("docs/*.md"))]

FENCED_BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def code_blocks(page: Path, language: str) -> list[str]:
    """Return the code of every fenced block of a page that is marked with `language`, in the order of the page."""
    text = page.read_text(encoding="utf-8")
    return [block["code"] for block in FENCED_BLOCK.finditer(text) if block["language"] == language]


def text_without_code(page: Path) -> str:
    """Return the text of a page without its fenced blocks."""
    return FENCED_BLOCK.sub("", page.read_text(encoding="utf-8"))
