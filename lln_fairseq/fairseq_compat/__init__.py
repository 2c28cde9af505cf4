"""Patches of fairseq, each with its reason and with how to tell that it is no longer needed."""
