"""Warnings to the authors of fairseq, which no option of a training mends: here they are kept out of its log.

Standard library only: `python -m lln_fairseq.train` hides Hydra's before Hydra is imported.
"""

import warnings

HYDRA = r"hydra\.|fairseq_cli\."
ANY = ""  # Hydra warns in the name of whatever called the program, a console script for example

# How a warning begins, and the module that it is about, as regular expressions.
FOR_AUTHORS = (
    (r"`torch\.cuda\.amp\.\w+\(args\.\.\.\)` is deprecated", r"fairseq\."),
    (r"'pin_memory' argument is set as true but no accelerator is found", r"torch\.utils\.data\.dataloader$"),
    (r"Using (a )?non-full backward hook", r"torch\.nn\.modules\.module$"),  # fairseq's search for the first NaN
    (r"\s*The version_base parameter is not specified", HYDRA),
    (r"\s*'[\w./-]+' is validated against ConfigStore schema", ANY),
    (r"\s*The strict flag in the compose API is deprecated", HYDRA),
    (r"hydra\.experimental\.\w+\(\) is no longer experimental", HYDRA),
    (r"In '\w+': Usage of deprecated keyword in package header", HYDRA),
)


def hide_advice() -> None:
    """For the rest of this process and those that it forks; a process that is spawned imports the patches, and this."""
    for message, module in FOR_AUTHORS:
        warnings.filterwarnings("ignore", message, module=module)
