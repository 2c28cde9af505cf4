"""The search for a faster model, from the rows to the choice. Every step is done once, see `Journal`."""

import argparse
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lln_fairseq.conversion.convert import CHECKPOINT
from lln_fairseq.conversion.export import export
from lln_fairseq.conversion.to_hugging_face import NotExportableError
from lln_fairseq.inference.text_model import load_text_model
from lln_fairseq.ops.backends import cpu
from lln_fairseq.ops.formula import DIAG, Spec
from lln_fairseq.speedup.candidates import Candidate, Linearizer, candidates_for, parse_candidate
from lln_fairseq.speedup.journal import Journal
from lln_fairseq.speedup.original import UNCHANGED, Original
from lln_fairseq.speedup.quality import Cosine, rows_needed
from lln_fairseq.speedup.rows import Rows
from lln_fairseq.speedup.runtimes import (
    ONNX,
    ONNX_INT8,
    OWN,
    TRANSFORMERS,
    Outputs,
    half_precisions,
    load_served,
    memory_of,
    own_runtime,
)
from lln_fairseq.terminal import print_status

EXPORTED = "exported"
STEPS = 400  # of each stage, if there is time
FEW_STEPS = 50  # fewer are not worth the time
TRAINED = 3  # candidates, at most
WORTH = 1.1  # a model must be this many times as fast
ONNX_SECONDS = 240  # that must be left to write and check the ONNX files


@dataclass
class Trial:
    """A candidate that was swapped in, and what that took.

    Attributes:
        candidate: the attention.
        distance: of its outputs from the original's, before any training; see `Linearizer.distance`.
        step_seconds: of a step of the stages "transfer" and "distillation".
        seconds: that swapping, exporting and measuring it took.
        steps: of each stage, once it is trained.
        layers: that have softmax, once it is trained.
    """

    candidate: Candidate
    distance: float
    step_seconds: dict[str, float]
    seconds: float
    steps: int | None = None
    layers: list[int] | None = None


@dataclass
class Entry:
    """A model in a runtime.

    Attributes:
        model: UNCHANGED, or the name of a candidate.
        runtime: one of runtimes.py.
        directory: the directory to serve, or a checkpoint for OWN.
        milliseconds: per text.
        memory: of a call with the longest text, in MB.
        score, drop: of 100 points on the validation rows, and how many fewer than the original; None without a score.
        trial: of its candidate, the same in every runtime; None for the unchanged model.
    """

    model: str
    runtime: str
    directory: Path
    milliseconds: float
    memory: float | None
    score: float | None = None
    drop: float | None = None
    trial: Trial | None = None

    @property
    def name(self) -> str:
        return f"{self.model}, {self.runtime}"


def _swap_of(candidate: Candidate) -> str:
    """Return the name of a candidate's trial in the journal."""
    return f"swap of {candidate.name}"


