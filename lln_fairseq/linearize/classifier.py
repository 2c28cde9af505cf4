"""The linearization of a classifier, or of a regression, on the rows of its task."""

import argparse
from typing import Any

import numpy as np

from lln_fairseq.errors import UserError
from lln_fairseq.linearize.dev_scores import DevScores
from lln_fairseq.linearize.progress import Progress
from lln_fairseq.linearize.softmax_layers import Distance, classifier_distance, layer_list, mixed_attentions
from lln_fairseq.linearize.stages import Linearization
from lln_fairseq.linearize.task_rows import TaskRows
from lln_fairseq.models import LLNRobertaModel


class ClassifierLinearization(Linearization):
    """Trains on the rows of the split "train", and prints the scores of each stage on those of "valid".

    Scores are saved in OUT/linearize.pt with the progress, because on a CPU they take longer than the training.
    """

    def __init__(self, args: argparse.Namespace, progress: Progress, model: LLNRobertaModel, task: Any) -> None:
        """Load the rows of `task`, the teacher's task, and print a summary of the run."""
        if args.evaluate_texts is not None:
            raise UserError("--evaluate-texts is for plain text as DATA: give --evaluate-rows for the rows of a task")
        max_positions = min(model.max_positions(), task.max_positions())
        super().__init__(args, progress, model, max_positions)
        self.task = task
        self.train_rows = TaskRows(task, "train", self.longest)
        valid_rows = TaskRows(task, "valid", max_positions)
        self.print_summary(f"{len(self.train_rows):,} rows")
        too_long = np.count_nonzero(self.train_rows.lengths > self.longest)
        if too_long:
            print(f"left out of the training: {too_long} rows of more than {self.longest} tokens")
        self.scores = DevScores(model, task, valid_rows, args.evaluate_rows, progress.scores)

    def train(self) -> None:
        students = self.students
        self.scores.report("teacher")
        stage = f"{self.args.attention} swapped in without training"
        self.scores.report(stage, students.students)
        if students.steps:
            self.progress.train("transfer", students, self.train_rows, self.longest)
            stage = "after the transfer"
            self.scores.report(stage, students.students)
        for name, branch in students.branches().items():
            self.scores.report(f"{stage}, {name}", branch)
        self.progress.save_if_trained()

        if self.args.softmax_layers:
            layers = self.choose_softmax_layers()
            self.scores.report(f"with softmax in {layer_list(layers)}", mixed_attentions(students, layers))
            self.progress.save_if_trained()

        distillation = self.fold()
        if distillation is not None:
            self.progress.train("distillation", distillation, self.train_rows, self.longest)
            self.scores.report("after the distillation")
            self.progress.save_if_trained()

    def distance(self) -> Distance:
        return classifier_distance(self.model, self.task, self.train_rows)
