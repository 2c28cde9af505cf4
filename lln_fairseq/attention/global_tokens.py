"""The option global_tokens: the first tokens of a sequence that attend to all tokens, and that all tokens attend to."""

import torch
from torch import Tensor

from lln_fairseq.attention.context import Context
from lln_fairseq.ops.formula import MAX_FIRST_SEGMENT

NO_GLOBAL_TOKENS = "none"
FIRST_SEGMENT = "first_segment"
VALUES = (
    f"{FIRST_SEGMENT} (the first text of a pair, at most {MAX_FIRST_SEGMENT} tokens), a number of tokens, or "
    f"{NO_GLOBAL_TOKENS}"
)


def parse_global_tokens(value: object) -> int | str | None:
    """Return None for "none", FIRST_SEGMENT, or the number of tokens. Raise ValueError if the option has another value.

    Benchmarks and configurations may state the number as an int.
    """
    text = str(value)
    if text == NO_GLOBAL_TOKENS:
        return None
    if text == FIRST_SEGMENT:
        return FIRST_SEGMENT
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise ValueError(f"global_tokens must be none, first_segment or a positive number, got '{text}'")


def select_global_tokens(setting: int | str | None, context: Context) -> tuple[int | Tensor | None, int | None]:
    """Return the number of global tokens that a result of `parse_global_tokens` selects, and an upper bound if known.

    A number and None stay as they are. FIRST_SEGMENT selects at most MAX_FIRST_SEGMENT tokens of each first segment,
    int64 (B,), and raises ValueError if the context has no lengths of first segments.
    """
    if not isinstance(setting, str):
        return setting, None
    if context.first_lengths is None:
        raise ValueError(
            f"global_tokens={setting} needs the lengths of the first segments: pass Context(first_lengths=...), as the "
            "encoder does"
        )
    bound = context.max_first_length
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        bound = MAX_FIRST_SEGMENT  # whatever the batch is
    elif bound is not None:
        bound = min(bound, MAX_FIRST_SEGMENT)
    return context.first_lengths.clamp(max=MAX_FIRST_SEGMENT), bound
