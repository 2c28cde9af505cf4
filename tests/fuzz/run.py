"""Runs random cases of a subject; a case can be had again by its seed and number.

A subject is a module of this folder with `attack(rng, folder) -> str`: one random case in an empty folder. It returns a
word for what happened and raises AssertionError where something is wrong: a silent difference, code that ran, an
exception that is not the line which a user gets.
"""

import importlib
import logging
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

SUBJECTS = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py") if path.stem != "run")
SUBJECTS = [subject for subject in SUBJECTS if not subject.startswith("test_")]


def attack(subject: str, seed: int, cases: int, seconds: float = float("inf"), first: int = 0) -> Counter:
    """How often each thing happened in so many cases, or in as many as fit into the time.

    Raises: AssertionError, with what it takes to see the case again, for the first that goes wrong.
    """
    module, tally, end = importlib.import_module(f"tests.fuzz.{subject}"), Counter(), time.monotonic() + seconds
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{subject}-"))
    logging.disable(logging.CRITICAL)
    try:
        for case in range(first, first + cases):
            shutil.rmtree(folder)
            folder.mkdir()
            try:
                tally[module.attack(random.Random(f"{seed}/{case}"), folder)] += 1
            except Exception as error:
                again = f"python -m tests.fuzz {subject} --seed {seed} --first {case} --cases 1"
                raise AssertionError(f"{type(error).__name__}: {error}\nsee it again: {again}") from error
            if time.monotonic() > end:
                break
    finally:
        logging.disable(logging.NOTSET)
        shutil.rmtree(folder, ignore_errors=True)
    return tally
