"""Find out whether a trained model can be faster on your rows, and write the faster model if it can.

    lln-fairseq speedup CLASSIFIER OUT --rows rows.tsv --text question passage --label label
    lln-fairseq speedup ENCODER OUT --texts texts.txt

The model is a directory of Hugging Face or a checkpoint, as `lln-fairseq convert` reads it. The program times it in
transformers on this machine, in ONNX, and with other attentions, which it trains on a part of the rows without their
labels. It chooses the fastest that loses at most --max-drop points, and measures it on held-out rows. OUT
gets `model`, unless the answer is no, and report.md, report.png, report.json and rows.tsv.

Without --label, a model is good if it agrees with the original, see --min-agreement. A model with one output, such as a
reranker, is scored by Spearman's correlation, or by nDCG@10 with --group. An encoder is scored by the cosine to its
vectors. Give an interrupted command again to continue it.
"""

import argparse
import json
import math
import shutil
import textwrap
from pathlib import Path

from lln_fairseq.conversion.directory import read_json
from lln_fairseq.conversion.to_onnx import check_packages
from lln_fairseq.errors import UserError
from lln_fairseq.speedup.candidates import parse_candidate
from lln_fairseq.speedup.journal import Journal, checksum
from lln_fairseq.speedup.report import JSON, MODEL, opening_code, summarize, write_reports
from lln_fairseq.speedup.rows import read_labeled_rows, read_text_rows
from lln_fairseq.speedup.runtimes import TRANSFORMERS
from lln_fairseq.speedup.search import WORTH, Entry, Search
from lln_fairseq.text.rows import Columns
from lln_fairseq.training.malloc import disable_malloc_trim

# The options on which the results depend.
SEARCHED = (
    "text",
    "label",
    "group",
    "no_header",
    "max_drop",
    "min_agreement",
    "minutes",
    "batch",
    "onnx",
    "attentions",
)


def speedup(args: argparse.Namespace) -> None:
    """Search for a faster model, and write it with the reports to OUT. Do nothing if OUT is complete."""
    if not args.model.exists():
        raise UserError(f"no such directory or checkpoint: {args.model}")
    if args.out.resolve().is_relative_to(args.model.resolve()):
        raise UserError(f"{args.out} is in the directory of the model: give another OUT")
    if args.onnx:
        check_packages()
    for spec in args.attentions or ():
        parse_candidate(spec)
    if args.texts is not None:
        rows = read_text_rows(args.texts)
    else:
        rows = read_labeled_rows(args.rows, Columns(args.text, args.label, not args.no_header, args.group))
    identity = {"model": checksum(args.model), "rows": checksum(args.texts or args.rows), "seed": args.seed}
    identity |= {name: getattr(args, name) for name in SEARCHED}
    journal = Journal(args.out, identity)
    if (args.out / JSON).exists():
        journal.remove_folders()
        print(json.loads((args.out / JSON).read_text())["summary"])
        return
    search = Search(args, journal, rows)
    entry = search.run()
    final = None
    chosen = False
    if entry is not None:
        final = search.report_on(entry)
        chosen = final["drop"] <= final["limit"] and final["times_as_fast"] >= WORTH
    last_line = summarize(search, entry, final, chosen)
    if chosen and entry is not None and not (args.out / MODEL).exists():
        write_model(search, entry, args.out / MODEL)
    write_reports(search, entry, final, chosen, last_line)
    journal.remove_folders()
    print(f"\n{args.out}/report.md has all that was tried")
    if chosen and entry is not None:
        print(f"to open the model:\n{opening_code(search, entry, str(args.out / MODEL))}\n")
    print(last_line)


def write_model(search: Search, entry: Entry, directory: Path) -> None:
    """Copy the chosen model to a directory, whose model card first opens it in the runtime that was chosen."""
    part = directory.with_suffix(".part")
    shutil.copytree(entry.directory, part, dirs_exist_ok=True)
    keep_longest_text(part, search.original.longest)
    if entry.runtime != TRANSFORMERS:
        code = textwrap.indent(opening_code(search, entry, "DIRECTORY"), "    ")
        use = f"## Use\n\nIt is fastest in {entry.runtime}:\n\n{code}\n\nIn transformers, with 32 bits:\n"
        card = part / "README.md"
        card.write_text(card.read_text(encoding="utf-8").replace("## Use\n", use), encoding="utf-8")
    part.rename(directory)


def keep_longest_text(directory: Path, longest: int) -> None:
    """Let the tokenizer of an exported model cut texts where the original's does, which may be before its positions."""
    for name, key in (("tokenizer_config.json", "model_max_length"), ("sentence_bert_config.json", "max_seq_length")):
        path = directory / name
        if path.exists():
            settings = read_json(path) | {key: longest}
            path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: list[str]) -> None:
    """Run `lln-fairseq speedup` with the arguments that follow the program's name."""
    parser = argparse.ArgumentParser(
        prog="lln-fairseq speedup", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a directory of Hugging Face, or a checkpoint")
    parser.add_argument("out", type=Path, help="the directory to create, or an interrupted search")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--rows", type=Path, help="rows of a classifier or reranker: TSV, CSV, JSON Lines or Parquet")
    source.add_argument("--texts", type=Path, help="texts of an encoder, one per line")
    parser.add_argument(
        "--text",
        nargs="+",
        default=["text"],
        metavar="COLUMN",
        help="column of the text, or columns of two texts (default: text)",
    )
    parser.add_argument("--label", metavar="COLUMN", help="column of the label (default: compare with the original)")
    parser.add_argument("--group", metavar="COLUMN", help="column of a reranker's query, to score rankings")
    parser.add_argument("--no-header", action="store_true", help="the first line is a row: columns are numbers from 1")
    parser.add_argument(
        "--max-drop", type=float, default=1.0, help="points of 100 that may be lost with labels (default: %(default)s)"
    )
    parser.add_argument(
        "--min-agreement",
        type=float,
        default=95.0,
        help="without labels, points that are needed (default: %(default)s)",
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="for the whole search (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="texts that are served at once (default: %(default)s)")
    parser.add_argument("--onnx", action="store_true", help="also export the candidates to ONNX, which takes longer")
    parser.add_argument(
        "--attentions",
        nargs="+",
        metavar="SPEC",
        help="train all of these, such as lln_diag:block_size=32, and no others",
    )
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    if len(args.text) > 2:
        parser.error(f"--text must be one or two columns, got {len(args.text)}")
    if args.group and not args.label:
        parser.error("--group needs --label")
    if not 0 <= args.max_drop <= 100 or not 0 <= args.min_agreement <= 100:
        parser.error("--max-drop and --min-agreement must be from 0 to 100")
    if not 0 < args.minutes < math.inf or args.batch < 1:
        parser.error("--minutes must be positive and finite, and --batch at least 1")
    disable_malloc_trim()
    speedup(args)
