"""Everything around fairseq's training loop: hooks, resume, checks of the configuration, and the program `train`."""
