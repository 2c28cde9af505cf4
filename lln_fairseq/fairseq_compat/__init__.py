"""Patches of fairseq. Each has a comment on why it exists, and when it can be removed."""
