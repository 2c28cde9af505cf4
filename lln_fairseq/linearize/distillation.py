"""Distillation, the second stage of linearize: train all layers of the linear encoder to match the teacher's states.

The loss is ‖h - h'‖² / ‖h'‖², averaged over the layers, where h is a layer's output over all tokens that are not
padded and h' the teacher's. All layers are trained end to end, so that a layer can correct errors of the layers below
it, which attention transfer cannot do. The embeddings and the heads stay the teacher's. The projections change, so that
the result can no longer be set back to the teacher's softmax attention.
"""

from typing import Any

import torch
from torch import Tensor

from lln_fairseq.linearize.attention_transfer import LayerwiseTrainer


class Distillation(LayerwiseTrainer):
    """Trains all layers of `model` to match the hidden states of `teacher`."""

    warmup = 20

    def __init__(self, teacher: Any, model: Any, lr: float, steps: int, seed: int) -> None:
        """teacher, model: two RoBERTa models of this project with the same sizes, in evaluation mode."""
        super().__init__(model.encoder.sentence_encoder.layers, lr, steps, seed)
        self.teacher = teacher
        self.model = model

    def errors(self, tokens: Tensor) -> list[Tensor]:
        """Compute ‖h - h'‖² / ‖h'‖² of each layer on tokens (B, N), as scalars with gradients."""
        with torch.no_grad():
            teacher_states = hidden_states(self.teacher, tokens)
        states = hidden_states(self.model, tokens)
        padded = tokens.eq(self.model.encoder.dictionary.pad())
        if padded.any():
            mask = padded.mT[..., None].to(states[0].device)  # (N, B, 1)
            states = [state.masked_fill(mask, 0.0) for state in states]
            teacher_states = [state.masked_fill(mask, 0.0) for state in teacher_states]
        errors = []
        for state, teacher_state in zip(states, teacher_states, strict=True):
            errors.append((state - teacher_state).square().sum() / teacher_state.square().sum())
        return errors


def hidden_states(model: Any, tokens: Tensor) -> list[Tensor]:
    """Compute the output of each layer, (N, B, C) as in fairseq, for tokens (B, N); without the embeddings."""
    tokens = tokens.to(next(model.parameters()).device)
    states = model(src_tokens=tokens, features_only=True, return_all_hiddens=True)[1]["inner_states"]
    return states[1:]  # the first are the embeddings
