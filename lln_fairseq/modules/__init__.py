"""fairseq modules with LLN attention, between fairseq's (T, B, C) tensors and the attentions on (B, H, N, D)."""
