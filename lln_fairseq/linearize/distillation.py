"""Distillation, the second stage of linearize: train all layers of the linear encoder to match the teacher's states.

The loss of a layer is ‖h - h'‖² / ‖h'‖². Here h is the layer's output for all tokens that are not padding, and h' is
the output of the teacher's layer. The mean over the layers is minimized. All layers are trained end to end: unlike in
attention transfer, a layer can correct errors of the layers below it. The embeddings and the heads stay unchanged. All
weights of the layers change, so that switching back to softmax attention no longer gives the teacher's outputs.
"""

from typing import Any

import torch
from torch import Tensor

from lln_fairseq.linearize.attention_transfer import LayerwiseTrainer


class Distillation(LayerwiseTrainer):
    """Trains all layers of `model` to match the hidden states of `teacher`."""

    warmup = 20

    def __init__(self, teacher: Any, model: Any, lr: float, steps: int, seed: int) -> None:
        """Create the optimizer for all layers of `model`; both models are in evaluation mode."""
        super().__init__(model.encoder.sentence_encoder.layers, lr, steps, seed)
        self.teacher = teacher
        self.model = model

    def errors(self, tokens: Tensor) -> list[Tensor]:
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
    """Return the output of each layer for ids (B, N), without the embeddings, in fairseq's layout (N, B, C)."""
    device = next(model.parameters()).device
    _, extra = model(src_tokens=tokens.to(device), features_only=True, return_all_hiddens=True)
    states = extra["inner_states"]
    return states[1:]  # states[0] is the output of the embeddings
