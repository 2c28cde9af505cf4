"""Models with global tokens: the encoder finds the first segments, also for two texts and in the backward pass."""

import pytest
import torch
import torch.distributed as dist
from fairseq.data.data_utils import load_indexed_dataset
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from lln_fairseq.analysis import measure
from lln_fairseq.analysis.probe import ablated, record_layers
from lln_fairseq.analysis.report import measure_model
from lln_fairseq.errors import UserError
from lln_fairseq.inference.loading import load_model
from lln_fairseq.ops.formula import MAX_FIRST_SEGMENT
from lln_fairseq.ops.lln import lln_diag_attention
from tests.fairseq_runs import (
    CLASSIFICATION,
    LLN,
    WORDS,
    binarize,
    make_classification,
    make_dictionary,
    sentences,
    train,
)
from tests.models import small_model
from tests.tasks.test_tasks import make_classifier

BOS, PAD, EOS = 0, 1, 2
GLOBAL = dict(attention="lln_diag", lln_diag_mix="joint_offset", lln_diag_block_size=8)
FIRST_SEGMENT = GLOBAL | dict(lln_diag_global_tokens="first_segment")
FLAGS = ("--lln-diag-mix", "joint_offset", "--lln-diag-block-size", 8)


def build_model(**options):
    """Build a small model with a classification head and with noise in all parameters, in evaluation mode."""
    model = small_model.build_model(**options)
    model.register_classification_head("head", num_classes=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def pairs(*lengths, seed=0):
    """Return the tokens of pairs of random texts, padded to one length; (5, 9) are the lengths of the texts of a pair.

    A second length of None makes a single text.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for first, second in lengths:
        row = [BOS, *torch.randint(4, 60, (first,), generator=generator).tolist(), EOS]
        if second is not None:
            row += [EOS, *torch.randint(4, 60, (second,), generator=generator).tolist(), EOS]
        rows.append(torch.tensor(row))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


BATCH = ((5, 40), (20, 7), (30, None), (0, 3))


def record_lengths(model):
    """Return a list to which every call of an attention of the model appends the lengths of the first segments."""
    lengths = []
    for layer in model.encoder.sentence_encoder.layers:
        layer.register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[1].first_lengths.tolist()))
    return lengths


def features(model, tokens):
    return model(tokens, features_only=True)[0]


def test_encoder_counts_tokens_of_first_segments():
    model = build_model(**FIRST_SEGMENT)
    lengths = record_lengths(model)
    features(model, pairs(*BATCH))
    assert lengths == 2 * [[7, 22, 1, 2]]


@pytest.mark.parametrize(("first", "bound"), [(40, 42), (126, 128), (140, 142)])
def test_bound_of_global_tokens_is_that_of_the_batch(first, bound, monkeypatch):
    bounds = []

    def record(*arguments, global_tokens, max_global_tokens, **options):
        bounds.append(max_global_tokens)
        return lln_diag_attention(
            *arguments, global_tokens=global_tokens, max_global_tokens=max_global_tokens, **options
        )

    model = build_model(**FIRST_SEGMENT, max_positions=200)
    contexts = []
    model.encoder.sentence_encoder.layers[0].register_forward_pre_hook(lambda _, inputs: contexts.append(inputs[1]))
    monkeypatch.setattr("lln_fairseq.attention.lln_diag.lln_diag_attention", record)

    features(model, pairs((5, 40), (first, 7)))

    assert bounds == 2 * [min(bound, MAX_FIRST_SEGMENT)]
    assert contexts[0].max_first_length == contexts[0].rows(slice(1)).max_first_length == bound


def test_negative_lengths_are_rejected():
    with pytest.raises(ValueError, match="first_lengths must be at least 0, got -2"):
        build_model(**FIRST_SEGMENT)(pairs((5, 40), (2, 3)), first_lengths=torch.tensor([4, -2]))


def test_number_and_first_segment_of_equal_length_agree():
    tokens = pairs((5, 40), (5, 12))
    by_number = features(build_model(**GLOBAL, lln_diag_global_tokens="7"), tokens)
    by_segment = features(build_model(**FIRST_SEGMENT), tokens)
    without = features(build_model(**GLOBAL), tokens)
    real = tokens != PAD
    assert torch.equal(by_number[real], by_segment[real])
    assert not torch.allclose(by_number[real], without[real], atol=1e-3)


@pytest.mark.parametrize("global_tokens", ["7", "first_segment"])
def test_features_depend_neither_on_padding_nor_on_the_batch(global_tokens):
    model = build_model(**GLOBAL, lln_diag_global_tokens=global_tokens)
    tokens = pairs(*BATCH)
    in_batch = features(model, tokens)
    for row, (tokens_of_row, features_of_row) in enumerate(zip(tokens, in_batch, strict=True)):
        length = int((tokens_of_row != PAD).sum())
        alone = features(model, tokens_of_row[None, :length])[0]
        torch.testing.assert_close(features_of_row[:length], alone, rtol=1e-4, atol=1e-5, msg=str(row))


def gradients(model, *batches, autocast=False):
    """Return the gradients of the parameters after one backward pass over several forward passes."""
    model.zero_grad()
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = [model(**batch, classification_head_name="head")[0] for batch in batches]
    sum(out.float().square().sum() for out in outputs).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


RECOMPUTED = [{"checkpoint_activations": True}, {"checkpoint_activations": True, "offload_activations": True}]
FIRST = pairs((5, 40), (20, 7), (30, None))
SECOND = pairs((30, 3), (2, 50), (9, 9), seed=1)
CALLS = {
    "two towers": ({"two_towers": True}, [{"src_tokens": FIRST, "other_tokens": SECOND}]),
    "two forward passes": ({}, [{"src_tokens": FIRST}, {"src_tokens": SECOND}]),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("options", RECOMPUTED)
@pytest.mark.parametrize("name", CALLS)
def test_recomputation_has_the_lengths_and_the_precision_of_its_own_forward_pass(name, options, autocast):
    towers, batches = CALLS[name]
    model = build_model(**FIRST_SEGMENT, **towers, dropout=0.1, attention_dropout=0.1).train()
    recomputing_model = build_model(**FIRST_SEGMENT, **towers, **options, dropout=0.1, attention_dropout=0.1).train()

    expected = gradients(model, *batches, autocast=autocast)
    actual = gradients(recomputing_model, *batches, autocast=autocast)

    assert actual.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(actual[key], gradient, rtol=1e-5, atol=1e-6)


def test_recomputation_works_in_ddp_that_looks_for_unused_parameters(tmp_path):
    """configs/finetune.yaml sets find_unused_parameters: the head of masked tokens has no part in a classification."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(build_model(checkpoint_activations=True), find_unused_parameters=True)
        model(FIRST, classification_head_name="head")[0].sum().backward()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"checkpoint_activations": True}, {"feed_forward_tokens": 16}])
