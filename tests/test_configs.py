"""Test that the YAML files agree with the dataclasses, the presets and the tables of tasks."""

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
from data_prep.lra_tasks import LRA_TASKS
from lln_fairseq.attention import MECHANISMS
from lln_fairseq.models.lln_roberta import PRESETS, RobertaConfig
from lln_fairseq.models.options import mechanism_by_option
from lln_fairseq.tasks.sentence_prediction import LLNSentencePredictionConfig
from lln_fairseq.training.recipes import layout_names, layout_options
from lln_fairseq.training.settings import split_global_batch
from tests.helpers import with_representatives

CONFIGS = Path(__file__).parents[1] / "configs"


def load_config(group, name):
    return yaml.safe_load((CONFIGS / group / f"{name}.yaml").read_text())


def config_names(group):
    return {path.stem for path in (CONFIGS / group).glob("*.yaml")}


def test_every_attention_and_preset_has_a_file():
    assert config_names("attention") == set(MECHANISMS)
    assert config_names("model") == {*PRESETS, "roberta", "minilm"}


@pytest.mark.parametrize("attention", sorted(MECHANISMS))
def test_attention_files_list_options_with_defaults(attention):
    options = load_config("attention", attention)

    assert options.pop("attention") == attention
    fields = dataclasses.fields(MECHANISMS[attention].config)
    assert options == {f"{attention}_{field.name}": field.default for field in fields}


@pytest.mark.parametrize("layout", layout_names())
def test_layout_sets_options_of_its_attention_and_names_the_directory(layout, composed):
    options = layout_options(layout)
    others = [key for key in mechanism_by_option() if key in options and not key.startswith(f"{options['attention']}_")]

    assert not others
    assert composed("pretrain", f"layout={layout}").checkpoint.save_dir == f"runs/pretrain_{layout}"
    config = composed("finetune", "glue=qnli", f"layout={layout}")
    assert config.checkpoint.save_dir == f"runs/qnli_{layout}"
    assert options.items() <= config.model.items()


def test_model_file_lists_options_with_defaults():
    defaults = {field.name: field.default for field in dataclasses.fields(RobertaConfig)}
    del defaults["_name"]
    del defaults["attention"]

    assert load_config("model", "roberta") == defaults


GLUE_TASK_OF_FILE = {name.lower().replace("-", ""): name for name in GLUE_TASKS}  # sst2: SST-2
WORKERS_OF_RUN = {"cpu": 1, "gpu1": 1, "gpu1_bf16": 1, "gpu8": 8, "gpu8_bf16": 8, "slurm": 16, "cpu_workers": 2}
OTHER_RUNS = [f"run={run}" for run in WORKERS_OF_RUN if run != "gpu1"]  # they are compared with gpu1


