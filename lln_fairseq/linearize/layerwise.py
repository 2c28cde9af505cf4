"""The students of a softmax encoder: a linear attention for each of its layers, trained side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lln_fairseq.attention import build_attention
from lln_fairseq.errors import InputError
from lln_fairseq.linearize.attention_transfer import (
    LayerwiseTrainer,
    Student,
    TokenStream,
    recorded,
    relative_error,
    similarity,
    swapped_attention,
)

SEED = 5  # of the held-out texts
ROWS = 4096  # tokens of a held-out batch, about


class Students(LayerwiseTrainer):
    """Trains one student a layer."""

    def __init__(self, model: Any, attention: str, options: dict[str, Any], lr: float, steps: int, seed: int) -> None:
        """Raises: InputError for options that the attention does not have."""
        self.model = model
        self.layers = list(model.encoder.sentence_encoder.layers)
        teacher = self.layers[0].self_attn
        sizes = dict(num_heads=teacher.num_heads, head_dim=teacher.head_dim, max_positions=model.max_positions())
        torch.manual_seed(seed)
        try:
            built = [build_attention(attention, **sizes, **options) for _ in self.layers]
        except ValueError as error:
            raise InputError(str(error)) from None
        for number, module in enumerate(built):
            module.place(number, len(built))
        heads = (teacher.num_heads, teacher.head_dim)
        self.students = [Student(module, *heads) for module in built]
        super().__init__(nn.ModuleList(self.students).to(teacher.q_proj.weight.device), lr, steps, seed)

    def errors(self, tokens: Tensor) -> list[Tensor]:
        """Return the `relative_error` of each layer, with the teacher's hidden states as its input."""
        device = next(self.model.parameters()).device
        with torch.no_grad(), recorded(self.layers) as calls:
            self.model(src_tokens=tokens.to(device), features_only=True)
        errors = []
        for layer, heads, student in zip(self.layers, calls, self.students, strict=True):
            out = student(heads.q, heads.k, heads.v, heads.mask)
            errors.append(relative_error(out, heads, layer.self_attn.out_proj.weight.detach()))
        return errors

    def branches(self) -> dict[str, list[Student]]:
        """Return, for each branch of a hybrid attention, students of all layers with only this branch."""
        branches = {}
        for name in self.students[0].attention.branches():
            branches[name] = [student.with_attention(student.attention.branches()[name]) for student in self.students]
        return branches

    def fold(self) -> dict[str, Tensor]:
        """Fold the alignments into the model, and return the parameters that changed or are new, by their names."""
        changed: dict[str, Tensor] = {}
        for number, (layer, student) in enumerate(zip(self.layers, self.students, strict=True)):
            student.alignment.fold(layer.self_attn.q_proj, layer.self_attn.k_proj)
            layer.self_attn.attention = student.attention
            prefix = f"encoder.sentence_encoder.layers.{number}.self_attn."
            parameters = layer.self_attn.state_dict(prefix=prefix)
            for name, parameter in parameters.items():
                if name.removeprefix(prefix).startswith(("q_proj.", "k_proj.", "attention.")):
                    changed[name] = parameter.cpu()
        return changed


@dataclass
class Quality:
    """How near the students come to the teacher on held-out texts."""

    errors: list[float]  # of each layer, as a root mean square relative to the teacher's output
    cosine: float  # between mean-pooled vectors of the last layer
    same_neighbour: float


class HeldOutSet:
    """Texts that no student was trained on, all of one length, and the teacher's vectors of them."""

    def __init__(self, model: Any, texts: TokenStream, count: int, length: int) -> None:
        """Raises: InputError where there is too little text."""
        self.model, self.length = model, length
        self.layers = list(model.encoder.sentence_encoder.layers)
        try:
            tokens = texts.batch(count, length, torch.Generator().manual_seed(SEED))
        except ValueError as error:
            raise InputError(f"the held-out text is too short: {error}") from None
        self.batches = tokens.split(max(1, ROWS // length))
        self.teacher = self._vectors()

    def evaluate(self, students: Students) -> Quality:
        """Return how close the students come to the teacher on these texts."""
        with torch.no_grad():
            errors = torch.stack([torch.stack(students.errors(tokens)) for tokens in self.batches]).mean(dim=0)
        return Quality(errors.sqrt().tolist(), *self.similarity(students.students))

    def similarity(self, attentions: Sequence[nn.Module] | None = None) -> tuple[float, float]:
        """Return the cosine and the fraction of same neighbours, of the model with these attentions or as it is."""
        with swapped_attention(self.layers, attentions or [layer.self_attn.attention for layer in self.layers]):
            return similarity(self._vectors(), self.teacher)

    @torch.no_grad()
    def _vectors(self) -> Tensor:
        device = next(self.model.parameters()).device
        pad, found = self.model.encoder.dictionary.pad(), []
        for tokens in self.batches:
            hidden, _ = self.model(src_tokens=tokens.to(device), features_only=True)
            padded = (tokens == pad).to(device)[..., None]
            found.append(hidden.masked_fill(padded, 0).sum(dim=1) / (~padded).sum(dim=1))
        return torch.cat(found)


def report(students: Students, held_out: list[HeldOutSet], before: list[Quality], after: list[Quality]) -> None:
    """Prints what the transfer has brought, and what each part of a mixed attention would do alone."""
    for texts, start, now in zip(held_out, before, after, strict=True):
        print(f"held-out texts of {texts.length} tokens, beside the teacher's: before -> after")
        print(f"  cosine of the texts' vectors    {start.cosine:.3f} -> {now.cosine:.3f}")
        print(f"  same nearest text               {start.same_neighbour:.2f} -> {now.same_neighbour:.2f}")
        for layer, errors in enumerate(zip(start.errors, now.errors, strict=True)):
            print(f"  relative error of layer {layer:2d}       {errors[0]:.3f} -> {errors[1]:.3f}")
        for name, attentions in students.branches().items():
            cosine, neighbour = texts.similarity(attentions)
            print(f"  {name:12s} cosine {cosine:.3f}, same nearest text {neighbour:.2f}")
