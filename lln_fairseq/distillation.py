"""The second stage of a conversion: all layers of the linear encoder learn, end to end, to give the teacher's states.

The loss is ‖h - h'‖² / ‖h'‖², the mean over the layers, with h a layer's output over all tokens and h' the teacher's.
What one layer makes wrong is so mended by the next, which attention transfer (transfer.py) cannot do. The embeddings
and the heads stay the teacher's, and logits come near with the last layer's states. The teacher's softmax is lost.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lln_fairseq.transfer import Texts, decayed

WARMUP = 20  # updates


class Distillation:
    """Trains the layers of `model` with Adam; the second half of the steps goes down to a learning rate of 0."""

    def __init__(self, teacher: Any, model: Any, lr: float, steps: int, seed: int) -> None:
        """teacher, model: of our models, in evaluation mode and with the same sizes."""
        self.teacher, self.model, self.lr, self.steps, self.step = teacher, model, lr, steps, 0
        self.layers: nn.ModuleList = model.encoder.sentence_encoder.layers
        self.optimizer = torch.optim.Adam(self.layers.parameters(), lr=lr)
        self.generator = torch.Generator().manual_seed(seed)

    def train_step(self, texts: Texts, tokens: int, longest: int) -> list[float]:
        """One update with so many tokens in texts of mixed lengths. The relative squared error of each layer."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * min(decayed(self.step, self.steps), (self.step + 1) / WARMUP)
        batch = texts.mixed_batch(tokens, longest, self.generator)
        with torch.no_grad():
            wanted = hidden_states(self.teacher, batch)
        pairs = zip(hidden_states(self.model, batch), wanted, strict=True)
        errors = torch.stack([(ours - theirs).square().sum() / theirs.square().sum() for ours, theirs in pairs])
        self.optimizer.zero_grad()
        errors.mean().backward()
        self.optimizer.step()
        self.step += 1
        return errors.tolist()

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step, "layers": self.layers.state_dict(), "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.layers.load_state_dict(state["layers"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])


def hidden_states(model: Any, tokens: Tensor) -> list[Tensor]:
    """The output of each layer, (N, B, C) as fairseq has them, for tokens (B, N)."""
    tokens = tokens.to(next(model.parameters()).device)
    states = model(src_tokens=tokens, features_only=True, return_all_hiddens=True)[1]["inner_states"]
    return states[1:]  # the first are the embeddings
