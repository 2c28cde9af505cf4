"""The YAML files say what the dataclasses and presets say."""

import copy
import dataclasses
import functools
import itertools
from pathlib import Path

import pytest
import yaml
from fairseq.dataclass.initialize import add_defaults, hydra_init
from fairseq.tasks.sentence_prediction import SentencePredictionConfig
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict

from data_prep.glue_tasks import GLUE_TASKS
from data_prep.lra_tasks import LRA_TASKS, STAND_INS
from lln_fairseq.attention import MECHANISMS
from lln_fairseq.models.lln_roberta import PRESETS, RobertaConfig
from lln_fairseq.tasks.sentence_prediction import LLNSentencePredictionConfig
from lln_fairseq.training.settings import split_global_batch
from tests.helpers import metrics_of, with_representatives

CONFIGS = Path(__file__).parents[1] / "configs"


def load(group, name):
    return yaml.safe_load((CONFIGS / group / f"{name}.yaml").read_text())


def names(group):
    return {path.stem for path in (CONFIGS / group).glob("*.yaml")}


def test_every_attention_and_every_preset_has_its_file():
    assert names("attention") == set(MECHANISMS)
    assert names("model") == {*PRESETS, "roberta", "minilm"}


@pytest.mark.parametrize("attention", sorted(MECHANISMS))
def test_attention_files_hold_the_options_with_their_defaults(attention):
    options = load("attention", attention)
    assert options.pop("attention") == attention
    fields = dataclasses.fields(MECHANISMS[attention].config)
    assert options == {f"{attention}_{field.name}": field.default for field in fields}


def test_the_model_file_holds_the_options_with_their_defaults():
    fields = [f for f in dataclasses.fields(RobertaConfig) if f.name not in ("_name", "attention")]
    assert load("model", "roberta") == {field.name: field.default for field in fields}


# fairseq's recipe (README.glue.md of its RoBERTa): learning rate, batch, updates, warm-up.
GLUE_RECIPES = {
    "MNLI": (1e-5, 32, 123873, 7432),
    "QNLI": (1e-5, 32, 33112, 1986),
    "QQP": (1e-5, 32, 113272, 28318),
    "RTE": (2e-5, 16, 2036, 122),
    "SST-2": (1e-5, 32, 20935, 1256),
    "MRPC": (1e-5, 16, 2296, 137),
    "CoLA": (1e-5, 16, 5336, 320),
    "STS-B": (2e-5, 16, 3598, 214),
}
FILES = {name.lower().replace("-", ""): name for name in GLUE_TASKS}  # sst2: SST-2
DEVICES = {"cpu": 1, "gpu1": 1, "gpu8": 8, "slurm": 16}
OTHERS = [f"run={run}" for run in DEVICES if run != "gpu1"]  # which is what they are compared with


