"""Samples are cut where Hugging Face's tokenizers cut."""

import itertools

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from lln_fairseq.text.samples import cut_sample

WORDS = [f"w{number}" for number in range(8)]
VOCABULARY = {symbol: number for number, symbol in enumerate(["<s>", "<pad>", "</s>", "<unk>", *WORDS])}


@pytest.mark.parametrize("pair", ["<s> $A </s> </s> $B </s>", "<s> $A </s> $B </s>"])
def test_samples_are_cut_as_by_tokenizers(pair):
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair=pair, special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    texts = [" ".join(WORDS[:count]) for count in range(9)]
    for first, second in itertools.product(texts, [None, *texts]):
        tokenizer.no_truncation()
        sample = torch.tensor(tokenizer.encode(first, second).ids)
        for longest in range(4, 14):
            tokenizer.enable_truncation(longest)
            assert cut_sample(sample, longest).tolist() == tokenizer.encode(first, second).ids


def test_samples_without_eos_lose_their_ends():
    assert cut_sample(torch.tensor([0, 4, 5, 6]), 3).tolist() == [0, 4, 5]


@pytest.mark.parametrize("longest", [1, 2, 3])
def test_samples_fit_fewer_tokens_than_the_special_ones(longest):
    for sample in ([0, 4, 2], [0, 4, 2, 2, 5, 2], [0, 4, 2, 5, 2]):
        assert len(cut_sample(torch.tensor(sample), longest)) == longest
