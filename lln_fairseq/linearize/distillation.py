"""The second stage of a conversion: all layers of the linear encoder learn, end to end, to give the teacher's states.

The loss is ‖h - h'‖² / ‖h'‖², the mean over the layers, with h a layer's output over all tokens and h' the teacher's.
What one layer makes wrong is so mended by the next, which attention transfer (transfer.py) cannot do. The embeddings
and the heads stay the teacher's, and logits come near with the last layer's states. The teacher's softmax is lost.
"""

from typing import Any

import torch
from torch import Tensor

from lln_fairseq.linearize.attention_transfer import LayerwiseTrainer


class Distillation(LayerwiseTrainer):
    """Trains the layers of `model`."""

    warmup = 20

    def __init__(self, teacher: Any, model: Any, lr: float, steps: int, seed: int) -> None:
        """teacher, model: of our models, in evaluation mode and with the same sizes."""
        super().__init__(model.encoder.sentence_encoder.layers, lr, steps, seed)
        self.teacher, self.model = teacher, model

    def errors(self, tokens: Tensor) -> list[Tensor]:
        with torch.no_grad():
            wanted = hidden_states(self.teacher, tokens)
        pairs = zip(hidden_states(self.model, tokens), wanted, strict=True)
        return [(ours - theirs).square().sum() / theirs.square().sum() for ours, theirs in pairs]


def hidden_states(model: Any, tokens: Tensor) -> list[Tensor]:
    """The output of each layer, (N, B, C) as fairseq has them, for tokens (B, N)."""
    tokens = tokens.to(next(model.parameters()).device)
    states = model(src_tokens=tokens, features_only=True, return_all_hiddens=True)[1]["inner_states"]
    return states[1:]  # the first are the embeddings