@pytest.fixture(scope="module")
def composed():
    """compose(stage, *overrides) -> what fairseq-hydra-train hands to its training."""
    GlobalHydra.instance().clear()
    for stage in ("pretrain", "finetune", "lra"):
        hydra_init(stage)

    @functools.cache
    def make(stage, *overrides):
        config = compose(stage, list(overrides), return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        with open_dict(config):
            del config["hydra"]
        add_defaults(config)
        return OmegaConf.create(OmegaConf.to_container(config, resolve=True, enum_to_str=True))

    with initialize_config_dir(str(CONFIGS), version_base="1.1"):
        yield lambda *args: copy.deepcopy(make(*args))


@pytest.mark.parametrize("stage", ["finetune", "lra"])
def test_options_of_our_own_need_no_plus(stage):
    """Hydra wants one in front of what a file does not list."""
    own = {f.name for f in dataclasses.fields(LLNSentencePredictionConfig) if not str(f.default).startswith("${")}
    own -= {f.name for f in dataclasses.fields(SentencePredictionConfig)}
    assert own <= yaml.safe_load((CONFIGS / f"{stage}.yaml").read_text())["task"].keys()


def test_every_glue_task_has_its_file():
    assert names("glue") == {*FILES, "demo", "demo_minilm", "newsgroups", "newsgroups_long"}
    assert names("run") == set(DEVICES)


@pytest.mark.parametrize("file", FILES)
def test_glue_files_agree_with_the_table_of_tasks_and_the_recipe(file, composed):
    task, config = GLUE_TASKS[FILES[file]], composed("finetune", f"glue={file}")
    rate, batch, updates, warmup = GLUE_RECIPES[task.name]
    assert config.task.data == f"data-bin/glue/{task.name}"
    assert config.task.num_classes == task.num_classes
    assert config.task.regression_target == config.criterion.regression_target == (not task.labels)
    assert config.optimization.lr == [rate]
    assert config.task.global_batch == batch
    assert config.lr_scheduler.total_num_update == updates
    assert config.lr_scheduler.warmup_updates == warmup
    assert config.dataset.valid_subset.split(",") == [split for split in task.files if split.startswith("valid")]
    chosen_by = {"pearson_spearman": "pearson"}.get(name := config.checkpoint.best_checkpoint_metric, name)
    assert chosen_by in metrics_of(task.metric)
    assert config.checkpoint.save_dir == f"runs/{file}_lln_diag"


# Skyformer's code base: length, classes, batch, learning rate, warm-up, updates between validations and their batches.
LRA_RECIPES = {
    "listops": (2048, 10, 32, 1e-4, 1000, 500, 62),
    "text": (4096, 2, 32, 1e-4, 80, 500, 200),
    "retrieval": (4096, 2, 16, 2e-4, 800, 1000, 300),
    "pathfinder": (1024, 2, 128, 2e-4, 312, 500, 156),
    "image": (1024, 10, 256, 1e-4, 175, 50, 20),
}


def test_lra_files_agree_with_the_table_of_tasks_and_the_recipe(composed):
    stand_ins = {f"{name}_stand_in" for name in STAND_INS}
    assert names("lra") == {*LRA_TASKS, *stand_ins, "recipe"}
    for name, (length, classes, batch, rate, warmup, interval, batches) in LRA_RECIPES.items():
        config, task = composed("lra", f"lra={name}"), LRA_TASKS[name]
        assert (config.task.max_positions, config.task.num_classes) == (length, classes)
        assert len(task.labels) == classes
        assert config.task.two_towers == (task.inputs == 2)
        assert config.task.data == f"data-bin/lra/{name}"
        assert (config.task.global_batch, config.optimization.lr) == (batch, [rate])
        assert (config.lr_scheduler.warmup_updates, config.optimization.max_update) == (warmup, 50000)
        assert (config.dataset.validate_interval_updates, config.dataset.max_valid_steps) == (interval, batches)
        assert config.checkpoint.save_interval_updates == interval
        assert config.checkpoint.save_dir == f"runs/lra/lln_diag/{name}"
        model = config.model
        assert (model._name, model.encoder_normalize_before, model.pooling) == ("lln_roberta_lra", True, "mean")
        if name in STAND_INS:
            stand_in = composed("lra", f"lra={name}_stand_in")
            assert stand_in.task.data == f"data-bin/lra/{STAND_INS[name].name}"
            assert stand_in.task.num_classes == len(STAND_INS[name].labels)
            assert stand_in.task.max_positions == length


@pytest.mark.parametrize("attention", ["nystrom", "linformer", "performer", "reformer", "skyformer"])
def test_lra_gives_each_mechanism_the_size_that_the_code_base_does(attention, composed):
    model = composed("lra", f"attention={attention}").model
    sizes = dict(nystrom="landmarks", linformer="projected_length", performer="num_features", reformer="hashes",
                 skyformer="landmarks")  # fmt: skip
    assert model.attention == attention
    assert model[f"{attention}_{sizes[attention]}"] == (2 if attention == "reformer" else 128)


COMBINATIONS = [
    *itertools.product(["pretrain"], [f"corpus={corpus}" for corpus in sorted(names("corpus"))], OTHERS),
    *itertools.product(["finetune"], [f"glue={task}" for task in sorted(names("glue"))], OTHERS),
    *itertools.product(["lra"], [f"lra={task}" for task in LRA_RECIPES], OTHERS),
]
REPRESENTATIVES = [
    ("pretrain", "corpus=wikitext103", "run=gpu8"),
    ("finetune", "glue=sst2", "run=gpu8"),
    ("lra", "lra=text", "run=gpu8"),
    ("finetune", "glue=cola", "run=cpu"),
]


@pytest.mark.parametrize("combination", with_representatives(COMBINATIONS, *REPRESENTATIVES), ids=" ".join)
def test_the_devices_change_nothing_but_the_split_of_the_batch(combination, composed):
    run = combination[-1].removeprefix("run=")
    config, other = composed(*combination), composed(*combination[:-1], "run=gpu1")
    config.distributed_training.distributed_world_size = DEVICES[run]
    wanted = config.task.global_batch
    split_global_batch(config)
    if wanted:
        total = config.dataset.batch_size * config.optimization.update_freq[0] * DEVICES[run]
        assert total == wanted
    for part in ("task", "criterion", "model", "optimizer", "lr_scheduler", "checkpoint"):
        assert config[part] == other[part]
    for key in ("lr", "max_update", "max_epoch", "clip_norm"):
        assert config.optimization[key] == other.optimization[key]
    assert not config.common.fp16 or run != "cpu"


def test_every_size_composes(composed):
    for size in PRESETS:
        assert composed("pretrain", f"model={size}").model._name == f"lln_roberta_{size}"
