"""What a classifier without any network reaches on the demo's sentences: TF-IDF and logistic regression."""

import csv
from pathlib import Path

SPLITS = {"valid": "dev", "test": "test"}  # and the names of their files


def bag_of_words(data: Path) -> dict[str, float]:
    """Accuracy by split, of scikit-learn's defaults trained on the train rows. `data`: what data_prep.demo wrote."""
    from sklearn.feature_extraction.text import TfidfVectorizer  # of fairseq's own requirements
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    model = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(*_read(data, "train"))
    return {split: model.score(*_read(data, name)) for split, name in SPLITS.items()}


def _read(data: Path, name: str) -> tuple[list[str], list[str]]:
    with (data / f"raw/SST-2/{name}.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [row["sentence"] for row in rows], [row["label"] for row in rows]
