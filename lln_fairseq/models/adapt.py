"""Parameters of another RoBERTa for a model of ours: other lengths, other attentions."""

import logging

import torch
from torch import Tensor, nn

POSITIONS = "encoder.sentence_encoder.embed_positions.weight"
ATTENTION_PARAMETERS = ".self_attn.attention."  # parameters that belong to an attention and not to RoBERTa

logger = logging.getLogger(__name__)


def adapt(state: dict[str, Tensor], model: nn.Module) -> None:
    """Makes the parameters of another RoBERTa fit: positional table resized, the attention's own parameters left out
    or taken from the new model. In place; `state` has the names of the encoder that RoBERTa uses today."""
    own = model.state_dict()
    if POSITIONS in state and POSITIONS in own and state[POSITIONS].shape != own[POSITIONS].shape:
        rows, padding = own[POSITIONS].shape[0], model.encoder.sentence_encoder.padding_idx
        logger.warning(f"positional table of {state[POSITIONS].shape[0]} rows fitted to {rows}")
        state[POSITIONS] = resize_positions(state[POSITIONS], rows, padding)
    for key in [key for key in state if ATTENTION_PARAMETERS in key and key not in own]:
        logger.warning(f"{key} of the checkpoint is left out: this attention has no such parameter")
        del state[key]
    for key in [key for key in own if ATTENTION_PARAMETERS in key and key not in state]:
        logger.warning(f"{key} is not in the checkpoint and starts from its initial value")
        state[key] = own[key]


def resize_positions(table: Tensor, rows: int, padding_idx: int) -> Tensor:
    """A positional table (rows', C) with `rows` rows: cut, or repeated from its start as often as needed.

    fairseq's table begins with padding_idx + 1 rows that belong to no position; they stay.
    """
    offset = padding_idx + 1
    positions, wanted = table[offset:], rows - offset
    repeats = -(-wanted // positions.shape[0])
    return torch.cat([table[:offset], positions.repeat(repeats, 1)[:wanted]])
