"""Measure the attention and the hidden states inside a model.

`record_layers` runs a model and returns the queries, keys and hidden states of every layer. `ablated` temporarily
disables skip connections or MLPs. `Probe` writes measurements of a fixed batch to TensorBoard while a model trains.
"""

import copy
import functools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lln_fairseq.analysis import layer_scalars, measure
from lln_fairseq.analysis.lognormal import log_entries
from lln_fairseq.analysis.rank_collapse import relative_residual
from lln_fairseq.attention import Attention, Context, reject_layer_mechanism

# The attributes by which an encoder layer is recognized.
LAYER_ATTRIBUTES = ("self_attn", "self_attn_layer_norm", "final_layer_norm", "fc1", "fc2")
HISTOGRAM_ENTRIES = 50_000  # the maximum number of entries of ln P in a histogram, evenly spaced


@dataclass
class Layer:
    """The queries, keys and hidden states of one layer for one batch. Padding is included, gradients are not."""

    attention: Attention  # a copy in float32 in evaluation mode
    q: Tensor  # (B, H, N, D) float32
    k: Tensor  # (B, H, N, D) float32
    context: Context  # of the call
    before: Tensor  # the input of the layer, (B, N, C)
    after: Tensor  # the output of the layer, (B, N, C)

    def scalars(self) -> Tensor:
        return layer_scalars.layer_scalars(self.attention, self.q, self.k, self.context)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run the `with` block with the model in evaluation mode and without gradients.

    Afterwards, also after an error, the training mode of every module is restored. So are torch's random generators of
    the CPU and of the model's GPUs. The generators of Python and numpy are not restored.
    """
    modes = [(module, module.training) for module in model.modules()]
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(devices=list(devices)), torch.no_grad():
        try:
            model.eval()
            yield
        finally:
            for module, training in modes:
                module.training = training


def record_layers(model: nn.Module, net_input: dict[str, Any]) -> list[Layer]:
    """Run the encoder of a fairseq RoBERTa, and return the records of its layers, from the first layer to the last.

    The model runs in evaluation mode, and is afterwards as before. `net_input` is the entry "net_input" of a fairseq
    batch, on the model's device. ValueError is raised under the conditions of `encoder_layers`.
    """
    records: list[dict[str, Any]] = []

    def record_input(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        records.append({"before": inputs[0].transpose(0, 1)})

    def record_attention(module: Attention, inputs: tuple[Any, ...]) -> None:
        q, k, _, context = inputs
        record = records[-1]
        record["attention"] = copy.deepcopy(module).float().eval()
        record["q"] = q.float()
        record["k"] = k.float()
        record["context"] = context

    def record_output(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        records[-1]["after"] = output.transpose(0, 1)

    hooks = []
    for layer in encoder_layers(model):
        hooks.append(layer.register_forward_pre_hook(record_input))
        hooks.append(layer.register_forward_hook(record_output))
        for module in layer.modules():
            if isinstance(module, Attention):
                hooks.append(module.register_forward_pre_hook(record_attention))
    try:
        with undisturbed(model):
            model(**net_input, features_only=True)
    finally:
        for hook in hooks:
            hook.remove()
    return [Layer(**record) for record in records]


def encoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the encoder layers of a model that have an attention of this package, from the first to the last.

    ValueError is raised if there are none, or if the model's mechanism replaces whole layers and so has no queries and
    keys.
    """
    reject_layer_mechanism(getattr(getattr(model, "args", None), "attention", ""), "has no queries and keys to measure")
    layers = []
    for module in model.modules():
        is_layer = all(hasattr(module, name) for name in LAYER_ATTRIBUTES)
        if is_layer and any(isinstance(part, Attention) for part in module.modules()):
            layers.append(module)
    if not layers:
        raise ValueError(
            "the model has no attention of this package: only lln_roberta models can be measured. Convert fairseq's "
            "own with `lln-fairseq convert --attention softmax`"
        )
    return layers


@contextmanager
def ablated(model: nn.Module, skip: bool = True, mlp: bool = True) -> Iterator[None]:
    """Disable skip connections or MLPs in every layer of the model inside the `with` block.

    Dropout in the layers is not applied inside the block either. Afterwards, also after an error, the layers are as
    before.

    Args:
        model: a model whose layers have an attention of this package, or ValueError is raised.
        skip: False disables the skip connections. The layer norms stay.
        mlp: False disables the MLPs, together with their layer norms and skip connections.
    """
    layers = encoder_layers(model)
    # With checkpoint_activations, the layer object has an attribute `forward`.
    wrappers = [vars(layer).get("forward") for layer in layers]
    try:
        for layer in layers:
            vars(layer)["forward"] = functools.partial(_layer_forward, layer, skip=skip, mlp=mlp)
        yield
    finally:
        for layer, wrapper in zip(layers, wrappers, strict=True):
            del vars(layer)["forward"]
            if wrapper is not None:
                vars(layer)["forward"] = wrapper


