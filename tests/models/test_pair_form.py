"""The option pair_form: the embedding of the second text of a pair, and checkpoints with and without it."""

import logging

import torch

from lln_fairseq.models.adapt import SECOND_TEXT
from tests.models.small_model import build_model

SINGLE = torch.tensor([[0, 5, 6, 2, 1, 1]])
PAIR = torch.tensor([[0, 5, 2, 6, 7, 2]])


def features(model, tokens):
    with torch.no_grad():
        return model(tokens, features_only=True)[0]


def test_second_text_has_embedding_of_its_own():
    bert = build_model(attention="softmax", pair_form="bert", dropout=0)
    distilbert = build_model(attention="softmax", pair_form="distilbert")
    bert.load_state_dict(distilbert.state_dict())
    assert torch.equal(features(bert, PAIR), features(distilbert, PAIR))

    with torch.no_grad():
        bert.encoder.sentence_encoder.second_text_embedding += 1e-1 * torch.randn(32)

    assert torch.equal(features(bert, SINGLE), features(distilbert, SINGLE))
    with torch.no_grad():  # the second text has the positions from 3, whose rows begin with 5
        positions = distilbert.encoder.sentence_encoder.embed_positions.weight
        positions[5:] += bert.encoder.sentence_encoder.second_text_embedding
    torch.testing.assert_close(features(bert, PAIR), features(distilbert, PAIR))


def test_embedding_of_second_text_is_added_and_left_out_with_warning(caplog):
    caplog.set_level(logging.WARNING)
    bert = build_model(pair_form="bert")
    roberta = build_model()

    bert.load_state_dict(roberta.state_dict())
    assert f"{SECOND_TEXT} is not in the checkpoint" in caplog.text
    roberta.load_state_dict(bert.state_dict())
    assert f"{SECOND_TEXT} of the checkpoint is left out" in caplog.text
