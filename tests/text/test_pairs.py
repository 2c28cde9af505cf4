"""Which tokens of a pair belong to which text."""

import pytest
import torch

from lln_fairseq.text.pairs import BERT_PAIRS, DISTILBERT_PAIRS, first_segment_lengths, second_text

BOS, PAD, EOS = 0, 1, 2


@pytest.mark.parametrize(
    ("tokens", "length"),
    [
        ((BOS, 5, 6, EOS, EOS, 7, EOS), 4),  # a pair
        ((BOS, 5, 6, EOS, EOS, 7, EOS, EOS, 8, EOS), 4),  # only the first two adjacent </s> count
        ((BOS, EOS, EOS, 7, EOS), 2),  # a pair with an empty first text
        ((BOS, 5, EOS, 6, 7, EOS, EOS), 6),  # a single </s> does not end a segment
        ((BOS, 5, 6, 7, EOS, EOS), 5),  # a pair with an empty second text that was cut
        ((BOS, 5, 6, 7, EOS, PAD), 1),  # a single text
        ((BOS, 5, 6, 7), 1),
        ((EOS, EOS), 1),
        ((EOS,), 1),
        ((PAD, PAD, PAD), 1),
    ],
)
def test_length_of_first_segment(tokens, length):
    assert first_segment_lengths(torch.tensor([tokens]), EOS).tolist() == [length]


@pytest.mark.parametrize(
    ("tokens", "length"),
    [
        ((BOS, 5, 6, EOS, 7, EOS), 4),  # a pair
        ((BOS, 5, 6, EOS, 7, 8), 4),  # a pair that was cut in its second text
        ((BOS, EOS, 7, EOS), 2),  # a pair with an empty first text
        ((BOS, 5, EOS, EOS), 3),  # a pair with an empty second text
        ((BOS, 5, 6, EOS, PAD, PAD), 1),  # a single text
        ((BOS, 5, 6, EOS), 1),
        ((BOS, 5, 6), 1),
        ((PAD, PAD), 1),
    ],
)
def test_segments_of_pairs_with_one_separator(tokens, length):
    row = torch.tensor([tokens])
    for pair_form in (BERT_PAIRS, DISTILBERT_PAIRS):
        assert first_segment_lengths(row, EOS, pair_form).tolist() == [length]
    is_pair = length > 1
    is_second = [is_pair and place >= length for place in range(len(tokens))]
    assert second_text(row, EOS, PAD).tolist() == [is_second]
