"""--wandb-project: one line where it cannot work, a run of its own for each training."""

from types import ModuleType, SimpleNamespace

import pytest
from fairseq.logging import progress_bar

from lln_fairseq.errors import InputError
from tests.fairseq_runs import LLN, MASKED_LM, train


class Wandb:
    """As much of wandb as fairseq uses: a run is the process's until it is finished."""

    __version__ = "0.0"

    def __init__(self):
        self.run, self.runs = None, []
        self.config = SimpleNamespace(update=lambda config: self.run["config"].append(config))

    def init(self, project, reinit, name):
        assert self.run is None
        self.run = {"name": name, "config": [], "rows": []}
        self.runs.append(self.run)

    def log(self, row, step):
        self.run["rows"].append((step, *row))

    def finish(self):
        self.run = None


@pytest.fixture
def follow(corpus, tmp_path, monkeypatch):
    """follow(wandb, name) trains with that module in wandb's place."""

    def run(wandb, name="a"):
        monkeypatch.setattr(progress_bar, "wandb", wandb)
        train(monkeypatch, tmp_path / f"{name}.log", corpus, tmp_path / name, *MASKED_LM, *LLN, "--wandb-project", "x",
              "--max-update", 2)  # fmt: skip

    return run


def test_trainings_of_one_process_have_a_run_each(follow):
    wandb = Wandb()
    follow(wandb, "a")
    follow(wandb, "b")
    assert [run["name"] for run in wandb.runs] == ["a", "b"]
    assert wandb.run is None
    for run in wandb.runs:
        assert {(1, "train_inner/loss"), (2, "train_inner/loss"), (2, "valid/loss")} <= set(run["rows"])
        assert run["config"]


def test_a_run_of_the_callers_goes_on(follow):
    wandb = Wandb()
    wandb.init("x", False, "mine")
    follow(wandb)
    assert wandb.run["name"] == "mine"


@pytest.mark.parametrize("wandb", [None, ModuleType("wandb")])  # the second: a folder of that name
def test_a_missing_package(wandb, follow):
    with pytest.raises(InputError, match=r"^--wandb-project needs a package that is not installed: pip install wandb"):
        follow(wandb)


def test_what_wandb_refuses_is_one_line(follow):
    wandb = Wandb()

    def refuse(**options):
        raise TypeError("init() got an unexpected keyword argument 'reinit'\nand more")

    wandb.init = refuse
    with pytest.raises(InputError, match=r"^wandb 0\.0 does not start: .* argument 'reinit'\. Try WANDB_MODE=offline"):
        follow(wandb)
