"""The first stage of linearize: train a linear attention for each layer of a softmax encoder, and evaluate it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lln_fairseq.attention import build_attention
from lln_fairseq.checkpoints.pooling import Pooling, pool_hidden_states
from lln_fairseq.errors import UserError
from lln_fairseq.linearize.attention_transfer import (
    LayerwiseTrainer,
    Student,
    TokenStream,
    recorded,
    relative_error,
    similarity,
    swapped_attention,
)
from lln_fairseq.terminal import progress_bar

SEED = 5  # seed of the held-out texts
TOKENS_PER_BATCH = 4096  # tokens of a held-out batch, approximately


class Students(LayerwiseTrainer):
    """Trains one student per layer of a softmax encoder, all at the same time."""

    def __init__(
        self,
        model: Any,
        attention: str,
        options: dict[str, Any],
        lr: float,
        steps: int,
        seed: int,
    ) -> None:
        """Create the students on the model's device. The model, the teacher, stays unchanged until `fold`.

        `options` are those of the students' attention. `seed` determines the batches and the initial parameters, and
        torch's global generator is set to it.
        """
        self.model = model
        self.layers = list(model.encoder.sentence_encoder.layers)
        teacher = self.layers[0].self_attn
        sizes = dict(num_heads=teacher.num_heads, head_dim=teacher.head_dim, max_positions=model.max_positions())
        torch.manual_seed(seed)
        try:
            attentions = [build_attention(attention, **sizes, **options) for _ in self.layers]
        except ValueError as error:
            raise UserError(str(error)) from None
        for number, module in enumerate(attentions):
            module.set_depth(number, len(attentions))
        self.students = []
        for module in attentions:
            student = Student(module, teacher.num_heads, teacher.head_dim, teacher.rotary)
            self.students.append(student.eval())
        super().__init__(nn.ModuleList(self.students).to(teacher.q_proj.weight.device), lr, steps, seed)

    def errors(self, tokens: Tensor) -> list[Tensor]:
        """Return the relative squared error of each layer on ids (B, N), scalars with gradients for the students.

        Each student gets what the teacher's attention gets in its layer.
        """
        device = next(self.model.parameters()).device
        with torch.no_grad(), recorded(self.layers) as calls:
            self.model(src_tokens=tokens.to(device), features_only=True)
        errors = []
        for layer, call, student in zip(self.layers, calls, self.students, strict=True):
            out = student(call.q, call.k, call.v, call.context)
            errors.append(relative_error(out, call, layer.self_attn.out_proj.weight.detach()))
        return errors

    def branches(self) -> dict[str, list[Student]]:
        """Return, by the name of each branch of a hybrid attention, such as its LLN part, one student per layer for it.

        They share their parameters with the students that are trained. The result is empty for other attentions.
        """
        branches = {}
        for name in self.students[0].attention.branches():
            branches[name] = [student.with_attention(student.attention.branches()[name]) for student in self.students]
        return branches

    def fold(self, softmax_layers: Collection[int] = ()) -> None:
        """Turn the model, except for `softmax_layers`, into the linear one in place. Call it once, after the training.

        The reparameterizations are folded into the projections of the queries and keys, and the linear attentions
        replace the model's attentions.
        """
        for number, (layer, student) in enumerate(zip(self.layers, self.students, strict=True)):
            if number not in softmax_layers:
                student.alignment.fold(layer.self_attn.q_proj, layer.self_attn.k_proj)
                layer.self_attn.attention = student.attention


@dataclass
class Quality:
    """The distance between the students and the teacher on held-out texts."""

    errors: list[float]  # root of the mean relative squared error of each layer
    cosine: float  # mean cosine between the student's and the teacher's vector of a text
    same_neighbor: float  # fraction of the texts whose nearest neighbor is the same as with the teacher


class HeldOutSet:
    """Texts of one length that are not trained on, with the teacher's vector of each text.

    The vector of a text is the mean of the last layer's hidden states over its tokens.
    """

    def __init__(self, model: Any, texts: TokenStream, count: int, length: int) -> None:
        """Cut `count` texts of `length` tokens, and compute the teacher's vectors; call it before `Students.fold`."""
        self.model = model
        self.length = length
        self.layers = list(model.encoder.sentence_encoder.layers)
        try:
            tokens = texts.batch(count, length, torch.Generator().manual_seed(SEED))
        except ValueError as error:
            raise UserError(f"the held-out text is too short: {error}") from None
        self.batches = tokens.split(max(1, TOKENS_PER_BATCH // length))
        self.teacher = self._vectors("teacher")

    def evaluate(self, students: Students) -> Quality:
        """Compare the students with the teacher on these texts. `Students.fold` must not have been called yet."""
        batch_errors = []
        with torch.no_grad(), self._bar("errors of the layers") as bar:
            for tokens in self.batches:
                batch_errors.append(torch.stack(students.errors(tokens)))
                bar.update(len(tokens))
        errors = torch.stack(batch_errors).mean(dim=0)
        cosine, same_neighbor = self.similarity(students.students)
        return Quality(errors.sqrt().tolist(), cosine, same_neighbor)

    def similarity(self, attentions: Sequence[nn.Module] | None = None) -> tuple[float, float]:
        """Return `attention_transfer.similarity` of the model's vectors of the texts with the teacher's.

        `attentions`, one for each layer, take the place of the model's own.
        """
        if not attentions:
            return similarity(self._vectors(), self.teacher)
        with swapped_attention(self.layers, attentions):
            return similarity(self._vectors(), self.teacher)

    def _bar(self, what: str) -> tqdm:
        """Return a progress bar over the texts."""
        total = sum(len(tokens) for tokens in self.batches)
        return progress_bar(f"evaluation, {self.length} tokens: {what}", total, "text")

    @torch.no_grad()
    def _vectors(self, model_name: str = "student") -> Tensor:
        """Return the model's vectors of all texts, (texts, C). `model_name` is shown in the progress bar."""
        device = next(self.model.parameters()).device
        pad = self.model.encoder.dictionary.pad()
        vectors = []
        with self._bar(model_name) as bar:
            for batch in self.batches:
                tokens = batch.to(device)
                hidden, _ = self.model(src_tokens=tokens, features_only=True)
                vectors.append(pool_hidden_states(hidden, tokens.ne(pad), Pooling("mean")))
                bar.update(len(tokens))
        return torch.cat(vectors)
