"""The sizes of the models, for everything that builds one, with fairseq or without."""

# Layers, embedding, feed-forward, heads. base and large are RoBERTa's own.
PRESETS = {
    "nano": (2, 64, 256, 1),  # a laptop's, for the demo's half a million tokens
    "tiny": (2, 128, 512, 2),
    "lra": (2, 64, 128, 2),  # Skyformer's for the Long Range Arena
    "small": (4, 256, 1024, 4),
    "base": (12, 768, 3072, 12),
    "large": (24, 1024, 4096, 16),
}
