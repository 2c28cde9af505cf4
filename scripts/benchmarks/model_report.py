"""Format the tables that scripts/benchmarks/model.py prints, with the numbers of the paper's Table 2."""

from collections.abc import Mapping, Sequence
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
    """The results of one attention at one length.

    Attributes:
        attention: the name of the attention, with its options.
        length: tokens per sequence.
        time: the time of an iteration in ms; None if it was not measured.
        memory: the peak memory in bytes; None if it was not measured.
        oom: True if memory ran out. Then `time` and `memory` are None.
    """

    attention: str
    length: int
    time: Spread | None = None
    memory: int | None = None
    oom: bool = False


def results_text(settings: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return all results as text: a line with the settings, then tables of times, speedups over softmax and memory.

    The tables have a row for each attention and a column for each length. If any of the paper's lengths was measured,
    the paper's tables follow. If no memory was measured, its table is left out.
    """
    lengths = sorted({row.length for row in rows})
    baseline = {row.length: row.time for row in rows if row.attention == SOFTMAX}
    times: dict[tuple[str, int], str] = {}
    ratios: dict[tuple[str, int], str] = {}
    memory: dict[tuple[str, int], str] = {}
    for row in rows:
        key = (row.attention, row.length)
        if row.oom:
            times[key] = "OOM"
            ratios[key] = "OOM"
            memory[key] = "OOM"
            continue
        softmax_time = baseline.get(row.length)
        times[key] = row.time.text(1) if row.time else "-"
        ratios[key] = f"{softmax_time.median / row.time.median:.2f}" if softmax_time and row.time else ""
        memory[key] = f"{row.memory / 1e9:.3f}" if row.memory else "-"

    columns = {length: str(length) for length in lengths}
    parts = [settings_line(settings)]
    parts.append(grid("time [ms/iteration], median (fastest-slowest)", columns, times, "N ="))
    parts.append(grid(f"times as fast as {SOFTMAX}, fused", columns, ratios, "N ="))
    if any(row.memory for row in rows):
        parts.append(grid("peak memory [GB]", columns, memory, "N ="))
    if set(lengths) & set(PAPER_LENGTHS):
        parts.append(_paper_table("the paper's time [s/iteration], RoBERTa-base on a GPU", PAPER_SECONDS, columns))
        parts.append(_paper_table("the paper's memory [GB]", PAPER_GIGABYTES, columns))
    return "\n\n".join(parts)


def _paper_table(title: str, values: Mapping[str, Sequence[float | None]], columns: Mapping[int, str]) -> str:
    """Return a table of the paper's values, with a row for each attention and the columns `columns`.

    Args:
        title: the line above the table.
        values: the values of each attention at PAPER_LENGTHS; None where memory ran out.
        columns: the title of each column by its length. Lengths that the paper lacks get empty cells.
    """
    cells: dict[tuple[str, int], str] = {}
    for name, line in values.items():
        for length, value in zip(PAPER_LENGTHS, line, strict=True):
            cells[name, length] = "OOM" if value is None else str(value)
    return grid(title, columns, cells, "N =")
