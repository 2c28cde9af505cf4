"""What the experiments share for their arguments, files of results, tables and pictures."""

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from scripts.benchmarks.meter import attention_argument, model_argument


def attentions_argument(text: str) -> list[str]:
    """Convert an argument to a list of attention specs, without repetitions, as a `type` of argparse."""
    return [attention_argument(spec) for spec in split_specs(text)]


def models_argument(text: str) -> list[str]:
    """Convert an argument as `attentions_argument` does. Each may also be a layout."""
    return [model_argument(spec) for spec in split_specs(text)]


def split_specs(text: str) -> list[str]:
    # A comma before OPTION= separates the options of an attention; any other comma separates attentions.
    return list(dict.fromkeys(re.split(r",(?!\w+=)", text)))


def read_results(directory: Path) -> list[dict[str, Any]]:
    """Return the contents of the JSON files in a directory, in the order of their names."""
    return [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]


def select(results: Iterable[dict[str, Any]], **values: Any) -> list[dict[str, Any]]:
    return [result for result in results if all(result.get(key) == value for key, value in values.items())]


def mean_and_range(values: Sequence[float], digits: int = 1, sign: str = "") -> str:
    """Return "mean (lowest–highest)", only the value if there is one, or "" if there is none.

    With the sign "+", positive numbers have one, and the range is "lowest to highest".
    """
    if not values:
        return ""
    spec = f"{sign}.{digits}f"
    text = format(statistics.fmean(values), spec)
    if len(values) == 1:
        return text
    dash = " to " if sign else "–"
    return f"{text} ({min(values):{spec}}{dash}{max(values):{spec}})"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown. The first row has the titles."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join(lines)


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
