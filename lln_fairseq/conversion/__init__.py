"""Encoders of Hugging Face and of fairseq into our checkpoints, and ours into directories of Hugging Face."""
