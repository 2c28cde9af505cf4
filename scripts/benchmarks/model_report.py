"""Text, JSON and picture of scripts/benchmarks/model.py, beside the paper's Table 2."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.benchmarks.meter import Spread, draw_by_length
from scripts.benchmarks.model_training import SOFTMAX
from scripts.columns import aligned

DEFAULT = "lln_diag"
TIME, MEMORY = "time [ms/iteration]", "peak memory [GB]"

# Table 2 of arXiv 2311.13541: RoBERTa-base, batch 1, "a commodity GPU". None: out of memory.
PAPER_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
PAPER_SECONDS = {
    "softmax": (0.95, 1.05, 2.4, 6.8, None, None),
    "Nyströmformer": (1.8, 1.9, 2.6, 4.7, 8.8, 16.7),
    "LLN": (1.0, 1.05, 1.6, 3.2, 6.1, 11.8),
    "LLN+Diag": (1.2, 1.3, 1.9, 3.6, 6.9, 13.3),
}
PAPER_GIGABYTES = {
    "softmax": (4.0, 5.5, 12.6, 32.1, None, None),
    "Nyströmformer": (4.0, 4.5, 5.5, 7.3, 11.6, 19.1),
    "LLN": (4.1, 4.4, 5.7, 7.5, 12.0, 20.1),
    "LLN+Diag": (4.1, 4.6, 6.1, 8.1, 13.4, 23.0),
}


@dataclass
class Row:
    """Time of an iteration in ms, peak memory in bytes; None where it is not measured or there is not enough memory."""

    attention: str
    length: int
    time: Spread | None = None
    memory: int | None = None
    oom: bool = False


def write_json(path: Path, settings: dict[str, Any], rows: Sequence[Row]) -> None:
    paper = {"lengths": PAPER_LENGTHS, "seconds": PAPER_SECONDS, "gigabytes": PAPER_GIGABYTES}
    content = {"settings": settings, "rows": [asdict(row) for row in rows], "paper": paper}
    path.write_text(json.dumps(content, indent=1) + "\n")


def table(settings: dict[str, Any], rows: Sequence[Row]) -> str:
    lengths = sorted({row.length for row in rows})
    baseline = {row.length: row.time for row in rows if row.attention == SOFTMAX}

    def ratio(row: Row) -> str:
        base = baseline.get(row.length)
        return f"{base.median / row.time.median:.2f}" if base and row.time else ""

    def milliseconds(row: Row) -> str:
        return row.time.text(1) if row.time else "-"

    def gigabytes(row: Row) -> str:
        return "-" if row.memory is None else f"{row.memory / 1e9:.3f}"

    blocks = [title(settings)]
    if any(row.time for row in rows):
        blocks += [_block(f"{TIME}, median (fastest-slowest)", rows, lengths, milliseconds)]
        blocks += [_block(f"times as fast as {SOFTMAX}, fused", rows, lengths, ratio)]
    if any(row.memory for row in rows):
        blocks += [_block(MEMORY, rows, lengths, gigabytes)]
    if set(lengths) & set(PAPER_LENGTHS):
        blocks += [_paper("the paper's time [s/iteration], RoBERTa-base on a GPU", PAPER_SECONDS, lengths)]
        blocks += [_paper("the paper's memory [GB]", PAPER_GIGABYTES, lengths)]
    return "\n\n".join(blocks)


def _block(head: str, rows: Sequence[Row], lengths: Sequence[int], cell: Callable[[Row], str]) -> str:
    found = {(row.attention, row.length): row for row in rows}

    def text(name: str, length: int) -> str:
        row = found.get((name, length))
        if row is None:
            return ""
        return "OOM" if row.oom else cell(row)

    names = list(dict.fromkeys(row.attention for row in rows))
    return _grid(head, {name: [text(name, length) for length in lengths] for name in names}, lengths)


def _paper(head: str, values: Mapping[str, Sequence[float | None]], lengths: Sequence[int]) -> str:
    places = {length: place for place, length in enumerate(PAPER_LENGTHS)}
    cells = {
        name: ["" if length not in places else "OOM" if row[places[length]] is None else str(row[places[length]])
               for length in lengths]
        for name, row in values.items()
    }  # fmt: skip
    return _grid(head, cells, lengths)


def _grid(head: str, cells: dict[str, list[str]], lengths: Sequence[int]) -> str:
    rows = [["N =", *map(str, lengths)], *([name, *row] for name, row in cells.items())]
    return f"{head}\n{aligned(rows)}"


def title(settings: dict[str, Any]) -> str:
    return (
        "{model}, {preset}, batch {batch}, vocabulary {vocabulary}, {dtype}, dropout {dropout}, of attention "
        "{attention_dropout}; {device}, torch {torch}".format(**settings)
    ) + (", compiled" if settings.get("compile") else "")


def draw(path: Path, settings: dict[str, Any], rows: Sequence[Row]) -> None:
    def points(name: str, panel: str) -> list[tuple[int, float]]:
        mine = sorted((row for row in rows if row.attention == name), key=lambda row: row.length)
        if panel == TIME:
            return [(row.length, row.time.median) for row in mine if row.time]
        return [(row.length, row.memory / 1e9) for row in mine if row.memory]

    panels = [TIME, MEMORY] if any(row.memory for row in rows) else [TIME]
    names = list(dict.fromkeys(row.attention for row in rows))
    draw_by_length(path, title(settings), panels, names, points, bold=(SOFTMAX, DEFAULT))
