"""Reports of linearize after each of its stages: on held-out texts, or on the dev rows of a classifier's task.

Both classes have the same methods, which are called in the order of their definitions. A method raises UserError if it
finds that a stage has diverged.
"""

from collections.abc import Sequence

from torch import nn

from lln_fairseq.linearize.dev_scores import DevScores
from lln_fairseq.linearize.layerwise import HeldOutSet, Students
from lln_fairseq.linearize.progress import assert_finite


def layer_list(layers: list[int]) -> str:
    """Return the numbers of layers as text: "layers 1, 2"."""
    numbers = ", ".join(str(layer) for layer in layers)
    return f"layer {numbers}" if len(layers) == 1 else f"layers {numbers}"


class HeldOutReport:
    """Reports how close the model is to the teacher on held-out texts."""

    def __init__(self, held_out: list[HeldOutSet]) -> None:
        self.held_out = held_out

    def before_transfer(self, students: Students) -> None:
        """Measure the students before their training, in which the attention is only swapped in."""
        self.quality_before = [texts.evaluate(students) for texts in self.held_out]

    def after_transfer(self, students: Students) -> None:
        """Report the students after their training, and each branch of a hybrid attention on its own."""
        after = [texts.evaluate(students) for texts in self.held_out]
        for quality in after:
            assert_finite(quality.errors, "transfer", "on held-out texts")
        for texts, start, end in zip(self.held_out, self.quality_before, after, strict=True):
            print(f"held-out texts of {texts.length} tokens, compared with the teacher: before -> after the transfer")
            print(f"  cosine of the texts' vectors    {start.cosine:.3f} -> {end.cosine:.3f}")
            print(f"  same nearest text               {start.same_neighbor:.2f} -> {end.same_neighbor:.2f}")
            for layer, (start_error, end_error) in enumerate(zip(start.errors, end.errors, strict=True)):
                print(f"  relative error of layer {layer:2d}       {start_error:.3f} -> {end_error:.3f}")
            for name, attentions in students.branches().items():
                cosine, same_neighbor = texts.similarity(attentions)
                print(f"  {name:12s} cosine {cosine:.3f}, same nearest text {same_neighbor:.2f}")

    def with_softmax_layers(self, attentions: Sequence[nn.Module], softmax_layers: list[int]) -> None:
        """Report the attentions of all layers after softmax has been restored in some of them."""
        print(f"with softmax in {layer_list(softmax_layers)}")
        for texts in self.held_out:
            cosine, same_neighbor = texts.similarity(attentions)
            print(f"  {texts.length} tokens: cosine {cosine:.3f}, same nearest text {same_neighbor:.2f}")

    def before_stage(self) -> None:
        """Measure the folded model before a stage that trains it."""
        self.similarity_before = [texts.similarity() for texts in self.held_out]

    def after_stage(self, stage: str) -> None:
        """Report the model after the stage "distillation" or "fine-tuning"."""
        after = [texts.similarity() for texts in self.held_out]
        assert_finite([cosine for cosine, _ in after], stage, "on held-out texts")
        for texts, start, end in zip(self.held_out, self.similarity_before, after, strict=True):
            print(f"held-out texts of {texts.length} tokens, compared with the teacher: before -> after the {stage}")
            print(f"  cosine of the texts' vectors    {start[0]:.3f} -> {end[0]:.3f}")
            print(f"  same nearest text               {start[1]:.2f} -> {end[1]:.2f}")


class DevReport:
    """Reports the score of a classifier on the dev rows of its task."""

    def __init__(self, scores: DevScores, attention: str) -> None:
        """scores: those of the teacher's model; attention: the name of the students' attention"""
        self.scores = scores
        self.attention = attention

    def before_transfer(self, students: Students) -> None:
        self.scores.report("teacher")
        self.scores.report(f"{self.attention} swapped in without training", students.students)

    def after_transfer(self, students: Students) -> None:
        self.scores.report("after the transfer", students.students)
        for name, attentions in students.branches().items():
            self.scores.report(f"after the transfer, {name}", attentions)

    def with_softmax_layers(self, attentions: Sequence[nn.Module], softmax_layers: list[int]) -> None:
        self.scores.report(f"with softmax in {layer_list(softmax_layers)}", attentions)

    def before_stage(self) -> None:
        """Do nothing: the score is that of the stage before."""

    def after_stage(self, stage: str) -> None:
        self.scores.report(f"after the {stage}")
