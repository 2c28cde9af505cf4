"""One table of everything that the steps measured, beside what was wanted and what others published.

    python -m scripts.gpu.results runs/gpu

Reads what is there, writes OUT/report.txt and exits with 0 whatever fell short: the report says it.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from lln_fairseq.command import run_main
from lln_fairseq.data.files import write_bytes
from scripts.benchmarks import gpu, model_report
from scripts.columns import aligned

# flash-bidirectional-linear-attention: A800, float16, B = 8, H = 16, D = 64, N = 32768, ms forward and backward.
PUBLISHED = {"forward": 0.55, "backward": 3.04}
PUBLISHED_FLASH = {"forward": 47.8, "backward": 175.0}


class Target(NamedTuple):
    """What is wanted of a figure, for lengths from `first` on (up to `last`)."""

    text: str
    mechanism: str
    direction: str
    figure: str
    least: float
    first: int
    last: int = 10**9


FIGURES = {
    "of floor": lambda row: row["floor_ms"] / row["ours_ms"],
    "flash": lambda row: row["flash_ms"] / row["ours_ms"],
    "torch": lambda row: row["torch_ms"] / row["ours_ms"],
}
TARGETS = (
    Target("LLN+Diag forward, of the floor", "lln_diag", "forward", "of floor", 0.7, 4096),
    Target("LLN+Diag forward and backward, of the floor", "lln_diag", "both", "of floor", 0.6, 4096),
    Target("LLN+Diag against flash at 512", "lln_diag", "both", "flash", 1.0, 512, 512),
    Target("LLN+Diag against flash at 4096", "lln_diag", "both", "flash", 4.0, 4096, 4096),
    Target("LLN+Diag against flash at 16384", "lln_diag", "both", "flash", 15.0, 16384, 16384),
    Target("LLN+Diag against the PyTorch path", "lln_diag", "both", "torch", 4.0, 512),
)


def report(out: Path) -> str:
    """The text. A part whose file is missing says so."""
    parts = [device(out), tests(out)]
    for name in ("attention_float16", "attention_bfloat16", "attention_published"):
        parts.append(attention(out / f"{name}.json", name))
    parts += [published(out / "attention_published.json"), targets(out / "attention_float16.json")]
    parts += [model(out / f"{name}.json") for name in ("model", "model_compiled")]
    parts += [model_targets(out / "model.json"), text_of(out / "compare" / "comparison.txt"), resumed(out)]
    parts.append(text_of(out / "tiles.patch"))
    return "\n\n".join(parts) + "\n"


def read(file: Path) -> Any:
    return json.loads(file.read_text()) if file.exists() else None


def missing(file: Path) -> str:
    return f"{file.name}: not measured"


def text_of(file: Path) -> str:
    return f"{file.name}\n{file.read_text().rstrip()}" if file.exists() else missing(file)


def device(out: Path) -> str:
    found = read(out / "device.json")
    if not found:
        return missing(out / "device.json")
    return (f"{found['device']}: copy {found['bandwidth'] / 1e12:.2f} TB/s, matrix product "
            f"{found['flops'] / 1e12:.0f} TFLOP/s; {found['versions']}")  # fmt: skip


def tests(out: Path) -> str:
    file = out / "kernels.xml"
    if not file.exists():
        return missing(file)
    suites = list(ElementTree.parse(file).getroot().iter("testsuite"))
    counts = {key: sum(int(suite.get(key, 0)) for suite in suites)
              for key in ("tests", "failures", "errors", "skipped")}  # fmt: skip
    failed = [f"  failed: {case.get('name')}" for case in suites[0].iter("testcase")
              if case.find("failure") is not None or case.find("error") is not None]  # fmt: skip
    return "\n".join(["kernel tests: " + ", ".join(f"{value} {key}" for key, value in counts.items()), *failed])


def attention(file: Path, name: str) -> str:
    found = read(file)
    return f"{name}\n{aligned([gpu.HEADS, *map(gpu.cells, found['rows'])])}" if found else missing(file)


def published(file: Path) -> str:
    """Our LLN beside the published bidirectional linear attention, at its shape."""
    found = read(file)
    if not found:
        return missing(file)
    times = {row["direction"]: row for row in found["rows"]}
    ours, flash = ({"forward": times["forward"][key], "backward": times["both"][key] - times["forward"][key]}
                   for key in ("ours_ms", "flash_ms"))  # fmt: skip
    rows = [["ms", *ours], *([name, *(f"{x:.2f}" for x in values.values())] for name, values in
            (("LLN, here", ours), ("SDPA flash, here", flash), ("published linear attention, A800", PUBLISHED),
             ("SDPA, published, A800", PUBLISHED_FLASH)))]  # fmt: skip
    return f"B = 8, H = 16, D = 64, N = 32768\n{aligned(rows)}"


def targets(file: Path) -> str:
    found = read(file)
    if not found:
        return missing(file)
    return "\n".join(["wanted of the kernels", *(line for target in TARGETS for line in judged(target, found["rows"]))])


def judged(target: Target, rows: list[dict[str, Any]]) -> Iterator[str]:
    """A line for the worst of the lengths that a target is for, none where none was measured."""
    values = {
        row["length"]: FIGURES[target.figure](row)
        for row in rows
        if (row["mechanism"], row["direction"]) == (target.mechanism, target.direction)
        and target.first <= row["length"] <= target.last
    }
    if values:
        length, worst = min(values.items(), key=lambda item: item[1])
        verdict = "holds" if worst >= target.least else "FALLS SHORT"
        yield f"  {target.text}: {worst:.2f} (at {length}), wanted {target.least}: {verdict}"


def model(file: Path) -> str:
    if not file.exists():
        return missing(file)
    settings, rows = model_report.read_rows(file)
    return model_report.table(settings, rows)


def model_targets(file: Path) -> str:
    """A training step of LLN+Diag beside softmax's: not slower at 512, 1.5 times as fast at 4096, no more memory."""
    if not file.exists():
        return missing(file)
    rows = {(row.attention, row.length): row for row in model_report.read_rows(file)[1]}
    lines = ["wanted of a training step of RoBERTa-base"]
    for length, least in ((512, 1.0), (4096, 1.5)):
        softmax, ours = (rows.get((name, length)) for name in ("softmax", "lln_diag"))
        if softmax and ours and softmax.time and ours.time:
            ratio = softmax.time.median / ours.time.median
            verdict = "holds" if ratio >= least else "FALLS SHORT"
            lines.append(f"  as fast as softmax at {length}: {ratio:.2f}, wanted {least}: {verdict}")
    softmax, ours = (rows.get((name, 16384)) for name in ("softmax", "lln_diag"))
    if softmax and ours and softmax.memory and ours.memory:
        verdict = "holds" if ours.memory <= softmax.memory else "FALLS SHORT"
        lines.append(f"  memory at 16384: {ours.memory / 1e9:.2f} GB, softmax {softmax.memory / 1e9:.2f}: {verdict}")
    return "\n".join(lines)


def resumed(out: Path) -> str:
    log = out / "resume" / "log.txt"
    found = re.findall(r"Loaded checkpoint .* @ (\d+) updates", log.read_text(errors="replace")) if log.exists() else []
    return f"killed training: resumed at update {found[-1]}" if found else "killed training: not resumed"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu.results", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("out", type=Path)
    return run_main(lambda: write(parser.parse_args(argv).out))


def write(out: Path) -> None:
    text = report(out)
    write_bytes(out / "report.txt", text.encode())
    print(text)


if __name__ == "__main__":
    sys.exit(main())
