"""Read checkpoints safely, check that they are compatible, and write them whole."""