class Search:
    """A search for a faster model. `run` returns the choice.

    Attributes:
        original: what is made faster.
        notes: sentences for the report.
        entries: all models that were timed, the original first.
        trials: the candidates that were swapped in.
        plan: the steps of each stage, by the name of a candidate.
    """

    def __init__(self, args: argparse.Namespace, journal: Journal, rows: Rows) -> None:
        self.args = args
        self.journal = journal
        self.folder = journal.folder
        self.original = Original(args, journal, rows)
        self.notes = self.original.notes
        original = self.original
        self.entries = [Entry(UNCHANGED, TRANSFORMERS, original.directory, original.milliseconds, original.memory)]
        self.entries[0].drop = 0.0
        train = [original.samples[number] for number in original.splits["train"]]
        self.linearizer = Linearizer(original.teacher, original.checkpoint, train, args.seed)
        self.trials: dict[Candidate, Trial] = {}
        self.plan: dict[str, int] = {}

    def run(self) -> Entry | None:
        """Try other runtimes, then other attentions, and return the result of `choose`."""
        self.try_runtimes()
        self.try_attentions()
        return self.choose()

    def left(self) -> float:
        """Return the seconds that are left of --minutes after this and earlier runs; they can be negative."""
        return 60 * self.args.minutes - self.journal.seconds()

    def score(self, entry: Entry) -> None:
        """Set the score and the drop of an entry on the validation rows."""
        quality = self.original.quality("valid")

        def compute() -> dict[str, float]:
            outputs = self.original.outputs_of(entry.name, self.load(entry), "valid")
            return {"score": quality.score(outputs), "drop": quality.drop(outputs)}

        scores = self.journal.once(f"score of {entry.name}", compute)
        entry.score = scores["score"]
        entry.drop = scores["drop"]
        print_status(f"{entry.name}: {entry.milliseconds:.1f} ms, {quality.name} {entry.score:.1f} on validation rows")

    def is_good(self, entry: Entry) -> bool:
        """Return True if an entry was scored and loses no more than it may on the validation rows."""
        return entry.drop is not None and entry.drop <= self.original.quality("valid").limit

    def load(self, entry: Entry) -> Outputs:
        """Load the model of an entry, and return the function from rows to its outputs."""
        if entry.runtime == OWN:
            return own_runtime(load_text_model(entry.directory))
        return load_served(entry.directory, entry.runtime, self.original.longest, self.original.is_encoder)

    # The same attention in another runtime

    def try_runtimes(self) -> None:
        """Time the unchanged model in other runtimes and precisions, and score it where it is faster."""
        self.entries[0].score = self.original.quality("valid").score(self.original.quality("valid").original)
        directory = self.folder / UNCHANGED
        reason = self.journal.once("no ONNX", self._reason_against_onnx)
        runtimes = half_precisions()
        if reason:
            self.notes.append(f"ONNX was not tried: {reason}.")
        else:
            runtimes += [ONNX, ONNX_INT8]
        if runtimes and not directory.exists():
            print_status("exporting the unchanged model")
            export(self.original.checkpoint, directory, onnx=not reason, int8=not reason)
        for entry in self.time_runtimes(UNCHANGED, directory, runtimes):
            if self.is_faster(entry):
                self.score(entry)

    def _reason_against_onnx(self) -> str:
        """Return why the unchanged model is not tried in ONNX, or ""."""
        if torch.cuda.is_available():
            return "there is a GPU"
        if not all(find_spec(package) for package in ("onnxruntime", "onnxscript")):
            return "`pip install -e '.[onnx]'` installs it"
        if self.left() < ONNX_SECONDS:
            return "it needs about four minutes of --minutes"
        return ""

    def time_runtimes(self, name: str, directory: Path, runtimes: Sequence[str]) -> list[Entry]:
        """Return a model in each runtime as entries, which are also added to `entries`, and time them."""
        entries = []
        for runtime in runtimes:
            entry = Entry(name, runtime, directory, 0.0, None)
            measured = self.journal.once(f"times of {entry.name}", partial(self._time_entry, entry))
            entry.milliseconds, entry.memory = measured
            entries.append(entry)
        self.entries += entries
        return entries

    def _time_entry(self, entry: Entry) -> tuple[float, float | None]:
        """Return the milliseconds per text of an entry and its memory in MB, None if unknown."""
        model = self.load(entry)
        memory = memory_of(model, self.original.longest_text)
        return self.original.time_beside(model), memory

    def is_faster(self, entry: Entry) -> bool:
        """Return True if an entry takes at most 1 / WORTH of the time of the original and of every good entry."""
        good = [self.original.milliseconds, *(other.milliseconds for other in self.entries if self.is_good(other))]
        return WORTH * entry.milliseconds <= min(good)

    # Other attentions

    def try_attentions(self) -> None:
        """Time the candidates, train and score the nearest that are faster, and call `restore_softmax`."""
        if self.args.attentions:
            candidates = [parse_candidate(spec) for spec in self.args.attentions]
        else:
            candidates = candidates_for(self.original.lengths, self.original.first_lengths)
        if candidates and not torch.cuda.is_available():
            attention = self.original.teacher.model.encoder.sentence_encoder.layers[0].self_attn
            reason = cpu.reason_against(Spec(DIAG), torch.empty(1, 1, 1, attention.head_dim))
            if reason is not None:
                self.notes.append(f"The other attentions would be about twice as fast with our kernels. {reason}")
        for candidate in candidates:
            if self.has_time(candidate):
                self.swap(candidate)
        selected = self.select(list(self.trials))
        for candidate in selected:
            self.train(candidate)
        if selected and not self.args.attentions:
            self.restore_softmax(selected)

    def has_time(self, candidate: Candidate) -> bool:
        """Return True if there is as much time as the slowest swap took, or this one is done. Otherwise add a note."""
        slowest = max((trial.seconds for trial in self.trials.values()), default=0.0)
        if _swap_of(candidate) in self.journal.values or self.left() >= slowest:
            return True
        self.notes.append(f"There was no time for {candidate.name}. More --minutes would allow it.")
        return False

    def swap(self, candidate: Candidate) -> Entry:
        """Give a copy of the original the new attention, export it untrained, time it, and return its fastest entry."""
        folder = self.folder / candidate.folder

        def compute() -> dict[str, Any]:
            start = self.journal.seconds()
            print_status(f"{candidate.name}: swapped in without training")
            shutil.rmtree(folder, ignore_errors=True)
            result = self.linearizer.swap(candidate, folder)
            result["runtimes"] = [TRANSFORMERS, *half_precisions(), *([ONNX] if self.args.onnx else [])]
            result["reason"] = ""
            try:
                self._export(folder)
            except NotExportableError as error:
                result["runtimes"] = [OWN]
                result["reason"] = str(error)
            result["seconds"] = self.journal.seconds() - start
            return result

        result = self.journal.once(_swap_of(candidate), compute)
        directory = folder / EXPORTED
        if result["reason"]:
            directory = folder / CHECKPOINT
            self.notes.append(f"{candidate.name} is never chosen: {result['reason']}")
        self.trials[candidate] = Trial(candidate, result["distance"], result["step_seconds"], result["seconds"])
        entries = self.time_runtimes(candidate.name, directory, result["runtimes"])
        for entry in entries:
            entry.trial = self.trials[candidate]
        fastest = min(entries, key=lambda entry: entry.milliseconds)
        print_status(f"{fastest.name}: {fastest.milliseconds:.1f} ms")
        return fastest

    def _export(self, folder: Path) -> None:
        """Export FOLDER/model.pt to FOLDER/exported."""
        shutil.rmtree(folder / EXPORTED, ignore_errors=True)
        export(folder / CHECKPOINT, folder / EXPORTED, onnx=self.args.onnx)

    def entries_of(self, candidate: Candidate) -> list[Entry]:
        return [entry for entry in self.entries if entry.model == candidate.name]

    def fastest_of(self, candidate: Candidate) -> Entry:
        return min(self.entries_of(candidate), key=lambda entry: entry.milliseconds)

    def training_seconds(self, candidate: Candidate) -> tuple[float, float]:
        """Estimate the time of STEPS steps of both stages together, and that of exporting and scoring the candidate.

        The candidate must have been swapped in, which times its steps.
        """
        trial = self.trials[candidate]
        scoring = self.fastest_of(candidate).milliseconds / 1000 * len(self.original.scored["valid"])
        return STEPS * sum(trial.step_seconds.values()), trial.seconds + scoring

    def steps_for(self, candidates: Sequence[Candidate]) -> int:
        """Return how many steps of each stage there is time for, if all of these are trained; at most STEPS."""
        costs = [self.training_seconds(candidate) for candidate in candidates]
        reporting = 2 * self.original.milliseconds / 1000 * len(self.original.scored["test"]) + 30
        left = self.left() - reporting - sum(fixed for _, fixed in costs)
        return int(np.clip(STEPS * left / sum(training for training, _ in costs), 0, STEPS))

    def select(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates to train, the nearest to the original first, and set `plan` to the steps of each.

        Candidates that are not faster, or for which fewer than FEW_STEPS are left, are left out.
        """
        if self.args.attentions:
            faster = list(candidates)
        else:
            faster = [candidate for candidate in candidates if self.is_faster(self.fastest_of(candidate))]
            faster.sort(key=lambda candidate: self.trials[candidate].distance)
            faster = faster[:TRAINED]

        def plan() -> dict[str, int]:
            chosen = list(faster)
            while len(chosen) > 1 and not self.args.attentions and self.steps_for(chosen) < STEPS / 2:
                chosen.pop()
            steps = self.steps_for(chosen) if chosen else 0
            return {candidate.name: steps for candidate in chosen if steps >= FEW_STEPS}

        self.plan = self.journal.once("plan", plan)
        left_out = [candidate.name for candidate in faster if candidate.name not in self.plan]
        if left_out:
            self.notes.append(f"There was no time to train: {', '.join(left_out)}. More --minutes would allow it.")
        return [candidate for candidate in faster if candidate.name in self.plan]

    def train(self, candidate: Candidate) -> Entry:
        """Train a candidate, and score and return its fastest entry. The times stay those of the untrained model."""
        folder = self.folder / candidate.folder
        steps = self.plan[candidate.name]

        def compute() -> list[int]:
            print_status(f"{candidate.name}: training, {steps} steps")
            stages = {"transfer": steps, "distillation": steps}
            layers = self.linearizer.train(candidate, stages, folder, on_save=self.journal.save)
            if self.fastest_of(candidate).runtime != OWN:
                self._export(folder)
            return layers

        self.trials[candidate].layers = self.journal.once(f"training of {candidate.name}", compute)
        self.trials[candidate].steps = steps
        entry = self.fastest_of(candidate)
        self.score(entry)
        return entry

    def restore_softmax(self, trained: Sequence[Candidate]) -> None:
        """If no trained candidate is good enough, train the one with the least drop again, with softmax in one layer.

        If that is not good enough either, train it with two. Stop if it is no longer faster, or if there is no time.
        """
        plain = [candidate for candidate in trained if not candidate.num_softmax_layers]
        if not plain or any(self.is_good(self.fastest_of(candidate)) for candidate in trained):
            return
        best = min(plain, key=lambda candidate: self.fastest_of(candidate).drop or 0.0)
        for count in (1, 2):
            candidate = best.with_softmax(count)
            if candidate in trained:
                continue
            if not self.has_time(candidate):
                return
            entry = self.swap(candidate)
            if not self.is_faster(entry):
                return
            steps = self.journal.once(f"plan of {candidate.name}", partial(self.steps_for, [candidate]))
            if steps < FEW_STEPS:
                self.notes.append(f"There was no time to train: {candidate.name}. More --minutes would allow it.")
                return
            self.plan[candidate.name] = steps
            if self.is_good(self.train(candidate)):
                return

    # The choice

    def choose(self) -> Entry | None:
        """Return the fastest entry that is good enough on the validation rows and was exported, or None."""
        good = [entry for entry in self.entries[1:] if entry.runtime != OWN and self.is_good(entry)]
        faster = [entry for entry in good if WORTH * entry.milliseconds <= self.original.milliseconds]
        return min(faster, key=lambda entry: entry.milliseconds, default=None)

    def report_on(self, entry: Entry) -> dict[str, Any]:
        """Return an entry's scores on the test rows, the interval of its drop, and its times beside the original's."""
        model = self.load(entry)
        count = self.journal.once("test rows", partial(self._count_test_rows, entry, model))
        self.original.scored["test"] = self.original.first_rows("test", count)
        quality = self.original.quality("test")
        outputs = self.original.outputs_of(entry.name, model, "test")

        def compute() -> dict[str, Any]:
            times = self.original.time_interleaved(model)
            return {name: statistics.median(passed) for name, passed in times.items()}

        milliseconds = self.journal.once("final times", compute)
        result = {
            "milliseconds": milliseconds,
            "times_as_fast": milliseconds["original"] / milliseconds["model"],
            "metric": quality.name,
            "rows": len(outputs),
            "original": quality.score(quality.original),
            "score": quality.score(outputs),
            "drop": quality.drop(outputs),
            "half_width": quality.half_width(outputs),
            "limit": quality.limit,
        }
        if isinstance(quality, Cosine):
            result["same_neighbor"] = quality.same_neighbor(outputs)
        return result

    def _count_test_rows(self, entry: Entry, model: Outputs) -> int:
        """Return how many test rows to score: enough to tell a drop of the limit from none, if there is time.

        How many that are is estimated from the validation rows. At least the rows in `original.scored` are scored, for
        which `steps_for` kept time.
        """
        quality = self.original.quality("valid")
        valid = self.original.outputs_of(entry.name, model, "valid")
        enough = len(self.original.splits["test"])
        if quality.limit > 0:
            enough = min(enough, rows_needed(len(valid), quality.half_width(valid), quality.limit))
        seconds = (self.original.milliseconds + entry.milliseconds) / 1000
        in_time = int(self.left() / seconds)
        return max(len(self.original.scored["test"]), min(enough, in_time))
