"""Mechanisms that exist for comparison with LLN+Diag, one file each."""