def test_instruments_measure_sequences_with_their_own_lengths(options):
    model = build_model(**FIRST_SEGMENT, **options)
    tokens = pairs(*BATCH)

    layers = record_layers(model, {"src_tokens": tokens})
    together = measure.measure_batch(layers[1].attention, layers[1].q, layers[1].k, layers[1].context)

    for row, tokens_of_row in enumerate(tokens):
        length = int((tokens_of_row != PAD).sum())
        (_, layer) = record_layers(model, {"src_tokens": tokens_of_row[None, :length]})
        alone = measure.measure_batch(layer.attention, layer.q, layer.k, layer.context)
        entropy = measure.NAMES.index("entropy")
        torch.testing.assert_close(together[row, entropy], alone[0, entropy], rtol=1e-4, atol=1e-5)
    with torch.no_grad(), ablated(model):
        ablated_features = features(model, tokens)
    torch.testing.assert_close(ablated_features, features(model, tokens))
    assert measure_model(model, [{"src_tokens": tokens}]).sequences == len(tokens)


@pytest.fixture(scope="module")
def pair_data(tmp_path_factory):
    """Return the directory of a binarized classification of pairs with two classes."""
    sizes = (("train", 60), ("valid", 11))
    folder = make_classification(tmp_path_factory.mktemp("pairs"), sizes)
    dictionary = make_dictionary(folder / "input1" / "dict.txt", WORDS)
    for seed, (split, count) in enumerate(sizes, start=len(sizes)):
        binarize(sentences(count, seed), dictionary, folder / "input1" / split)
    return folder


