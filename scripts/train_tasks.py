"""Train on the tasks of GLUE and of the Long Range Arena, and score the best checkpoints.

    scripts/finetune_sst2.sh runs/pretrain_lln_diag/checkpoint_best.pt run=gpu1
    scripts/glue_all.sh runs/pretrain_lln_diag/checkpoint_best.pt --seeds "1 2 3 4 5" run=gpu1
    scripts/lra.sh listops attention=lln_diag run=gpu1
    scripts/lra_all.sh --attentions "softmax lln_diag" --tasks "listops text" --seeds "1 2" run=gpu1

finetune_mnli.sh, finetune_qnli.sh and finetune_qqp.sh are for their tasks. Other words are Hydra overrides. Results are
written to glue/TASK/seedN next to the checkpoint, and to runs/lra/ATTENTION/TASK/seedN; for a single task,
checkpoint.save_dir selects another directory. glue_all.sh and lra_all.sh print the paper's Tables 1 and 5 at the end.

Run an interrupted command again to continue it. A finished training is not repeated: it only checks that its settings
and data have not changed. To prepare the data, see python -m data_prep.glue --help and python -m data_prep.lra --help
"""

import argparse
import itertools
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

import lln_fairseq
from lln_fairseq.attention.registry import parse_attention_spec
from lln_fairseq.command import child_environment, run_main
from lln_fairseq.errors import UserError
from lln_fairseq.files import no_such_checkpoint
from lln_fairseq.terminal import program_parser, progress_bar, show_update
from lln_fairseq.training.recipes import CONFIGS, format_override, layout_names
from scripts import tables

SAVE_DIR = "checkpoint.save_dir"
SEED = "common.seed"
START_MODEL = "checkpoint.finetune_from_model"
LRA_ATTENTIONS = "softmax lln lln_diag performer reformer skyformer nystrom"
DEFAULT_ATTENTION = "lln_diag"  # the default of configs/lra.yaml
# Overrides with which results would lie in the directory of another run, and what to use instead.
REFUSED = {
    "glue": {SEED: "--seed or --seeds", "glue": "another script or --tasks"},
    "lra": {SEED: "--seed or --seeds", "lra": "another task", "model.attention": "attention= or --attentions"},
}


def call(words: Sequence[str]) -> None:
    """Run `python -m WORDS` with its output on this terminal. If this process is interrupted, the program is ended.

    If the program fails, UserError is raised. The program has printed the reason.
    """
    process = subprocess.Popen([sys.executable, "-m", *words], env=child_environment())
    try:
        code = process.wait()
    finally:
        _terminate(process)
    if code == 1:  # the same command would fail again
        raise UserError("a step failed, see above")
    if code:
        raise UserError(f"a step ended with exit code {code}, see above; run the same command again to continue")


