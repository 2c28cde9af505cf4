"""Apply an exported model to batches of columns, as Ray Data, datasets and Spark have them. See docs/engines.md.

This module needs neither fairseq nor an engine, but torch, transformers and, for encoders, sentence-transformers.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lln_fairseq.errors import UserError
from lln_fairseq.text.read_lines import MAX_LINE
from lln_fairseq.text.samples import BATCH_TOKENS, as_line, batch_by_length, split_into_chunks

CONFIG_FILE = "config.json"
ENCODER_FILE = "modules.json"  # sentence-transformers' list of a model's steps


class TextMapper:
    """A function that adds a model's outputs to a batch of columns.

    A classifier adds the columns `label` and `probability`, a model with one output `score`, and an encoder `vector`.
    All add `error`: "", or what is wrong with a row, whose outputs are then "" and NaN, and not None, from which an
    engine would infer another type of column. Other rows of the batch get their outputs. An error that does not belong
    to a row, such as too little memory, is raised.

    The model is loaded at the first call. A pickled mapper loads it again.

    Args:
        directory: a classifier or an encoder of sentence vectors that `lln-fairseq export` wrote.
        text: the column of the texts, or two columns for pairs. A text is a string or bytes in UTF-8.
        batch_tokens: the tokens that are computed together, padding included. A longer text is computed alone.
        device: "cpu", "cuda" or "cuda:N". Default: the GPU if there is one.
        dtype: the precision of the model: "float32", "bfloat16" or "float16".
    """

    def __init__(
        self,
        directory: str,
        text: str | Sequence[str] = "text",
        batch_tokens: int = BATCH_TOKENS,
        device: str | None = None,
        dtype: str = "float32",
    ) -> None:
        self.directory = directory
        self.columns = [text] if isinstance(text, str) else list(text)
        self.batch_tokens = batch_tokens
        self.device = device
        self.dtype = dtype
        # `datasets` finds outputs in its cache by the pickled mapper, which must differ after a new export.
        self.version = directory_version(directory)
        self._model: ServedModel | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_model": None}

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of the batch, each a sequence with an entry for each row, and those of the outputs."""
        if self._model is None:
            self._model = ServedModel(self.directory, self.device, self.dtype)
        rows: list[tuple[str, ...]] = []
        numbers: list[int] = []  # of these rows in the batch
        errors: list[str] = []
        for number, values in enumerate(zip(*(batch[column] for column in self.columns), strict=True)):
            try:
                rows.append(tuple(read_text(value) for value in values))
                numbers.append(number)
                errors.append("")
            except UserError as error:
                errors.append(str(error))
        outputs = np.full((len(errors), self._model.width), np.nan, dtype=np.float32)
        samples: list[dict[str, list[int]]] = []
        for chunk in split_into_chunks(rows):  # a tokenizer cuts texts only after it has encoded all of them
            samples += self._model.tokenize(chunk)
        for places in batch_by_length([len(sample["input_ids"]) for sample in samples], self.batch_tokens):
            outputs[[numbers[place] for place in places]] = self._model.compute([samples[place] for place in places])
        for number in numbers:
            if not np.isfinite(outputs[number]).all():
                errors[number] = "the outputs are not finite"
                outputs[number] = np.nan
        return dict(batch) | self._model.output_columns(outputs) | {"error": np.array(errors, dtype=object)}


class ServedModel:
    """A model of `lln-fairseq export` with its tokenizer. `width` is the number of its outputs for a text."""

    def __init__(self, directory: str, device: str | None, dtype: str) -> None:
        # transformers takes seconds to import, and a mapper may be created where nothing is computed.
        from transformers import (
            AutoConfig,
            AutoModelForSequenceClassification,
            AutoTokenizer,
            DataCollatorWithPadding,
        )

        import lln_fairseq.hub  # noqa: F401  lets transformers find our models

        if not Path(directory, CONFIG_FILE).exists():
            raise UserError(f"{directory} has no {CONFIG_FILE}: name a directory that `lln-fairseq export` wrote")
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = device
        config = AutoConfig.from_pretrained(directory)
        self.labels: list[str] = []
        self.activation: Callable[[Tensor], Tensor] | None = None
        if Path(directory, ENCODER_FILE).exists():
            from sentence_transformers import SentenceTransformer

            self.model: Any = SentenceTransformer(directory, device=device)
            self.tokenizer = self.model.tokenizer
            self.width = config.hidden_size
        elif str(config.architectures).endswith("ForSequenceClassification']"):
            from lln_fairseq.checkpoints.source_settings import score_activation

            self.model = AutoModelForSequenceClassification.from_pretrained(directory)
            self.tokenizer = AutoTokenizer.from_pretrained(directory)
            self.width = config.num_labels
            self.labels = [config.id2label[number] for number in range(self.width)]
            if self.width == 1:
                self.activation = score_activation(config.to_dict())
        else:
            raise UserError(f"{directory} is neither a classifier nor an encoder of sentence vectors")
        self.is_encoder = not self.labels
        self.pad = DataCollatorWithPadding(self.tokenizer)
        self.model.eval().to(device, getattr(torch, dtype))

    def tokenize(self, rows: Sequence[Sequence[str]]) -> list[dict[str, list[int]]]:
        """Return the tokenizer's encoding of each row, of one text or two, cut to what the model takes."""
        columns = [[row[column] for row in rows] for column in range(len(rows[0]))]
        encoded = self.tokenizer(*columns, truncation=True)
        return [{name: values[number] for name, values in encoded.items()} for number in range(len(rows))]

    @torch.no_grad()
    def compute(self, samples: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Return the model's outputs for encodings, float32 (B, width)."""
        inputs: Any = self.pad([dict(sample) for sample in samples])
        inputs = inputs.to(self.device)
        if self.is_encoder:
            outputs = self.model(dict(inputs))["sentence_embedding"].float()
        else:
            outputs = self.model(**inputs).logits.float()
            if self.activation is not None:
                outputs = self.activation(outputs)
            else:
                outputs = outputs.softmax(dim=-1)
        return outputs.cpu().numpy()

    def output_columns(self, outputs: np.ndarray) -> dict[str, np.ndarray]:
        """Return the columns for outputs (rows, width), of which a row of NaN has none."""
        if self.is_encoder:
            return {"vector": outputs}
        if self.activation is not None:
            return {"score": outputs[:, 0]}
        labels = ["" if np.isnan(row).any() else self.labels[row.argmax()] for row in outputs]
        return {"label": np.array(labels, dtype=object), "probability": outputs.max(axis=1)}


def directory_version(directory: str) -> tuple[int, int] | None:
    """Return the time of the last change of the files in a directory, and their size; None if it has no files here."""
    states = [path.stat() for path in Path(directory).rglob("*") if path.is_file()]
    if not states:
        return None
    return max(state.st_mtime_ns for state in states), sum(state.st_size for state in states)


def read_text(value: Any) -> str:
    """Return a text as a line of training data would have it.

    UserError is raised if it is not text, not UTF-8, or longer than MAX_LINE.
    """
    if not isinstance(value, str | bytes | bytearray):
        raise UserError(f"expected a text, got {value!r:.40}")
    if len(value) > MAX_LINE:
        raise UserError(f"the text has more than {MAX_LINE >> 20} MiB")
    if isinstance(value, str):
        return as_line(value)
    try:
        return as_line(bytes(value).decode())
    except UnicodeDecodeError as error:
        raise UserError(f"the text is not UTF-8 ({error.reason} at byte {error.start})") from error
