"""Trained models: load them, give them text, score them."""
