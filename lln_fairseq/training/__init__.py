"""Extend fairseq's training loop: hooks, exact resume, checks of the configuration, and the program `train`."""
