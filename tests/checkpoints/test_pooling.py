"""The vectors of texts."""

import pytest
import torch

from lln_fairseq.checkpoints.pooling import Pooling, pool_hidden_states


@pytest.mark.parametrize("pooling", [Pooling("mean", normalize=True), Pooling("cls"), Pooling("max")])
def test_pooling_ignores_padding(pooling):
    hidden = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    real = torch.tensor([[True] * 5, [True, True, False, False, False]])
    hidden[1, 2:] = 7.0
    expected = {"mean": hidden[1, :2].mean(dim=0), "cls": hidden[1, 0], "max": hidden[1, :2].amax(dim=0)}[pooling.mode]
    if pooling.normalize:
        expected = expected / expected.norm()
    torch.testing.assert_close(pool_hidden_states(hidden, real, pooling)[1], expected)
