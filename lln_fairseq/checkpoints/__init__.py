"""Load checkpoints safely, check that they are compatible, and save them atomically."""