def test_run_trains_and_loads(pair_data, tmp_path, monkeypatch):
    options = (*CLASSIFICATION, *LLN, *FLAGS, "--lln-diag-global-tokens", "first_segment", "--separator-token", EOS)
    options = (*options, "--shorten-method", "truncate", "--checkpoint-activations")
    train(monkeypatch, tmp_path / "log", pair_data, tmp_path / "run", *options)

    changes = ("--max-update", 6, "--lln-diag-global-tokens", "16")
    with pytest.raises(UserError, match=r"lln_diag_global_tokens\) = first_segment in the checkpoint, now 16"):
        train(monkeypatch, tmp_path / "log", pair_data, tmp_path / "run", *options, *changes)
    model, task = load_model(str(tmp_path / "run/checkpoint_last.pt"))
    task.load_dataset("valid")
    batch = task.dataset("valid").collater([task.dataset("valid")[row] for row in range(3)])
    lengths = record_lengths(model)
    model(**batch["net_input"], features_only=True)
    tokens = batch["net_input"]["src_tokens"]
    for length, row in zip(lengths[0], tokens.tolist(), strict=True):
        assert row[length - 1 : length + 1] == [EOS, EOS]


def test_cut_rows_keep_their_first_segments(pair_data):
    options = {"separator_token": EOS, "shorten_method": "truncate", "no_shuffle": True, "max_positions": 20}
    task = make_classifier("lln_sentence_prediction", pair_data, init_token=BOS, **options)
    dataset = task.load_dataset("valid")
    batch = dataset.collater([dataset[row] for row in range(len(dataset))])
    model = build_model(**FIRST_SEGMENT)
    lengths = record_lengths(model)
    model(**batch["net_input"], features_only=True)
    lines = load_indexed_dataset(str(pair_data / "input0/valid"), None)
    seconds = load_indexed_dataset(str(pair_data / "input1/valid"), None)
    assert max(map(len, lines)) > 20
    for length, first, second in zip(lengths[0], lines, seconds, strict=True):
        assert length == min(len(first) + 1, max(10, 20 - len(second) - 1))


def count_reads(monkeypatch):
    """Return a list to which every read of a tensor's values appends the name of its method, from now on."""
    reads = []

    def counted(name, method):
        def call(tensor, *arguments):
            reads.append(name)
            return method(tensor, *arguments)

        return call

    for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__index__", "__float__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
    return reads


READERS = {
    "joint": FIRST_SEGMENT,
    "checkpointing": FIRST_SEGMENT | {"checkpoint_activations": True},
    "blocks": dict(attention="block_diag", block_diag_block_size=8, block_diag_global_tokens="first_segment"),
    "window": dict(attention="window", window_block_size=8, window_global_tokens="first_segment"),
    "softmax layer": FIRST_SEGMENT | {"softmax_layers": "1"},
    "average": {"attention": "lln_diag"},
    "rotary": FIRST_SEGMENT | {"rotary": True, "no_token_positional_embeddings": True},
}


@pytest.mark.parametrize("options", READERS.values(), ids=list(READERS))
def test_forward_pass_reads_once_from_the_device(options, monkeypatch):
    model = build_model(**options, attention_dropout=0.0).train()  # a seed of dropout is drawn and read on the host
    tokens = pairs(*BATCH)
    reads = count_reads(monkeypatch)
    out = model(tokens, classification_head_name="head")[0]
    assert reads == ["tolist"]
    out.sum().backward()
    assert reads == ["tolist"]


def test_compiled_model_takes_other_lengths_without_another_compilation():
    model = build_model(**FIRST_SEGMENT, encoder_layers=1)
    compiled = torch.compile(model, backend="eager")
    frames = []
    with torch.no_grad():
        for first in (20, 22, 25, 31):
            tokens = pairs((5, 30), (first, 40 - first), (3, 9))
            torch.testing.assert_close(features(compiled, tokens), features(model, tokens))
            frames.append(counters["frames"]["total"])
    torch.compiler.reset()
    assert frames[1:] == 3 * [frames[1]]
