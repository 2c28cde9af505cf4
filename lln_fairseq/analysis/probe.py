"""Looks into a model: what its attention does on given tokens. The only file of the instruments that touches a model.

`record` runs a model and keeps queries, keys and hidden states of every layer; `ablated` takes skip connections or
MLPs out for a while; `Probe` writes the instruments of a fixed batch for TensorBoard while a model trains.
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
from lln_fairseq.attention import Attention, require_attention

LAYER_ATTRIBUTES = ("self_attn", "self_attn_layer_norm", "final_layer_norm", "fc1", "fc2")  # of an encoder layer
HISTOGRAM_ENTRIES = 50_000  # of ln P that a histogram is made of, evenly spaced


@dataclass
class Layer:
    """One layer on one batch, without gradient. Padded tokens are in all tensors."""

    attention: Attention  # a copy in float32 in evaluation mode
    q: Tensor  # (B, H, N, D) float32
    k: Tensor
    key_padding_mask: Tensor | None  # bool (B, N)
    before: Tensor  # (B, N, C), what goes into the layer
    after: Tensor

    def scalars(self) -> Tensor:
        """`layer_scalars` of this layer, (6,)."""
        return layer_scalars.layer_scalars(self.attention, self.q, self.k, self.key_padding_mask)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; modes and the state of the random generators are put back as they were."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(devices=list(devices)), torch.no_grad():
        try:
            model.eval()
            yield
        finally:
            for module, training in modes:
                module.training = training


def record(model: nn.Module, net_input: dict[str, Any]) -> list[Layer]:
    """Runs the encoder of a fairseq RoBERTa on `net_input` and returns its layers, in order. The model stays as it is.

    Raises: ValueError for a model without an attention of this package.
    """
    found: list[dict[str, Any]] = []

    def enter(module: nn.Module, inputs: tuple[Any, ...], _: dict[str, Any]) -> None:
        found.append({"before": inputs[0].transpose(0, 1)})

    def look(module: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        q, k, mask = layer_scalars.queries_keys_mask(module, args, kwargs)
        attention = copy.deepcopy(module).float().eval()
        found[-1] |= dict(attention=attention, q=q.float(), k=k.float(), key_padding_mask=mask)

    def leave(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        found[-1]["after"] = (output[0] if isinstance(output, tuple) else output).transpose(0, 1)

    hooks = []
    for layer in encoder_layers(model):
        hooks += [layer.register_forward_pre_hook(enter, with_kwargs=True), layer.register_forward_hook(leave)]
        hooks += [
            m.register_forward_pre_hook(look, with_kwargs=True) for m in layer.modules() if isinstance(m, Attention)
        ]
    try:
        with undisturbed(model):
            model(**net_input, features_only=True)
    finally:
        for hook in hooks:
            hook.remove()
    return [Layer(**layer) for layer in found]


def encoder_layers(model: nn.Module) -> list[nn.Module]:
    """The encoder layers with an attention of this package. Raises: ValueError if there are none."""
    require_attention(getattr(getattr(model, "args", None), "attention", ""), "has no queries and keys to look at")
    layers = [m for m in model.modules() if all(hasattr(m, name) for name in LAYER_ATTRIBUTES)]
    layers = [layer for layer in layers if any(isinstance(m, Attention) for m in layer.modules())]
    if not layers:
        raise ValueError("the model has no attention of this package (lln_roberta)")
    return layers


@contextmanager
def ablated(model: nn.Module, skip: bool = True, mlp: bool = True) -> Iterator[None]:
    """Within it the layers work without skip connections, without MLPs, or without both; layer norms stay."""
    layers = [vars(layer) for layer in encoder_layers(model)]
    before = [attributes.get("forward") for attributes in layers]  # a wrapper's, with checkpoint_activations
    try:
        for layer, attributes in zip(encoder_layers(model), layers, strict=True):
            attributes["forward"] = functools.partial(_forward, layer, skip=skip, mlp=mlp)
        yield
    finally:
        for attributes, forward in zip(layers, before, strict=True):
            del attributes["forward"]
            if forward is not None:
                attributes["forward"] = forward


def _forward(layer: Any, x: Tensor, encoder_padding_mask: Tensor | None = None, *, skip: bool, mlp: bool) -> Tensor:
    """fairseq's encoder layer in evaluation, x (T, B, C), with the two switches."""

    def attend(y: Tensor) -> Tensor:
        return layer.self_attn(y, y, y, key_padding_mask=encoder_padding_mask)[0]

    def feed_forward(y: Tensor) -> Tensor:
        return layer.fc2(layer.activation_fn(layer.fc1(y)))

    blocks = [(layer.self_attn_layer_norm, attend), (layer.final_layer_norm, feed_forward)]
    for norm, block in blocks[: 2 if mlp else 1]:
        y = block(norm(x) if layer.normalize_before else x)
        x = x + y if skip else y
        if not layer.normalize_before:
            x = norm(x)
    return x


def spread_batches(dataset: Any, batches: int, size: int, model: nn.Module) -> Iterator[dict[str, Any]]:
    """Batches of fairseq's `net_input` on the model's device: batches · size samples (or all), evenly spaced."""
    device = next(model.parameters()).device
    numbers = np.linspace(0, len(dataset) - 1, min(batches * size, len(dataset))).astype(int).tolist()
    for start in range(0, len(numbers), size):
        net_input = dataset.collater([dataset[number] for number in numbers[start : start + size]])["net_input"]
        yield {key: value.to(device) for key, value in net_input.items()}


class Probe:
    """Writes the instruments of a fixed batch: means over sequences and heads as scalars NAME/layer_NN, and histograms.

    Histograms: ln P (a Gaussian's bell if P is log-normal), entropy and spectral gap of every sequence and head.
    """

    def __init__(self, net_input: dict[str, Any], writer: Any) -> None:
        self.net_input, self.writer = net_input, writer

    def __call__(self, model: nn.Module, update: int) -> float:
        """Returns the seconds that it took."""
        start = time.perf_counter()
        for number, layer in enumerate(record(model, self.net_input)):
            self._write(layer, f"layer_{number:02d}", update)
        seconds = time.perf_counter() - start
        self.writer.add_scalar("seconds", seconds, update)
        self.writer.flush()
        return seconds

    def _write(self, layer: Layer, name: str, update: int) -> None:
        values, logs = [], []
        for measured in measure.sequences(layer.attention, layer.q, layer.k, layer.key_padding_mask):
            values.append(measure.instruments(measured))
            if measured.P is not None:
                logs.append(torch.from_numpy(log_entries(measured.P)))
        found = dict(zip(measure.NAMES, torch.cat(values, dim=1), strict=True))
        scalars = dict(zip(layer_scalars.NAMES, layer.scalars().tolist(), strict=True))
        scalars |= {tag: heads.nanmean().item() for tag, heads in found.items()}
        scalars["residual"] = relative_residual(layer.after, layer.key_padding_mask).nanmean().item()
        for tag, value in scalars.items():
            if math.isfinite(value):
                self.writer.add_scalar(f"{tag}/{name}", value, update)
        for tag in ("entropy", "spectral_gap"):
            self._histogram(f"{tag}_by_head/{name}", found[tag], update)
        if logs:
            entries = torch.cat(logs)
            self._histogram(f"ln_P/{name}", entries[:: len(entries) // HISTOGRAM_ENTRIES + 1], update)

    def _histogram(self, tag: str, values: Tensor, update: int) -> None:
        values = values[values.isfinite()]
        if len(values):
            self.writer.add_histogram(tag, values, update)
