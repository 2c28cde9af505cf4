"""--wandb-project gives each training its own wandb run, and ends in one line if wandb cannot start."""

from types import ModuleType, SimpleNamespace

import pytest
from fairseq.logging import progress_bar

from lln_fairseq.errors import InputError
from tests.fairseq_runs import train
from tests.training.conftest import RUN_OPTIONS


class FakeWandb:
    """The part of wandb that fairseq uses. A run belongs to the process until it is finished."""

    __version__ = "0.0"

    def __init__(self):
        self.run = None
        self.runs = []
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
def train_with_wandb(corpus, tmp_path, monkeypatch):
    """Return a function that trains in the directory `name`, with a module in the place of wandb."""

    def run(wandb, name="a"):
        monkeypatch.setattr(progress_bar, "wandb", wandb)
        run_options = (*RUN_OPTIONS, "--wandb-project", "x")
        train(monkeypatch, tmp_path / f"{name}.log", corpus, tmp_path / name, *run_options)

    return run


def test_trainings_of_one_process_have_separate_runs(train_with_wandb):
    wandb = FakeWandb()
    train_with_wandb(wandb, "a")
    train_with_wandb(wandb, "b")

    assert [run["name"] for run in wandb.runs] == ["a", "b"]
    assert wandb.run is None
    for run in wandb.runs:
        assert {(1, "train_inner/loss"), (2, "train_inner/loss"), (2, "valid/loss")} <= set(run["rows"])
        assert run["config"]


def test_run_that_was_active_before_stays_active(train_with_wandb):
    wandb = FakeWandb()
    wandb.init("x", False, "mine")
    train_with_wandb(wandb)
    assert wandb.run["name"] == "mine"


@pytest.mark.parametrize("wandb", [None, ModuleType("wandb")], ids=["not installed", "folder of that name"])
def test_missing_package_is_an_error(wandb, train_with_wandb):
    with pytest.raises(InputError, match=r"^--wandb-project needs a package that is not installed: pip install wandb"):
        train_with_wandb(wandb)


def test_error_of_wandb_is_one_line(train_with_wandb):
    wandb = FakeWandb()

    def fail(**kwargs):
        raise TypeError("init() got an unexpected keyword argument 'reinit'\nand more")

    wandb.init = fail
    with pytest.raises(InputError, match=r"^wandb 0\.0 does not start: .* argument 'reinit'\. Try WANDB_MODE=offline"):
        train_with_wandb(wandb)