@pytest.fixture(scope="module")
def composed():
    """A function (stage, *overrides) that returns the configuration that fairseq-hydra-train would train with."""
    GlobalHydra.instance().clear()
    for stage in ("pretrain", "finetune", "lra"):
        hydra_init(stage)

    @functools.cache
    def compose_once(stage, *overrides):
        config = compose(stage, list(overrides), return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        with open_dict(config):
            del config["hydra"]
        add_defaults(config)
        return OmegaConf.create(OmegaConf.to_container(config, resolve=True, enum_to_str=True))

    with initialize_config_dir(str(CONFIGS), version_base="1.1"), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("WORLD_SIZE", "2")  # set by torchrun, and read by run=cpu_workers
        monkeypatch.setenv("RANK", "0")
        yield lambda *args: copy.deepcopy(compose_once(*args))
    HydraConfig.instance().cfg = None  # later tests in this process are not run by Hydra


@pytest.mark.parametrize("stage", ["finetune", "lra"])
def test_recipes_list_options_that_fairseq_does_not_have(stage):
    """Hydra requires a + before an override of an option that the recipe does not list."""
    options = set()
    for field in dataclasses.fields(LLNSentencePredictionConfig):
        if not str(field.default).startswith("${"):
            options.add(field.name)
    options -= {field.name for field in dataclasses.fields(SentencePredictionConfig)}

    recipe = yaml.safe_load((CONFIGS / f"{stage}.yaml").read_text())

    assert options <= recipe["task"].keys()


def test_every_glue_task_and_run_has_a_file():
    assert config_names("glue") == {*GLUE_TASK_OF_FILE, "demo", "demo_minilm"}
    assert config_names("run") == set(WORKERS_OF_RUN)


@pytest.mark.parametrize("file", GLUE_TASK_OF_FILE)
def test_glue_files_agree_with_tasks(file, composed):
    task = GLUE_TASKS[GLUE_TASK_OF_FILE[file]]

    config = composed("finetune", f"glue={file}")

    assert config.task.data == f"data-bin/glue/{task.name}"
    assert config.task.num_classes == (len(task.labels) or 1)
    assert config.task.regression_target == config.criterion.regression_target == (not task.labels)
    assert config.dataset.valid_subset.split(",") == [split for split in task.files if split.startswith("valid")]
    metrics = {"CoLA": "mcc", "STS-B": "pearson_spearman"}
    assert config.checkpoint.best_checkpoint_metric == metrics.get(task.name, "accuracy")
    assert config.checkpoint.save_dir == f"runs/{file}_lln_diag"


@pytest.mark.parametrize("interval", [0, 50])
def test_finetuning_saves_after_every_validation(interval, composed):
    """With an interval of 0, it validates and saves only at the end of an epoch."""
    config = composed("finetune", f"dataset.validate_interval_updates={interval}")
    assert config.checkpoint.save_interval_updates == interval
    assert config.checkpoint.keep_interval_updates == 1


def test_small_recipe_replaces_schedule_of_task(composed):
    config = composed("finetune", "glue=rte", "recipe=small")
    assert config.task.warmup_fraction == 0.1
    assert config.optimization.lr == [1e-4]
    assert config.optimization.max_epoch == 10
    recipe_of_task = composed("finetune", "glue=rte")
    assert config.task.global_batch == recipe_of_task.task.global_batch
    assert recipe_of_task.task.warmup_fraction is None


def test_every_lra_task_has_a_file():
    assert config_names("lra") == {*LRA_TASKS, "recipe"}


@pytest.mark.parametrize("name", LRA_TASKS)
def test_lra_files_agree_with_tasks(name, composed):
    task = LRA_TASKS[name]

    config = composed("lra", f"lra={name}")

    assert config.task.num_classes == len(task.labels)
    assert config.task.two_towers == (task.inputs == 2)
    assert config.task.data == f"data-bin/lra/{name}"
    assert config.checkpoint.save_dir == f"runs/lra/lln_diag/{name}"


@pytest.mark.parametrize("name", LRA_TASKS)
def test_lra_validation_sees_same_rows_with_another_batch_size(name, composed):
    seen = []
    for batch_size in (8, 32):
        dataset = composed("lra", f"lra={name}", f"dataset.batch_size={batch_size}").dataset
        if dataset.max_valid_steps is None:
            seen.append("all rows")
        else:
            seen.append(dataset.max_valid_steps * dataset.batch_size_valid)
    assert seen[0] == seen[1]


COMBINATIONS = [
    *itertools.product(["pretrain"], [f"corpus={corpus}" for corpus in sorted(config_names("corpus"))], OTHER_RUNS),
    *itertools.product(["finetune"], [f"glue={task}" for task in sorted(config_names("glue"))], OTHER_RUNS),
    *itertools.product(["lra"], [f"lra={task}" for task in LRA_TASKS], OTHER_RUNS),
]
REPRESENTATIVES = [
    ("pretrain", "corpus=wikitext103", "run=gpu8"),
    ("finetune", "glue=sst2", "run=gpu8"),
    ("lra", "lra=text", "run=gpu8"),
    ("finetune", "glue=cola", "run=cpu"),
]


@pytest.mark.parametrize("combination", with_representatives(COMBINATIONS, *REPRESENTATIVES), ids=" ".join)
def test_run_changes_only_how_batch_is_split(combination, composed):
    *recipe, run_override = combination
    run = run_override.removeprefix("run=")
    workers = WORKERS_OF_RUN[run]
    config = composed(*combination)
    single_gpu_config = composed(*recipe, "run=gpu1")

    config.distributed_training.distributed_world_size = workers
    global_batch = config.task.global_batch
    split_global_batch(config)

    if global_batch:
        assert config.dataset.max_tokens is None  # it would make batches of long rows smaller
        assert config.dataset.batch_size * config.optimization.update_freq[0] * workers == global_batch
    for part in ("task", "criterion", "model", "optimizer", "lr_scheduler", "checkpoint"):
        assert config[part] == single_gpu_config[part]
    for key in ("lr", "max_update", "max_epoch", "clip_norm"):
        assert config.optimization[key] == single_gpu_config.optimization[key]
    assert config.common.fp16 == (run in ("gpu1", "gpu8", "slurm"))
    assert config.common.bf16 == run.endswith("_bf16")


@pytest.mark.parametrize("size", PRESETS)
def test_every_preset_composes(size, composed):
    assert composed("pretrain", f"model={size}").model._name == f"lln_roberta_{size}"
