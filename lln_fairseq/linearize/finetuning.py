"""Fine-tuning, the last stage of linearize: train the whole linear classifier with labels and the teacher's outputs.

The loss is 0.3 · CE + 0.7 · T² · KL(teacher ‖ student). CE is the cross-entropy with the labels. The KL divergence is
that of the class probabilities at the temperature T = 2. For a regression, the loss is the mean squared error with the
labels alone. Dropout is off.
"""

from typing import Any

import torch
import torch.nn.functional as F
from fairseq import utils
from torch import Tensor

from lln_fairseq.linearize.attention_transfer import LayerwiseTrainer
from lln_fairseq.linearize.task_rows import TaskRows

LABEL_WEIGHT = 0.3
TEMPERATURE = 2.0


class Finetuning(LayerwiseTrainer):
    """Trains all parameters of the linear classifier `model`. There is one loss for the whole model."""

    warmup = 20

    def __init__(self, teacher: Any, model: Any, task: Any, lr: float, steps: int, seed: int) -> None:
        """Create the optimizer.

        Args:
            teacher: the softmax classifier
            model: the linear classifier of the same task; both are in evaluation mode
            task: their task
            lr: the maximum learning rate
            steps: the number of updates
            seed: the seed of the random batches
        """
        super().__init__(model, lr, steps, seed)
        self.teacher = teacher
        self.model = model
        self.head = task.cfg.classification_head_name
        self.is_regression = task.cfg.regression_target

    def losses(self, texts: TaskRows, tokens: int, longest: int) -> list[Tensor]:
        """Draw a batch of rows and return its loss, as a list of one scalar. Arguments are as for `train_step`."""
        device = next(self.model.parameters()).device
        sample = utils.apply_to_sample(lambda value: value.to(device), texts.draw(tokens, longest, self.generator))
        targets = sample["target"].view(-1)
        logits = self._logits(self.model, sample)
        if self.is_regression:
            return [F.mse_loss(logits.view(-1), targets.float())]
        with torch.no_grad():
            teacher_logits = self._logits(self.teacher, sample)
        label_loss = F.cross_entropy(logits, targets)
        teacher_loss = kl_divergence(teacher_logits / TEMPERATURE, logits / TEMPERATURE)
        return [LABEL_WEIGHT * label_loss + (1 - LABEL_WEIGHT) * TEMPERATURE**2 * teacher_loss]

    def scalars(self, means: list[float]) -> dict[str, float]:
        """Return the loss to show in TensorBoard: the only entry of `means`, under the name "loss"."""
        return {"loss": means[0]}

    def _logits(self, model: Any, sample: dict[str, Any]) -> Tensor:
        """Return the outputs of the classification head, float32 (B, classes)."""
        logits, _ = model(**sample["net_input"], features_only=True, classification_head_name=self.head)
        return logits.float()


def kl_divergence(teacher_logits: Tensor, logits: Tensor) -> Tensor:
    """Compute KL(teacher ‖ student) of the class probabilities, averaged over the rows.

    Args:
        teacher_logits, logits: the teacher's and the student's logits (rows, classes)

    Returns: a scalar tensor
    """
    return F.kl_div(
        logits.log_softmax(dim=-1), teacher_logits.log_softmax(dim=-1), reduction="batchmean", log_target=True
    )
