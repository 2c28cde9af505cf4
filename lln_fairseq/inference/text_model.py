"""A trained model that takes text: it predicts labels, computes vectors and fills in a <mask>.

from lln_fairseq import load
load("runs/pretrain_lln_diag/glue/sst2/seed1/checkpoint_best.pt").predict(["a gripping film"])
"""

import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex, cast

import torch
import torch.nn.functional as F
from fairseq.data.data_utils import collate_tokens
from fairseq.models import BaseFairseqModel
from torch import Tensor, nn

from lln_fairseq.checkpoints.compatibility import check_tokenizer, is_finetuned, label_names, takes_any_inputs
from lln_fairseq.checkpoints.pooling import POOLINGS, Pooling, pool_hidden_states, stored_pooling
from lln_fairseq.checkpoints.reading import load_checkpoint
from lln_fairseq.checkpoints.run_tokenizer import check_vocabulary, directories, require_one_path
from lln_fairseq.checkpoints.source_settings import score_activation, stored_settings
from lln_fairseq.errors import UserError
from lln_fairseq.inference.loading import build_model, require_finite, set_positions, use_precision
from lln_fairseq.models.packed_linear.choice import FLOAT32
from lln_fairseq.text.samples import (
    BATCH_TOKENS,
    CHUNK_CHARACTERS,
    END,
    ON_ERROR,
    ROW,
    LengthLimit,
    SampleEncoder,
    Text,
    batch_by_length,
    isolate_errors,
    split_into_chunks,
    texts_to_rows,
)
from lln_fairseq.text.special_symbols import MASK, NUM_SPECIAL
from lln_fairseq.text.vocabulary import load_vocabulary

TOKENS = "tokens"  # in place of a pooling: the vectors of all tokens
TOKEN_CHUNK_CHARACTERS = 1 << 17  # fewer than for other outputs, because every token has a vector
logger = logging.getLogger(__name__)


class Prediction(NamedTuple):
    """The most likely label of a text, and its probability."""

    label: str
    probability: float


class Filling(NamedTuple):
    """A token for a <mask>, its probability among all symbols, and the text with the token in place of the <mask>."""

    token: str
    probability: float
    text: str


class TokenVectors(NamedTuple):
    """The vectors of a text's tokens, special tokens included, and where the tokens are in the text.

    Attributes:
        vectors: (N, C) float32.
        offsets: the start and the end of each token, in characters of the text, (N, 2) int64; (0, 0) for <s> and </s>.
            See `SampleEncoder.token_offsets`.
    """

    vectors: Tensor
    offsets: Tensor


