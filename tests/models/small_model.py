"""A small model of random parameters that several tests build."""

from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from omegaconf import OmegaConf

from lln_fairseq.models.lln_roberta import LLNRobertaModel


def build_model(**options):
    """Build a model with 60 words, 128 positions and, by default, 2 layers, in evaluation mode."""
    dictionary = Dictionary()
    for number in range(60):
        dictionary.add_symbol(f"w{number}")
    sizes = dict(encoder_layers=2, encoder_embed_dim=32, encoder_ffn_embed_dim=64, encoder_attention_heads=2)
    task = SimpleNamespace(source_dictionary=dictionary, max_positions=lambda: 128)
    torch.manual_seed(0)
    return LLNRobertaModel.build_model(OmegaConf.create(sizes | options), task).eval()
