"""Half precision on a GPU, shown with tensors on the CPU: the dtype of a GPU, and layers that are converted to it."""

import copy
import pickle

import pytest
import torch

from lln_fairseq.models.half_precision import bfloat16_on_gpu, convert_layers
from tests.helpers import relative_rms
from tests.models.small_model import build_model

GPU = torch.device("cuda")
TOKENS = torch.randint(4, 60, (3, 50), generator=torch.Generator().manual_seed(0))
TOKENS[1, 30:] = 1  # padding


@pytest.fixture
def capability(monkeypatch):
    """Return a function that sets the compute capability of the GPU."""
    return lambda *numbers: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: numbers)


@pytest.mark.filterwarnings("ignore:User provided device_type")  # there is no GPU here
def test_only_gpus_with_bfloat16_train_with_autocast(capability):
    capability(8, 0)
    context = bfloat16_on_gpu(GPU)
    assert (context.device, context.fast_dtype) == ("cuda", torch.bfloat16)
    assert not isinstance(bfloat16_on_gpu(torch.device("cpu")), torch.autocast)
    capability(7, 5)
    assert not isinstance(bfloat16_on_gpu(GPU), torch.autocast)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{"attention": "softmax"}, {"attention": "lln_diag", "rotary": True}], ids=str)
def test_converted_layers_leave_inputs_and_outputs_in_float32(options, dtype):
    model = build_model(**options)
    model.register_classification_head("head", num_classes=3)
    layers = model.encoder.sentence_encoder.layers
    expected = model(TOKENS, features_only=True)[0].detach()
    dtypes = []
    layers[1].fc1.register_forward_hook(lambda _, inputs, out: dtypes.append((inputs[0].dtype, out.dtype)))

    convert_layers(layers, dtype)

    is_real = TOKENS.ne(1)
    with torch.no_grad():
        for converted in (model, copy.deepcopy(model)):
            out = converted(TOKENS, features_only=True)[0]
            assert out.dtype == torch.float32
            assert 1e-5 < relative_rms(out[is_real], expected[is_real]) < 0.02
        assert model(TOKENS)[0].dtype == torch.float32
        assert model(TOKENS, classification_head_name="head")[0].dtype == torch.float32
    assert set(dtypes) == {(dtype, dtype)}
    others = [parameter.dtype for name, parameter in model.named_parameters() if ".layers." not in name]
    assert set(others) == {torch.float32}


def test_converted_layers_can_be_pickled():
    model = build_model()
    layers = model.encoder.sentence_encoder.layers
    convert_layers(layers, torch.bfloat16)
    x = torch.randn(7, 2, 32)
    assert torch.equal(pickle.loads(pickle.dumps(layers[0]))(x), layers[0](x))
