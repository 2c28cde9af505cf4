"""List the GLUE tasks."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .published_files import FILES, Published

_FILES = {"train": "train.tsv", "valid": "dev.tsv", "test": "test.tsv"}


@dataclass(frozen=True)
class GlueTask:
    """Describes a GLUE task and the format of its files.

    Attributes:
        name: name of the task and of its directory.
        inputs: names of the columns with the input texts.
        labels: the labels in the files; class k of a model is labels[k]. Empty for a regression.
        published: the files to download if --source is not given.
        label: name of the column with the label or the score.
        files: the file of each split, by fairseq's name of the split.
        header: the column names of each split whose file has no header line, by fairseq's name of the split.
        skip_broken: True leaves out labeled rows with a wrong number of columns, and counts them. False raises
            UserError for such a row.
    """

    name: str
    inputs: tuple[str, ...]
    labels: tuple[str, ...]
    published: tuple[Published, ...]
    label: str = "label"
    files: Mapping[str, str] = field(default_factory=_FILES.copy)
    header: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    skip_broken: bool = False


_COLA = ("source", "label", "mark", "sentence")
_ENTAILMENT = ("entailment", "not_entailment")

_TASKS = (
    GlueTask(
        "MNLI",
        inputs=("sentence1", "sentence2"),
        labels=("contradiction", "neutral", "entailment"),  # the order of fairseq's published MNLI models
        label="gold_label",
        files={
            "train": "train.tsv",
            "valid": "dev_matched.tsv",
            "valid1": "dev_mismatched.tsv",
            "test": "test_matched.tsv",
            "test1": "test_mismatched.tsv",
        },
        published=(FILES["MNLI.zip"],),
    ),
    GlueTask(
        "QNLI",
        inputs=("question", "sentence"),
        labels=_ENTAILMENT,
        published=(FILES["QNLIv2.zip"],),
    ),
    GlueTask(
        "QQP",
        inputs=("question1", "question2"),
        labels=("0", "1"),  # different, duplicate
        label="is_duplicate",
        published=(FILES["QQP-clean.zip"],),
        skip_broken=True,  # in older copies a line break inside a question splits a row
    ),
    GlueTask(
        "SST-2",
        inputs=("sentence",),
        labels=("0", "1"),  # negative, positive
        published=(FILES["SST-2.zip"],),
    ),
    GlueTask(
        "RTE",
        inputs=("sentence1", "sentence2"),
        labels=_ENTAILMENT,
        published=(FILES["RTE.zip"],),
    ),
    GlueTask(
        "MRPC",
        inputs=("#1 String", "#2 String"),
        labels=("0", "1"),  # different, paraphrase
        label="Quality",
        published=(FILES["msr_paraphrase_train.txt"], FILES["msr_paraphrase_test.txt"], FILES["mrpc_dev_ids.tsv"]),
    ),
    GlueTask(
        "CoLA",
        inputs=("sentence",),
        labels=("0", "1"),  # unacceptable, acceptable
        header={"train": _COLA, "valid": _COLA},
        published=(FILES["CoLA.zip"],),
    ),
    GlueTask(
        "STS-B",
        inputs=("sentence1", "sentence2"),
        labels=(),
        label="score",
        published=(FILES["STS-B.zip"],),
    ),
)
GLUE_TASKS = {task.name: task for task in _TASKS}
