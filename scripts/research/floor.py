"""A floor unit: TF-IDF and logistic regression on the same rows as the conversion units of a task."""

from pathlib import Path
from typing import Any

import scipy.sparse
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV

from data_prep.download import fetch_tree
from data_prep.glue import GlueSource
from data_prep.glue_held_out import read_held_out_rows
from data_prep.glue_tasks import GLUE_TASKS, GlueRows
from scripts.research.fine_tuning import SPLITS, pool
from scripts.research.programs import write_result
from scripts.research.units import FLOOR, TASKS, TF_IDF, Unit


def run_floor(unit: Unit, results: Path, glue: str | None) -> None:
    """Fit the classifier of the unit's task, and write its accuracies. `glue` is as in `run_conversion`."""
    task = TASKS[unit.task]
    glue_task = GLUE_TASKS[task.glue]
    tree, _ = fetch_tree(glue_task.published, Path(glue) if glue else None)
    source = GlueSource(tree, glue_task)
    rows = read_held_out_rows(source, task.train, task.held_out, task.sentences)
    content: dict[str, Any] = {
        "kind": FLOOR,
        "task": unit.task,
        "attention": TF_IDF,
        "seed": unit.seed,
        "rows": {split: len(of_split) for split, of_split in rows.items()},
        "source": source.checksums(),
        "scores": {TF_IDF: tf_idf_accuracies(rows)},
    }
    write_result(unit.result(results), content)


def tf_idf_accuracies(rows: dict[str, GlueRows]) -> dict[str, float]:
    """Return the accuracies as `pool` does. The regularization is chosen by cross-validation on the rows of train."""
    train = rows["train"]
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    vectorizer.fit([text for texts in train.inputs for text in texts])
    classifier = GridSearchCV(LogisticRegression(max_iter=1000), {"C": [0.1, 1, 10]})
    classifier.fit(features(vectorizer, train), train.labels)
    scores = {}
    for split in SPLITS:
        accuracy = classifier.score(features(vectorizer, rows[split]), rows[split].labels)
        scores[split] = {"accuracy": float(accuracy), "rows": len(rows[split])}
    return pool(scores)


def features(vectorizer: TfidfVectorizer, rows: GlueRows) -> scipy.sparse.csr_matrix:
    """Return the TF-IDF of each text of the rows. For pairs, their product and absolute difference follow."""
    parts = [vectorizer.transform(texts) for texts in rows.inputs]
    if len(parts) == 2:
        first, second = parts
        parts.append(first.multiply(second))
        parts.append(abs(first - second))
    return scipy.sparse.hstack(parts, format="csr")