def call_logged(name: str, words: Sequence[str], log: Path, updates: int | None = None) -> None:
    """Run `python -m WORDS` like `call`, but append its output to a file, and show its updates in a progress bar.

    The error message after a failure has the last line of the output.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"{name}: output in {log}", file=sys.stderr)
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**child_environment(), "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    last = ""
    try:
        with log.open("a", buffering=1) as file, progress_bar(name, updates, "update", leave=True) as bar:
            for line in process.stdout:
                file.write(line)
                last = line.strip() or last
                found = re.search(r"num_updates=(\d+)", line)
                loss = re.search(r"\bloss=([\d.]+)", line)
                if found and loss and "train_inner" in line:
                    show_update(bar, int(found[1]), loss[1])
        code = process.wait()
    finally:
        _terminate(process)
    if code:
        raise UserError(f"{name} failed (exit code {code}): {last} (output in {log})")


def _terminate(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.terminate()
        process.wait()


def train_words(recipe: str, save_dir: Path, overrides: Iterable[str]) -> list[str]:
    """Return the words after `python -m` that train with configs/RECIPE.yaml, or resume or skip such a training."""
    directory = format_override(SAVE_DIR, save_dir)
    return ["lln_fairseq", "train", "--config-name", recipe, directory, *overrides]


def score(directory: Path, splits: Sequence[str], run: Callable[[Sequence[str]], None] = call) -> None:
    """Evaluate DIRECTORY/checkpoint_best.pt, and write DIRECTORY/SPLIT.json. Newer scores are kept."""
    checkpoint = directory / "checkpoint_best.pt"
    results = [directory / f"{split}.json" for split in splits]
    if not all(is_newer(file, checkpoint) for file in results):
        pattern = str(directory / "{split}.json")
        run(["lln_fairseq", "evaluate", str(checkpoint), f"--split={','.join(splits)}", "--json", pattern])


def is_newer(result: Path, source: Path) -> bool:
    """Return True if the result exists and was written after the file that it was computed from."""
    return result.exists() and result.stat().st_mtime > source.stat().st_mtime


def prepare_demo_data(directory: str, archive: str | None, tokenizer: Path | None = None) -> None:
    """Build the demo data, or keep it if it is built.

    `archive` is a local copy of its source; None downloads it. Without the directory of a tokenizer, one is trained.
    """
    words = ["data_prep.demo", "--out", directory]
    if tokenizer is not None:
        words += ["--tokenizer", str(tokenizer)]
    if archive:
        words += ["--archive", archive]
    call(words)


def attention_overrides(spec: str) -> list[str]:
    """Return the Hydra overrides for a layout or an attention spec such as "lln_diag:block_size=32"."""
    if spec in layout_names():
        return [f"layout={spec}"]
    name, options = parse_attention_spec(spec)
    return [f"attention={name}", *(f"model.{name}_{key}={value}" for key, value in options.items())]


def run_override() -> str:
    """Return the Hydra override of a training: on the GPU if there is one, otherwise on the CPU."""
    return "run=gpu1" if torch.cuda.is_available() else "run=cpu"


def last_value(option: str, overrides: Iterable[str]) -> str:
    """Return the value that the last override gives to an option, as text, or "" if no override sets it."""
    matching = [override for override in overrides if override.lstrip("+").startswith(f"{option}=")]
    if not matching:
        return ""
    try:
        return str(OverridesParser.create().parse_override(matching[-1]).value())
    except HydraException as error:
        raise UserError(f"{matching[-1]}: {str(error).splitlines()[0]}") from None


def compose_config(recipe: str, overrides: list[str]) -> Any:
    """Return the configuration that `lln-fairseq train --config-name RECIPE OVERRIDES` trains with."""
    lln_fairseq.register()  # before fairseq is imported: it configures the root logger
    from fairseq.dataclass.initialize import hydra_init

    hydra_init(recipe)  # registers the schema that fairseq checks against
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Hydra warns about version_base 1.1, which fairseq's command line uses
            with initialize_config_dir(str(CONFIGS), version_base="1.1"):
                return compose(recipe, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        first_paragraph = str(error).split("\n\n")[0]
        raise UserError(" ".join(first_paragraph.split())) from None


def seed_list(text: str) -> list[int]:
    try:
        seeds = [int(word) for word in text.split()]
    except ValueError:
        seeds = []
    if not seeds:
        raise argparse.ArgumentTypeError(f'must be whole numbers with spaces between them, got "{text}"')
    return seeds


def check_recipes(group: str, names: Iterable[str], kind: str = "task") -> None:
    """Raise UserError unless configs/GROUP has a recipe for every name. `kind` is what a name stands for."""
    known = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml") if path.stem != "recipe")
    for name in names:
        if name not in known:
            raise UserError(f"no such {kind}: {name} (known: {' '.join(known)})")


def finetune(checkpoint: str | None, task: str, seed: int, overrides: list[str]) -> None:
    """Fine-tune on a task of GLUE, and score the splits valid and, for MNLI, valid1."""
    check_recipes("glue", [task])
    if checkpoint is None:
        raise UserError("which checkpoint? for example runs/pretrain_lln_diag/checkpoint_best.pt (see --help)")
    if not Path(checkpoint).is_file():
        raise UserError(no_such_checkpoint(checkpoint))
    out = Path(last_value(SAVE_DIR, overrides) or Path(checkpoint).parent / "glue" / task / f"seed{seed}")
    start = format_override(START_MODEL, checkpoint)
    call(train_words("finetune", out, [start, f"glue={task}", f"{SEED}={seed}", *overrides]))
    score(out, ("valid1", "valid") if task == "mnli" else ("valid",))


def train_lra(attention: str, task: str, seed: int, overrides: list[str]) -> None:
    """Train on a task of the Long Range Arena, and score the splits valid and test."""
    check_recipes("lra", [task])
    out = Path(last_value(SAVE_DIR, overrides) or Path("runs/lra") / attention / task / f"seed{seed}")
    call(train_words("lra", out, [f"lra={task}", f"{SEED}={seed}", f"attention={attention}", *overrides]))
    score(out, ("valid", "test"))


def finetune_all(args: argparse.Namespace, overrides: list[str]) -> int:
    """Fine-tune on every task with every seed, and print Table 1."""
    if last_value(SAVE_DIR, overrides):
        raise UserError("glue_all.sh does not accept checkpoint.save_dir: every task and seed has its own directory")
    tasks = args.tasks.split()
    check_recipes("glue", tasks)
    for task, seed in itertools.product(tasks, args.seeds):
        finetune(args.checkpoint, task, seed, overrides)
    others = [task for task in tasks if task not in tables.GLUE.tasks]
    if others:
        scores = Path(args.checkpoint).parent / "glue" / "TASK" / "seedN" / "valid.json"
        print(f"not in Table 1: {', '.join(others)}; their scores are in {scores}")
    if len(others) == len(tasks):
        return 0
    return tables.main(["glue", str(Path(args.checkpoint).resolve().parent.parent)])


def train_lra_all(args: argparse.Namespace, overrides: list[str]) -> int:
    """Train every attention on every task with every seed, and print Table 5."""
    if last_value(SAVE_DIR, overrides) or last_value("attention", overrides):
        raise UserError("lra_all.sh accepts neither attention= nor checkpoint.save_dir=: use --attentions")
    check_recipes("lra", args.tasks.split())
    check_recipes("attention", args.attentions.split(), "attention")
    for seed, task, attention in itertools.product(args.seeds, args.tasks.split(), args.attentions.split()):
        train_lra(attention, task, seed, overrides)
    return tables.main(["lra", "runs/lra"])


def main(argv: list[str] | None = None) -> int:
    """Run the script whose name is the first argument, such as finetune_sst2, and return the exit code."""
    script, *arguments = argv or sys.argv[1:] or ["finetune_TASK"]
    is_lra = script.startswith("lra")
    parser = program_parser(f"scripts/{script}.sh", __doc__)
    if script == "lra":
        parser.add_argument("task", help="name of a recipe in configs/lra")
    elif not is_lra:
        parser.add_argument("checkpoint", nargs="?", help="pre-trained checkpoint to start from")
    if script.endswith("_all"):
        tasks = tables.LRA.tasks if is_lra else tables.GLUE.tasks
        parser.add_argument("--tasks", default=" ".join(tasks), help='default: "%(default)s"')
        seeds = "1" if is_lra else "1 2 3 4 5"
        parser.add_argument("--seeds", type=seed_list, default=seeds, help='default: "%(default)s"')
    else:
        parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    if script == "lra_all":
        parser.add_argument("--attentions", default=LRA_ATTENTIONS, help='default: "%(default)s"')
    args, overrides = parser.parse_known_args(arguments)

    def run() -> int:
        for option, instead in REFUSED["lra" if is_lra else "glue"].items():
            if last_value(option, overrides):
                raise UserError(f"use {instead} instead of {option}=, which does not name the directory of the results")
        if script == "lra_all":
            return train_lra_all(args, overrides)
        if script == "glue_all":
            return finetune_all(args, overrides)
        if script == "lra":
            train_lra(last_value("attention", overrides) or DEFAULT_ATTENTION, args.task, args.seed, overrides)
        else:
            finetune(args.checkpoint, script.removeprefix("finetune_"), args.seed, overrides)
        return 0

    return run_main(run, "")


if __name__ == "__main__":
    sys.exit(main())
