"""python -m tests.kill [--kills N] [--seed S] [SUBJECT ...]"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # of the process that is forked; before torch is imported

import argparse
import random
import shutil
import tempfile
import time
from pathlib import Path

from tests.kill.attack import attack, undisturbed
from tests.kill.subjects import SUBJECTS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.kill", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="at least so many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("subjects", nargs="*", default=list(SUBJECTS), metavar="SUBJECT", help=f"of {list(SUBJECTS)}")
    args = parser.parse_args()
    begin, kills, cases = time.monotonic(), dict.fromkeys(args.subjects, 0), dict.fromkeys(args.subjects, 0)
    with tempfile.TemporaryDirectory() as folder:
        subjects = {name: SUBJECTS[name]() for name in args.subjects}
        expected = {name: undisturbed(subject, Path(folder, name)) for name, subject in subjects.items()}
        while sum(kills.values()) < args.kills:
            name = min(kills, key=kills.get)
            case = Path(folder, f"{name}-{cases[name]}")
            rng = random.Random(f"{args.seed} {case.name}")
            try:
                kills[name] += attack(subjects[name], expected[name], rng, case)
            except AssertionError as error:
                raise SystemExit(f"{case.name}, seed {args.seed}: {error}") from None
            cases[name] += 1
            shutil.rmtree(case, ignore_errors=True)
    for name in args.subjects:
        print(f"{name:11} {expected[name].seconds:5.1f} s undisturbed, {kills[name]:4} kills in {cases[name]:4} cases")
    print(f"{sum(kills.values())} kills, no difference, {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
