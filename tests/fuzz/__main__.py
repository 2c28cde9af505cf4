"""Attacks what reads files and tensors of others with random, mostly damaged cases.

python -m tests.fuzz                    # 200 cases of every subject
python -m tests.fuzz --long             # 4,000 of every subject
python -m tests.fuzz rows --cases 50 --seed 3
"""

import tests.conftest  # noqa: F401, I001  the settings that must come first

import argparse
import sys
import time

from tests.fuzz.run import SUBJECTS, attack

LONG = 4000


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("subjects", nargs="*", metavar="subject", help=f"{', '.join(SUBJECTS)} (default: all)")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--long", action="store_true", help=f"{LONG} cases of each subject")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    args = parser.parse_args(argv)
    if unknown := set(args.subjects) - set(SUBJECTS):
        parser.error(f"no such subject: {', '.join(sorted(unknown))}")
    failed = 0
    for subject in args.subjects or SUBJECTS:
        start = time.monotonic()
        try:
            tally = attack(subject, args.seed, LONG if args.long else args.cases, first=args.first)
        except AssertionError as error:
            failed += 1
            print(f"{subject}: FAILED\n{error}", flush=True)
            continue
        found = ", ".join(f"{count} {word}" for word, count in tally.most_common())
        print(f"{subject}: {tally.total()} cases in {time.monotonic() - start:.0f} s: {found}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
