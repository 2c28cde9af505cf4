"""Adapt the parameters of another RoBERTa to a model with another length or another attention."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lln_fairseq.ops.rotary import BASE, extend_base

EMBEDDING = "encoder.sentence_encoder.embed_tokens.weight"
POSITIONS = "encoder.sentence_encoder.embed_positions.weight"
ATTENTION_PARAMETERS = ".self_attn.attention."  # part of the names of parameters that belong to an attention
SECOND_TEXT = "encoder.sentence_encoder.second_text_embedding"  # only with BERT's form of pairs

logger = logging.getLogger(__name__)


def adapt_state_dict(state: dict[str, Tensor], model: nn.Module) -> None:
    """Adapt the parameters of another RoBERTa in place, so that a model can load them. Log a warning for every change.

    The table of position embeddings is resized to the size of the model's table. Parameters of an attention, and the
    embedding of the second text, are removed if the model does not have them. Those of the model are added with their
    current values if `state` lacks them. Nothing else is changed or checked. `state` must have the names that
    fairseq's RoBERTa uses today.
    """
    model_state = model.state_dict()
    if POSITIONS in state and POSITIONS in model_state and len(state[POSITIONS]) != len(model_state[POSITIONS]):
        rows = len(model_state[POSITIONS])
        logger.warning(f"the table of position embeddings is resized from {len(state[POSITIONS])} rows to {rows}")
        padding_idx = model.encoder.sentence_encoder.padding_idx
        state[POSITIONS] = resize_positions(state[POSITIONS], rows, padding_idx, model.args.rotary)
    for key in list(state):
        if _is_optional(key) and key not in model_state:
            logger.warning(f"{key} of the checkpoint is left out: this model has no such parameter")
            del state[key]
    for key, value in model_state.items():
        if _is_optional(key) and key not in state:
            logger.warning(f"{key} is not in the checkpoint and keeps its initial value")
            state[key] = value


def _is_optional(key: str) -> bool:
    """Return True for a parameter that depends on the attention or on the form of pairs."""
    return ATTENTION_PARAMETERS in key or key == SECOND_TEXT


def resize_positions(table: Tensor, rows: int, padding_idx: int, rotary: bool = False) -> Tensor:
    """Return a table of position embeddings (rows, C) with another number of rows.

    The first padding_idx + 1 rows, which as in fairseq belong to no position, are kept. A shorter table has the first
    positions. A longer table repeats the positions from the first to the last, as often as needed. If the model also
    has rotary positions, every new row is the mean of the positions instead: the rotation alone then tells the order.
    """
    num_special = padding_idx + 1
    positions = table[num_special:]
    num_positions = rows - num_special
    if rotary and num_positions > len(positions):
        new_positions = positions.mean(dim=0).expand(num_positions - len(positions), -1)
        return torch.cat([table, new_positions])
    repeats = -(-num_positions // positions.shape[0])
    return torch.cat([table[:num_special], positions.repeat(repeats, 1)[:num_positions]])


def extended_rotary_base(options: Mapping[str, Any], positions: int) -> float:
    """Return the base of rotary positions with which a model takes texts of `positions` tokens.

    `options` are those of the model before, whose `max_positions` is the length that it was trained with.
    """
    head_dim = options["encoder_embed_dim"] // options["encoder_attention_heads"]
    return extend_base(options.get("rotary_base", BASE), head_dim, positions / options["max_positions"])
