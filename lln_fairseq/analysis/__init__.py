"""Instruments: what runs and attention matrices show."""
