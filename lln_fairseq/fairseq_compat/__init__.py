"""Patch fairseq. Each patch says why it exists and when it can be removed."""
