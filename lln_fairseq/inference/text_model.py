"""A trained model that takes text: labels of sentences and pairs, vectors, and words for a <mask>.

from lln_fairseq import load
load("runs/sst2_lln_diag/checkpoint_best.pt").predict(["a gripping film"])
"""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq.data.data_utils import collate_tokens
from fairseq.models import BaseFairseqModel
from torch import Tensor, nn

from lln_fairseq.checkpoints.compatibility import is_finetuned, label_names
from lln_fairseq.checkpoints.config import stored_options
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from lln_fairseq.checkpoints.run_tokenizer import check_vocabulary, directories
from lln_fairseq.command import UserError
from lln_fairseq.data.reporting import DataError
from lln_fairseq.data.special_symbols import MASK, NUM_SPECIAL
from lln_fairseq.data.text_ids import Text, TextIds, batch_by_length, split_into_chunks, texts_to_rows
from lln_fairseq.data.vocabulary import load_vocabulary
from lln_fairseq.errors import InputError
from lln_fairseq.inference.loading import load_model, require_finite


class Prediction(NamedTuple):
    label: str
    probability: float


class Filling(NamedTuple):
    token: str
    probability: float
    text: str  # with the token in the place of <mask>


class TextModel(nn.Module):
    """A model with its task and tokenizer; `load` makes it, in evaluation mode on the GPU if there is one.

    Texts become the ids that they would have in the training's data, and are cut to its longest sequence. What is
    wrong with a text is an InputError, which is a ValueError.
    """

    def __init__(self, model: BaseFairseqModel, task: Any, vocabulary: Any, inputs: int) -> None:
        super().__init__()
        self.model = model
        self.task = task
        self.vocabulary = vocabulary
        self.inputs = inputs
        self.ids = TextIds(task, vocabulary, longest=min(task.max_positions(), model.max_positions()))
        self.finetuned = is_finetuned(task.cfg._name)
        self.labels = label_names(task) if self.finetuned else []

    def predict(self, texts: Iterable[Text]) -> list[Prediction | float]:
        """Return the label of every text, or of every pair (a tuple), with its probability; the score for a regression.

        Labels have the names in label/dict.txt, and scores have the unit of the targets in training.
        Raises: InputError if the model was not fine-tuned, or gets texts but takes pairs, or the reverse.
        """
        return list(self.predict_each(texts))

    def predict_each(self, texts: Iterable[Text]) -> Iterator[Prediction | float]:
        """`predict` of any number of texts, a few thousand of which are in memory."""
        if not self.finetuned:
            raise InputError("the model was not fine-tuned and has no labels to predict")
        for logits in self._each(texts, self.inputs, self._logits):
            if self.task.cfg.regression_target:
                yield logits.item()
            else:
                probability, number = logits.softmax(dim=-1).max(dim=-1)
                yield Prediction(self.labels[number], probability.item())

    def encode(self, texts: Iterable[str]) -> Tensor:
        """The mean of the last layer over the tokens of each text, <s> and </s> among them: (n, C) float32, on the CPU.

        It is what sentence-transformers calls mean pooling.
        """
        rows = list(self._each(texts, 1, self._means))
        return torch.stack(rows) if rows else torch.empty(0, self.model.encoder.args.encoder_embed_dim)

    def fill(self, text: str, k: int = 5) -> list[Filling]:
        """The k likeliest tokens for the one <mask> of a text, with their probabilities among all tokens.

        Raises: InputError for none or several <mask>, one that is cut off, a k that is too large, and a fine-tuned
        model: fine-tuning changes what the head for this reads.
        """
        if self.finetuned:
            raise InputError("the model was fine-tuned and cannot fill a <mask> any more: use the pre-trained one")
        if not isinstance(text, str) or text.count(MASK) != 1:
            raise InputError(f"fill takes a text with one {MASK}, got {text!r:.80}")
        left, right = text.split(MASK)
        try:
            ids = self.ids.encode_masked(left, right)
        except DataError as error:
            raise InputError(str(error)) from error
        probabilities = self._masked_probabilities(ids)
        tokenizer, symbols = self.vocabulary.tokenizer, self.vocabulary.symbols
        in_text = set(tokenizer.symbols())  # a dictionary has others to fill it up
        known = [number for number, symbol in enumerate(symbols) if symbol in in_text]
        if not 1 <= k <= len(known):
            raise InputError(f"k is {k}, and must be from 1 to {len(known)}, the number of tokens")
        values, places = probabilities[NUM_SPECIAL:][known].topk(k)
        words = [tokenizer.symbol_text(symbols[known[place]]) for place in places.tolist()]
        left = left.rstrip()  # the space is the word's
        return [Filling(word.strip(), value, (left + word + right).strip())
                for word, value in zip(words, values.tolist(), strict=True)]  # fmt: skip

    @torch.no_grad()
    def _masked_probabilities(self, ids: Tensor) -> Tensor:
        """Of the whole dictionary for the <mask> in ids (N): (V) float32, on the CPU."""
        places = ids.eq(self.ids.mask)
        if not places.any():
            raise InputError(f"the {MASK} lies beyond the {self.ids.longest} tokens that the model takes")
        logits, _ = self.model(ids[None].to(self._device))
        require_finite(logits, "this text")
        return logits[0][places.to(self._device)][0].float().softmax(dim=-1).cpu()

    def _each(self, texts: Iterable[Text], inputs: int, outputs: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        """The row of outputs(src_tokens (B, N)) that belongs to each text, in float32 on the CPU."""
        if isinstance(texts, str):
            raise InputError("expected a list of texts, got a single one: put it in a list")
        try:
            for part in split_into_chunks(texts_to_rows(texts, inputs)):
                samples = self.ids.encode_rows(part)
                rows = [torch.empty(0)] * len(part)
                for batch in batch_by_length(samples):
                    tokens = collate_tokens([samples[number] for number in batch], self.task.source_dictionary.pad())
                    for number, row in zip(batch, outputs(tokens.to(self._device)).float().cpu(), strict=True):
                        require_finite(row, f"the text {' | '.join(part[number])!r:.80}")
                        rows[number] = row
                yield from rows
        except DataError as error:
            raise InputError(str(error)) from error

    @torch.no_grad()
    def _logits(self, tokens: Tensor) -> Tensor:
        head = self.task.cfg.classification_head_name
        return self.model(tokens, features_only=True, classification_head_name=head)[0]

    @torch.no_grad()
    def _means(self, tokens: Tensor) -> Tensor:
        features, _ = self.model(tokens, features_only=True)
        real = tokens.ne(self.task.source_dictionary.pad())[..., None]
        return (features.float() * real).sum(dim=1) / real.sum(dim=1)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


def load(
    checkpoint: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
) -> TextModel:
    """The model of a checkpoint, ready for text, in evaluation mode on the GPU if there is one.

    Args:
        data: the directory with the dictionaries of the training data; default: the run's own folder, which a training
            leaves beside its checkpoints, the checkpoint's directory, or the data of the training.
        tokenizer: what `--tokenizer` of data_prep takes; default: what lies with the dictionaries.

    Raises: InputError for a checkpoint that is missing, cannot be read or does not fit the dictionaries, and where
    there is no tokenizer or its symbols are not those of the dictionary.
    """
    checkpoint = os.fspath(checkpoint)
    options = stored_options(load_checkpoint_lazily(checkpoint))["task"]
    if options.get("_name") and not is_finetuned(options["_name"]) and "masked_lm" not in str(options["_name"]):
        raise InputError(f"{checkpoint} holds a model for the task {options['_name']}, which does not take text")
    trained_on = options.get("data")
    places = [Path(data)] if data else directories(checkpoint, trained_on if isinstance(trained_on, str) else None)
    directory, vocabulary = _find_vocabulary(checkpoint, places, tokenizer)
    model, task = load_model(checkpoint, str(directory))
    check_vocabulary(vocabulary, task, str(tokenizer or directory))
    if getattr(task.cfg, "two_towers", False):
        raise InputError(f"{checkpoint} encodes two inputs by themselves (two_towers), which only evaluate can give it")
    return TextModel(model, task, vocabulary, inputs=2 if (directory / "input1").is_dir() else 1).eval()


def _find_vocabulary(checkpoint: str, places: list[Path], tokenizer: Any) -> tuple[Path, Any]:
    """The first place with a tokenizer, or the first of all with the one that is given, and the vocabulary."""
    reasons = []
    for place in places:
        try:
            return place, load_vocabulary(os.fspath(tokenizer or place))
        except UserError as error:
            reasons.append(str(error))
            if tokenizer:
                break
    reason = "; ".join(reasons) or "neither its directory nor its training's has a dict.txt"
    raise InputError(f"cannot turn text into the ids of {checkpoint}: {reason}. Give the data of its training or a "
                     "tokenizer (--data, --tokenizer)")  # fmt: skip