def _layer_forward(layer: Any, x: Tensor, context: Context, *, skip: bool, mlp: bool) -> Tensor:
    """Compute an encoder layer for x (T, B, C), without dropout around its attention and its MLP; see `ablated`."""

    def attend(y: Tensor) -> Tensor:
        return layer.self_attn(y, context)

    def feed_forward(y: Tensor) -> Tensor:
        return layer.fc2(layer.activation_fn(layer.fc1(y)))

    sublayers = [(layer.self_attn_layer_norm, attend)]
    if mlp:
        sublayers.append((layer.final_layer_norm, feed_forward))
    for norm, sublayer in sublayers:
        y = sublayer(norm(x) if layer.normalize_before else x)
        x = x + y if skip else y
        if not layer.normalize_before:
            x = norm(x)
    return x


def spread_batches(dataset: Any, batches: int, size: int, model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the "net_input" of batches of samples that are evenly spaced over a data set, on the model's device.

    In total there are batches · size samples, or all samples of a data set that has fewer. The last batch may be
    smaller than `size`.
    """
    device = next(model.parameters()).device
    indices = np.linspace(0, len(dataset) - 1, min(batches * size, len(dataset))).astype(int).tolist()
    for start in range(0, len(indices), size):
        samples = [dataset[index] for index in indices[start : start + size]]
        net_input = dataset.collater(samples)["net_input"]
        yield {key: value.to(device) for key, value in net_input.items()}


class Probe:
    """Writes measurements of a model's attention on a fixed batch to TensorBoard.

    For every layer there are scalars NAME/layer_NN, which are means over sequences and heads. There are histograms of
    entropy and spectral gap over sequences and heads, and of ln P, which is a bell curve if P is log-normal. Values
    that are not finite are left out.

    Args:
        net_input: the entry "net_input" of a fairseq batch, on the model's device.
        writer: a SummaryWriter of TensorBoard.
    """

    def __init__(self, net_input: dict[str, Any], writer: Any) -> None:
        self.net_input = net_input
        self.writer = writer

    def __call__(self, model: nn.Module, update: int) -> float:
        """Measure the model and write the results for step `update`.

        The duration of the measurement in seconds is written, too, and returned.
        """
        start = time.perf_counter()
        for number, layer in enumerate(record_layers(model, self.net_input)):
            self._write_layer(layer, f"layer_{number:02d}", update)
        seconds = time.perf_counter() - start
        self.writer.add_scalar("seconds", seconds, update)
        self.writer.flush()
        return seconds

    def _write_layer(self, layer: Layer, name: str, update: int) -> None:
        measured = []
        logs = []
        for sequence in measure.sequence_attentions(layer.attention, layer.q, layer.k, layer.context):
            measured.append(measure.measure_sequence(sequence))
            if sequence.P is not None:
                logs.append(torch.from_numpy(log_entries(sequence.P)))
        by_head = dict(zip(measure.NAMES, torch.cat(measured, dim=1), strict=True))
        scalars = dict(zip(layer_scalars.NAMES, layer.scalars().tolist(), strict=True))
        for tag, values in by_head.items():
            scalars[tag] = values.nanmean().item()
        states = measure.remove_padding(layer.after, layer.context.padding)
        scalars["residual"] = torch.stack([relative_residual(X) for X in states]).nanmean().item()
        for tag, value in scalars.items():
            if math.isfinite(value):
                self.writer.add_scalar(f"{tag}/{name}", value, update)
        for tag in ("entropy", "spectral_gap"):
            self._write_histogram(f"{tag}_by_head/{name}", by_head[tag], update)
        if logs:
            entries = torch.cat(logs)
            self._write_histogram(f"ln_P/{name}", entries[:: len(entries) // HISTOGRAM_ENTRIES + 1], update)

    def _write_histogram(self, tag: str, values: Tensor, update: int) -> None:
        """Write a histogram of the finite values under `tag`. If no value is finite, write nothing."""
        values = values[values.isfinite()]
        if len(values):
            self.writer.add_histogram(tag, values, update)
