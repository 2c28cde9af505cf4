"""The sizes of the named architectures."""

# The options that a preset sets.
SIZE_FIELDS = ("encoder_layers", "encoder_embed_dim", "encoder_ffn_embed_dim", "encoder_attention_heads")

# name: (layers, embedding dimension, feed-forward dimension, heads). base and large are those of RoBERTa.
PRESETS = {
    "nano": (2, 64, 256, 1),  # for the demo's half a million tokens on a laptop
    "tiny": (2, 128, 512, 2),
    "lra": (2, 64, 128, 2),  # Skyformer's sizes for the Long Range Arena
    "small": (4, 256, 1024, 4),
    "base": (12, 768, 3072, 12),
    "large": (24, 1024, 4096, 16),
}
