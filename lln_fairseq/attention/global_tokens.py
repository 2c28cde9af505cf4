"""The option global_tokens: the first tokens of a sequence that attend to all tokens, and that all tokens attend to."""

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
