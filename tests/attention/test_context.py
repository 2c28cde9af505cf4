"""What the encoder reads of a batch."""

import pytest
import torch

from lln_fairseq.attention.context import read_batch


@pytest.mark.parametrize(
    ("padding", "lengths", "expected"),
    [
        ([[False, False], [False, True]], [2, 7], (True, 7)),
        ([[False, False], [False, False]], [0, 0], (False, 0)),
        ([[False, True]], None, (True, None)),
    ],
)
def test_batch_is_read_at_once(padding, lengths, expected):
    lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    assert read_batch(torch.tensor(padding), lengths) == expected


def test_batch_without_sequences_is_read():
    assert read_batch(torch.zeros(0, 3, dtype=torch.bool), torch.zeros(0, dtype=torch.int64)) == (False, None)
