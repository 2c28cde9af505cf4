"""Replace the softmax attention of a trained encoder with a linear attention, and train that to match."""
