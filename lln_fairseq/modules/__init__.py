"""fairseq-shaped modules: they translate between fairseq's (T, B, C) world and the head-split mechanisms."""
