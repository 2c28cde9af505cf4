"""Score a baseline without a neural network on the demo's sentences: TF-IDF with logistic regression."""

import csv
from pathlib import Path

SPLIT_FILES = {"valid": "dev", "test": "test"}


def bag_of_words_accuracies(data: Path) -> dict[str, float]:
    """Train and score scikit-learn's TF-IDF and logistic regression with their default options.

    Args:
        data: directory that data_prep.demo has built.

    Returns:
        The accuracy between 0 and 1 on each of the splits "valid" and "test", in this order.
    """
    # Imported here because scikit-learn takes a second. It is one of fairseq's requirements.
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    model = make_pipeline(TfidfVectorizer(), LogisticRegression())
    model.fit(*_read_sentences(data, "train"))
    return {split: model.score(*_read_sentences(data, name)) for split, name in SPLIT_FILES.items()}


def _read_sentences(data: Path, name: str) -> tuple[list[str], list[str]]:
    """Return the sentences and the labels of DATA/raw/SST-2/NAME.tsv, in the order of the file."""
    with (data / f"raw/SST-2/{name}.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    sentences = [row["sentence"] for row in rows]
    labels = [row["label"] for row in rows]
    return sentences, labels