def _without_training(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method of TextModel so that it computes without gradients and dropout, also after `train()`."""

    @functools.wraps(compute)
    @torch.no_grad()
    def wrapper(self: "TextModel", *args: Any, **kwargs: Any) -> Any:
        if not self.model.training:
            return compute(self, *args, **kwargs)
        self.model.eval()
        try:
            return compute(self, *args, **kwargs)
        finally:
            self.model.train()

    return wrapper


class TextModel(nn.Module):
    """A model with its task and tokenizer, as `lln_fairseq.load` returns it.

    A text gets the ids that it would have in the training data. A text that cannot be encoded raises a UserError,
    which is a ValueError. All outputs are on the CPU and have no gradient.

    Texts that are longer than the model takes are cut (`on_long="truncate"`), and a warning, logged once per call, says
    how many. With `on_long="error"`, the first such text raises a LongTextError, which is a UserError. `predict` and
    `encode` raise it before the model computes anything. `predict_each` and `encode_each` raise it when they read the
    text. With `on_error="row"`, these two yield the UserError of a text in the place of its output.

    Args:
        model: the model, in evaluation mode if it is to be used.
        task: the task that the model was trained for.
        vocabulary: the tokenizer with its dictionary.
        inputs: how many texts `predict` takes for one prediction: (1,), (2,) for pairs, or (1, 2).
        pooling: the pooling of an encoder of sentence vectors, which is the default of `encode`. None for other models,
            of which `encode` returns the mean over the tokens, not normalized.
        precision: the precision of the encoder, as `use_precision` returns it.
        activation: what `predict` applies to the output of a model with one output; None applies nothing.

    Attributes:
        longest: the number of tokens that the model takes, special tokens included.
        width: the number of features of a vector.
        batch_tokens: the number of tokens of a batch, padding included, which can be set. A longer text becomes a batch
            of its own.
    """

    def __init__(
        self,
        model: BaseFairseqModel,
        task: Any,
        vocabulary: Any,
        inputs: Sequence[int],
        pooling: Pooling | None = None,
        precision: str = FLOAT32,
        activation: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.task = task
        self.vocabulary = vocabulary
        self.inputs = inputs
        self.precision = precision
        self.activation = activation or nn.Identity()
        self.is_sentence_encoder = pooling is not None
        self.pooling = pooling or Pooling()
        self.ids = SampleEncoder(task, vocabulary)
        self.width = model.encoder.args.encoder_embed_dim
        self.longest = min(task.max_positions(), model.max_positions())
        self.finetuned = is_finetuned(task.cfg._name)
        self.labels = label_names(task) if self.finetuned else []
        self.batch_tokens = BATCH_TOKENS

    def predict(self, texts: Iterable[Text], on_long: str = "truncate") -> list[Prediction | float]:
        """Return a prediction for every text, or for every pair of texts (a tuple).

        A prediction is a label of label/dict.txt with its probability, or the score of a model with one output: for a
        regression it is on the scale of the training targets, for a reranker it is that of CrossEncoder.

        Raises:
            UserError: if the model was not fine-tuned, `texts` is a single string, the model takes pairs but gets
                texts, or the reverse, a text is too long and on_long="error", or the outputs are not finite.
        """
        self._require_labels()
        if on_long == "error":
            texts = self._check_lengths(texts, self.inputs)
        return cast("list[Prediction | float]", list(self.predict_each(texts, on_long)))

    def predict_each(
        self, texts: Iterable[Text], on_long: str = "truncate", on_error: str = END
    ) -> Iterator[Prediction | float | UserError]:
        """Yield what `predict` returns, reading only a few thousand texts ahead. For `on_error`, see the class."""
        self._require_labels()
        for _, logits in self._map_texts(texts, self.inputs, self._class_logits, on_long, on_error):
            if isinstance(logits, UserError):
                yield logits
            elif self.task.cfg.regression_target:
                yield self.activation(logits).item()
            else:
                probability, number = logits.softmax(dim=-1).max(dim=-1)
                yield Prediction(self.labels[number], probability.item())

    def encode(
        self,
        texts: Iterable[str],
        pooling: str | None = None,
        normalize: bool | None = None,
        on_long: str = "truncate",
    ) -> Tensor | list[TokenVectors]:
        """Return a vector for each text, or the vectors of each text's tokens.

        Args:
            texts: the texts.
            pooling: what is computed from the last layer: "mean" over the tokens, <s> and </s> included, "cls" for the
                vector of the first token, <s>, "max" over the tokens in each feature, or "tokens" for the vectors of
                all tokens. Default: `self.pooling.mode`.
            normalize: divide each vector by its Euclidean norm. Default: `self.pooling.normalize`, but False for
                pooling="tokens".
            on_long: see the class.

        Returns:
            (number of texts, C) float32, (0, C) without texts; a list of TokenVectors for pooling="tokens".

        Raises:
            UserError: if `texts` is a single string or has something other than strings, an option has an unknown
                value, a text is too long and on_long="error", or the outputs are not finite.
        """
        if on_long == "error":
            texts = self._check_lengths(texts, (1,))
        vectors = list(self.encode_each(texts, pooling, normalize, on_long))
        if pooling == TOKENS:
            return vectors
        if not vectors:
            return torch.empty(0, self.width)
        return torch.stack(vectors)

    def encode_each(
        self,
        texts: Iterable[str],
        pooling: str | None = None,
        normalize: bool | None = None,
        on_long: str = "truncate",
        on_error: str = END,
    ) -> Iterator[Any]:
        """Yield what `encode` returns for each text, reading only a few thousand texts ahead.

        For `on_error`, see the class.
        """
        if pooling is None:
            pooling = self.pooling.mode
        if pooling not in (*POOLINGS, TOKENS):
            raise UserError(f"pooling must be one of {', '.join(POOLINGS)}, {TOKENS}, got {pooling!r}")
        if normalize is None:
            normalize = self.pooling.normalize and pooling != TOKENS
        compute_features = partial(self._features, pooling=pooling, normalize=normalize)
        if pooling != TOKENS:
            for _, vector in self._map_texts(texts, (1,), compute_features, on_long, on_error):
                yield vector
            return
        outputs = self._map_texts(texts, (1,), compute_features, on_long, on_error, TOKEN_CHUNK_CHARACTERS)
        for (text,), vectors in outputs:
            if isinstance(vectors, UserError):
                yield vectors
            else:
                yield TokenVectors(vectors, self.ids.token_offsets(text, len(vectors)))

    def fill(self, text: str, k: int = 5, on_long: str = "truncate") -> list[Filling]:
        """Return the k most likely tokens for the single <mask> of a text, the most likely one first.

        Special symbols and symbols of the dictionary that no text can contain (fairseq's madeupword symbols) are never
        returned, but still count in the softmax.

        Raises:
            UserError: if the text does not have exactly one <mask>, if the text is too long and on_long="error" or the
                <mask> would be cut off, if k is not a whole number between 1 and the number of symbols that can be
                returned, if the model was fine-tuned, which changes the features that the language-model head reads, or
                if it is an encoder of sentence vectors, whose head may be untrained.
        """
        if self.finetuned:
            raise UserError("the model was fine-tuned and cannot fill a <mask> any more: use the pre-trained one")
        if self.is_sentence_encoder:
            raise UserError("the model is an encoder of sentence vectors and cannot fill a <mask>: use `encode`")
        if not isinstance(text, str) or text.count(MASK) != 1:
            raise UserError(f"fill takes a text with one {MASK}, got {text!r:.80}")
        if isinstance(k, bool) or not isinstance(k, SupportsIndex):
            raise UserError(f"k must be a whole number, got {k!r}")
        left, right = text.split(MASK)
        ids = self.ids.encode_masked(left, right)
        limit = LengthLimit(self.longest, on_long, name="the text")
        (ids,) = limit.apply([ids])
        if not ids.eq(self.ids.mask).any():
            raise UserError(f"the {MASK} lies beyond the {self.longest} tokens that the model takes")
        _log_cut_texts(limit)
        probabilities = self._mask_probabilities(ids)
        tokenizer = self.vocabulary.tokenizer
        symbols = self.vocabulary.symbols
        # The dictionary can also have fillers.
        known = [number for number, symbol in enumerate(symbols) if tokenizer.can_give(symbol)]
        if not 1 <= k <= len(known):
            raise UserError(f"k must be between 1 and {len(known)}, the number of tokens, got {k}")
        top = probabilities[NUM_SPECIAL:][known].topk(k)
        left = left.rstrip()  # a token includes the space before it
        fillings = []
        for probability, place in zip(top.values.tolist(), top.indices.tolist(), strict=True):
            token = tokenizer.symbol_text(symbols[known[place]])
            fillings.append(Filling(token.strip(), probability, (left + token + right).strip()))
        return fillings

    @_without_training
    def _mask_probabilities(self, ids: Tensor) -> Tensor:
        """Return the probabilities (V,), float32 on the CPU, of all symbols at the first <mask> in ids (N,)."""
        is_mask = ids.eq(self.ids.mask)
        logits, _ = self.model(ids[None].to(self._device))
        require_finite(logits, "this text")
        return logits[0][is_mask.to(self._device)][0].float().softmax(dim=-1).cpu()

    def _require_labels(self) -> None:
        if not self.finetuned:
            raise UserError("the model was not fine-tuned and has no labels to predict")

    def _check_lengths(self, texts: Iterable[Any], inputs: Sequence[int]) -> list[Any]:
        """Return the texts, or pairs if `inputs` has 2, as a list. Raise LongTextError if one is too long."""
        _require_many(texts)
        texts = list(texts)
        limit = LengthLimit(self.longest, "error")
        for chunk in split_into_chunks(texts_to_rows(texts, inputs)):
            limit.apply(self.ids.encode_rows(chunk))
        return texts

    def _map_texts(
        self,
        texts: Iterable[Text],
        inputs: Sequence[int],
        model_function: Callable[..., Iterable[Tensor]],
        on_long: str,
        on_error: str = END,
        max_characters: int = CHUNK_CHARACTERS,
    ) -> Iterator[tuple[Sequence[str], Tensor | UserError]]:
        """Yield each text, as a tuple of one or two strings, with the output of `model_function` for it, in order.

        `model_function` maps padded tokens (B, N) on the model's device to B outputs, float32 on the CPU.
        `max_characters` is how much text is read ahead. At the end, even if the caller stops early, a warning says how
        many texts were cut.
        """
        if on_error not in ON_ERROR:
            raise UserError(f"on_error must be one of {', '.join(ON_ERROR)}, got {on_error!r}")
        _require_many(texts)
        limit = LengthLimit(self.longest, on_long)
        if on_error == ROW:
            limit.name = "the text"  # its place is that of the error

        def make_samples(chunk: Sequence[Sequence[str]]) -> list[Any]:
            return limit.apply(self._encode_rows(chunk))

        try:
            for chunk in split_into_chunks(texts_to_rows(texts, inputs), max_characters):
                if on_error == ROW:
                    samples = isolate_errors(make_samples, chunk)
                else:
                    samples = make_samples(chunk)
                outputs = self._map_samples(samples, chunk, model_function, on_error)
                yield from zip(chunk, outputs, strict=True)
        finally:
            _log_cut_texts(limit)

    def _encode_rows(self, rows: Sequence[Sequence[str]]) -> list[Tensor]:
        """Return the ids of each row, int64 (N,). Raise UserError if a row has none."""
        samples = self.ids.encode_rows(rows)
        for row, sample in zip(rows, samples, strict=True):
            if len(sample) == 0:
                raise UserError(f"{_name_of(row)} has no tokens")
        return samples

    def _map_samples(
        self,
        samples: Sequence[Tensor | UserError],
        rows: Sequence[Sequence[str]],
        model_function: Callable[..., Iterable[Tensor]],
        on_error: str,
    ) -> list[Tensor | UserError]:
        """Return the output of `model_function` for each sample (N,), and the UserErrors among the samples.

        `rows` are the texts, for error messages.
        """
        outputs = list(samples)
        numbers = [number for number, sample in enumerate(samples) if isinstance(sample, Tensor)]
        encoded = [sample for sample in samples if isinstance(sample, Tensor)]
        for batch in batch_by_length([len(sample) for sample in encoded], self.batch_tokens):
            tokens = collate_tokens([encoded[place] for place in batch], self.task.source_dictionary.pad())
            batch_outputs = model_function(tokens.to(self._device))
            for place, output in zip(batch, batch_outputs, strict=True):
                number = numbers[place]
                outputs[number] = output
                try:
                    require_finite(output, _name_of(rows[number]))
                except UserError as error:
                    if on_error != ROW:
                        raise
                    outputs[number] = error
        return outputs

    @_without_training
    def _class_logits(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, classes) of the classification head for tokens (B, N), float32 on the CPU."""
        head = self.task.cfg.classification_head_name
        logits, _ = self.model(tokens, features_only=True, classification_head_name=head)
        return logits.float().cpu()

    @_without_training
    def _features(self, tokens: Tensor, pooling: str, normalize: bool) -> Iterable[Tensor]:
        """Return the pooled features (B, C) of tokens (B, N), or a list of (N_i, C) with pooling="tokens"."""
        features, _ = self.model(tokens, features_only=True)
        features = features.float()
        real = tokens.ne(self.task.source_dictionary.pad())
        if pooling != TOKENS:
            return pool_hidden_states(features, real, Pooling(pooling, normalize)).cpu()
        if normalize:
            features = F.normalize(features, dim=-1)
        features = features.cpu()
        lengths = real.sum(dim=1).tolist()
        return [row[:length].clone() for row, length in zip(features, lengths, strict=True)]

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


def _name_of(row: Sequence[str]) -> str:
    """Return what an error message calls the texts of a row."""
    return f"the text {' | '.join(row)!r:.80}"


def _require_many(texts: Any) -> None:
    """Raise UserError if `texts` is a single string, or cannot be iterated over."""
    if isinstance(texts, str):
        raise UserError("expected a list of texts, got a single one: put it in a list")
    if not isinstance(texts, Iterable):
        raise UserError(f"expected a list of texts, got {texts!r:.80}")


def _log_cut_texts(limit: LengthLimit) -> None:
    message = limit.message()
    if message:
        logger.warning(message)


def load_text_model(
    checkpoint: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    precision: str | None = None,
    positions: int | None = None,
    device: str | None = None,
) -> TextModel:
    """Load the model of a checkpoint for use with text, in evaluation mode.

    This is `lln_fairseq.load`.

    Args:
        checkpoint: a pre-trained or fine-tuned checkpoint.
        data: the directory with the dictionaries of the training data. Default: the run's tokenizer directory, the
            checkpoint's directory or the training data, whichever first has dictionaries and (unless `tokenizer` is
            given) a tokenizer.
        tokenizer: its directory or file. Default: the tokenizer next to the dictionaries.
        precision: "float32" (default on a CPU), "bfloat16" (default on a GPU) or "float16" (default on a GPU below
            compute capability 8.0): the precision of the encoder's layers. "auto" takes the fastest whose relative
            error is below 2 %. On a CPU, it is that of their linear layers, "int8" is possible and "float16" is not; a
            precision that is not faster on this processor is not used, and a warning says so; with gradients, and under
            autocast or torch.compile, the model computes in float32.
        positions: the number of tokens that a model with rotary positions shall take, which can be more than it was
            trained with. Default: what it was trained with.
        device: "cpu", "cuda" or "cuda:N". Default: the GPU if there is one.

    Raises:
        UserError: if the checkpoint is missing, damaged or for another task, there is no tokenizer that fits its
            dictionary, the precision is unknown, the device does not exist, or `positions` is given for a model without
            rotary positions.
    """
    checkpoint = os.fspath(checkpoint)
    state = load_checkpoint(checkpoint)
    if positions is not None:
        set_positions(state["cfg"], positions, checkpoint)
    if data:
        places = [Path(data)]
    else:
        places = directories(checkpoint, state["cfg"].task.get("data"))
    directory, vocabulary = _find_vocabulary(checkpoint, places, tokenizer)
    require_one_path(directory)
    model, task = build_model(state, checkpoint, str(directory), device)
    check_vocabulary(vocabulary, task, str(tokenizer or directory))
    check_tokenizer(state, vocabulary.identity, str(tokenizer or directory), checkpoint)
    if getattr(task.cfg, "two_towers", False):
        raise UserError(f"{checkpoint} encodes two inputs separately (two_towers): only evaluate supports that")
    inputs: tuple[int, ...] = (1, 2)
    if not takes_any_inputs(state):
        inputs = (2,) if (directory / "input1").is_dir() else (1,)
    pooling = stored_pooling(state)
    activation = None
    if is_finetuned(task.cfg._name) and task.cfg.regression_target:
        activation = score_activation(stored_settings(state))
    del state  # frees its weights: `use_precision` makes another copy of them
    used_precision = use_precision(model, precision)
    return TextModel(model, task, vocabulary, inputs, pooling, used_precision, activation).eval()


def _find_vocabulary(checkpoint: str, places: list[Path], tokenizer: Any) -> tuple[Path, Any]:
    """Return the directory of the dictionaries, and the vocabulary of the tokenizer.

    The directory is the first of `places` with a usable tokenizer, or just the first of them if `tokenizer` is given.
    Raises UserError with the reason for every place if no tokenizer can be used.
    """
    reasons = []
    for place in places:
        try:
            return place, load_vocabulary(os.fspath(tokenizer or place))
        except UserError as error:
            reasons.append(str(error))
            if tokenizer:
                break
    if not places:
        raise UserError(
            f"cannot turn text into the ids of {checkpoint}: neither its directory nor its training data has a "
            "dict.txt. Pass the training data (--data)"
        )
    raise UserError(
        f"cannot turn text into the ids of {checkpoint}: {'; '.join(reasons)}. Pass the training data (--data) or a "
        "tokenizer (--tokenizer)"
    )
