"""The text of scripts/benchmarks/model.py, beside the paper's Table 2."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.benchmarks.meter import Spread
from scripts.benchmarks.model_training import SOFTMAX
from scripts.terminal import grid, settings_line

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


def table(settings: dict[str, Any], rows: Sequence[Row]) -> str:
    lengths = sorted({row.length for row in rows})
    baseline = {row.length: row.time for row in rows if row.attention == SOFTMAX}

    def milliseconds(row: Row) -> str:
        return row.time.text(1) if row.time else "-"

    def ratio(row: Row) -> str:
        base = baseline.get(row.length)
        return f"{base.median / row.time.median:.2f}" if base and row.time else ""

    def gigabytes(row: Row) -> str:
        return f"{row.memory / 1e9:.3f}" if row.memory else "-"

    blocks = [settings_line(settings)]
    blocks.append(_measured("time [ms/iteration], median (fastest-slowest)", rows, lengths, milliseconds))
    blocks.append(_measured(f"times as fast as {SOFTMAX}, fused", rows, lengths, ratio))
    if any(row.memory for row in rows):
        blocks.append(_measured("peak memory [GB]", rows, lengths, gigabytes))
    if set(lengths) & set(PAPER_LENGTHS):
        blocks.append(_paper("the paper's time [s/iteration], RoBERTa-base on a GPU", PAPER_SECONDS, lengths))
        blocks.append(_paper("the paper's memory [GB]", PAPER_GIGABYTES, lengths))
    return "\n\n".join(blocks)


def _measured(head: str, rows: Sequence[Row], lengths: Sequence[int], cell: Callable[[Row], str]) -> str:
    cells: dict[tuple[str, int], str] = {}
    for row in rows:
        cells[row.attention, row.length] = "OOM" if row.oom else cell(row)
    return grid(head, {length: str(length) for length in lengths}, cells, "N =")


def _paper(head: str, values: Mapping[str, Sequence[float | None]], lengths: Sequence[int]) -> str:
    cells: dict[tuple[str, int], str] = {}
    for name, line in values.items():
        for length, value in zip(PAPER_LENGTHS, line, strict=True):
            cells[name, length] = "OOM" if value is None else str(value)
    return grid(head, {length: str(length) for length in lengths}, cells, "N =")
