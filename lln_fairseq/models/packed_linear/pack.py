"""Prepare the linear layers of a model for inference on a CPU."""

from collections import Counter

from torch import nn

from lln_fairseq.models.multihead_attention import LLNMultiheadAttention
from lln_fairseq.models.packed_linear.choice import FLOAT32, plan_linear_layers
from lln_fairseq.models.packed_linear.layer import PackedLinear, PackedWeights
from lln_fairseq.models.packed_linear.precisions import Shape


def pack_linear_layers(model: nn.Module, encoder: nn.Module, precision: str = FLOAT32) -> str:
    """Let a CPU compute the linear layers of a model with packed weights, in the fastest way that it has.

    The linear layers become `PackedLinear`, in place, and an attention computes its three projections as one product.
    The parameters stay the same objects. The result is the precision that is used, which is float32 if the requested
    one is not faster here.

    Args:
        model: the model.
        encoder: the part of the model that is computed in `precision`; the rest is computed in float32.
        precision: one of choice.PRECISIONS.
    """
    inside = _find_products(encoder)
    used_precision = _pack(inside, precision)
    outside = [(owner, layers) for owner, layers in _find_products(model) if (owner, layers) not in inside]
    _pack(outside, FLOAT32)
    return used_precision


Product = tuple[nn.Module, tuple[nn.Linear, ...]]  # the module that computes a product, and the layers in it


def _find_products(module: nn.Module) -> list[Product]:
    """Return the linear layers of a module, the projections of an attention together."""
    products: list[Product] = []
    projections: set[nn.Linear] = set()
    for child in module.modules():
        if isinstance(child, LLNMultiheadAttention):
            products.append((child, child.projections))
            projections.update(child.projections)
        elif isinstance(child, nn.Linear) and type(child) in (nn.Linear, PackedLinear) and child not in projections:
            products.append((child, (child,)))
    return products


def _pack(products: list[Product], precision: str) -> str:
    plan = plan_linear_layers(precision, Counter(_shape(layers) for _, layers in products))
    for owner, layers in products:
        weights = PackedWeights(layers, plan.ways[_shape(layers)])
        if isinstance(owner, LLNMultiheadAttention):
            owner.packed_projections = weights
        else:
            owner.__class__ = PackedLinear
            owner.packed = weights  # type: ignore[assignment]
    return plan.precision


def _shape(layers: tuple[nn.Linear, ...]) -> Shape:
    return (sum(layer.out_features for layer in layers), layers[0].in_features)
