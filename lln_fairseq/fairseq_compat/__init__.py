"""Patches of fairseq. Each says why it exists and when it can be removed."""
