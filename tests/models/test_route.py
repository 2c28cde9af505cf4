"""The way of one attention call, from the layer to the kernel, stays short."""

import sys
from pathlib import Path

import pytest
import torch

import lln_fairseq
from lln_fairseq.ops.backends import cpu
from lln_fairseq.ops.formula import LLN, Spec
from tests.models.small_model import build_model

PACKAGE = Path(lln_fairseq.__file__).parent
MODELS = {
    "average": {},
    "joint": {"lln_diag_mix": "joint_offset"},
    "global": {"lln_diag_mix": "joint_offset", "lln_diag_global_tokens": "first_segment"},
}
MOST_CALLS = {"average": 22, "joint": 24, "global": 30}
MOST_FILES = {"average": 7, "joint": 7, "global": 9}


@pytest.mark.parametrize("name", MODELS)
def test_layer_makes_few_calls_in_few_files(name):
    if reason := cpu.reason_against(Spec(LLN), torch.empty(1, 1, 1, 16)):
        pytest.skip(reason)
    encoder = build_model(attention="lln_diag", **MODELS[name]).train().encoder.sentence_encoder
    tokens = torch.randint(5, 60, (4, 64), generator=torch.Generator().manual_seed(0))
    tokens[:, 20:22] = 2  # </s></s>
    tokens[1, 50:] = 1  # padding
    encoder(tokens)  # the first call compiles the kernel
    layer = encoder.layers[0]
    inside = []
    calls = []

    def count_call(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and inside and path.is_relative_to(PACKAGE):
            calls.append(path)

    layer.register_forward_pre_hook(lambda *_: inside.append(True))
    layer.register_forward_hook(lambda *_: inside.clear())
    sys.setprofile(count_call)
    try:
        encoder(tokens)
    finally:
        sys.setprofile(None)

    assert 10 < len(calls) <= MOST_CALLS[name]
    assert len(set(calls)) <= MOST_FILES[name]
