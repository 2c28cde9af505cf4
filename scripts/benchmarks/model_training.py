"""What scripts/benchmarks/model.py measures: training iterations of one RoBERTa whose attention is exchanged.

What replaces whole layers is put in the place of the layers; what such a model has otherwise, a norm at its end or no
embeddings of positions, is too little to show.
"""

import argparse
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lln_fairseq
from lln_fairseq.attention import LAYER_REGISTRY, Attention, EncoderLayer, build_attention, build_layer
from lln_fairseq.attention.registry import parse_attention_spec
from lln_fairseq.models.presets import PRESETS

SOFTMAX = "softmax"
MATRIX = "softmax_matrix"
DTYPES = {"float32": torch.float32, "float16": torch.float16}
FIRST_WORD = 4  # after fairseq's four special tokens
MASKED = 0.15
LOSS_SCALE = 128.0  # of float16


class MatrixSoftmax(nn.Module):
    """Softmax attention by way of its N x N matrix: torch's own reference implementation."""

    def __init__(self, softmax: nn.Module) -> None:
        super().__init__()
        self.softmax = softmax

    def forward(self, *args: Tensor | None) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self.softmax(*args)


class Adam:
    """Adam as in the recipe. Parameters in half precision have one flat float32 copy, as fairseq's --fp16 keeps it."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.half = parameters if parameters[0].dtype == torch.float16 else []
        self.masters = parameters
        if self.half:
            self.masters = [nn.Parameter(torch.cat([p.detach().float().flatten() for p in parameters]))]
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=1e-5, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01, fused=True
        )

    def step(self) -> None:
        if self.half:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.half]
            self.masters[0].grad = torch.cat([g.flatten() for g in gradients]).float().div_(LOSS_SCALE)
        self.optimizer.step()
        if self.half:
            parts = self.masters[0].detach().split([p.numel() for p in self.half])
            for parameter, part in zip(self.half, parts, strict=True):
                parameter.data.copy_(part.view_as(parameter))

    def zero_grad(self) -> None:
        for parameter in (*self.masters, *self.half):
            parameter.grad = None


class Training:
    """One model whose attention is exchanged, its optimizer and a batch."""

    def __init__(self, args: argparse.Namespace, length: int) -> None:
        torch.manual_seed(0)
        self.args = args
        self.length = length
        self.model = self.build_model().to(device=args.device, dtype=DTYPES[args.dtype]).train()
        self.layers = self.model.encoder.sentence_encoder.layers
        self.robertas_layers = list(self.layers)
        self.rows: dict[str, tuple[nn.ModuleList, list[Adam]]] = {}
        of_layers = {id(parameter) for parameter in self.layers.parameters()}
        self.adam = Adam([parameter for parameter in self.model.parameters() if id(parameter) not in of_layers])
        self.layers_adam: Adam | None = None
        self.make_batch()

    def build_model(self) -> Any:
        """Return a model of fairseq, whose classes have no types."""
        return fairseq_model(self.args, self.length)

    def make_batch(self) -> None:
        words = self.random_words()
        self.masked = (torch.rand(words.shape) < MASKED).index_fill_(1, torch.tensor([0]), True).to(self.args.device)
        self.words = words.to(self.args.device)

    def random_words(self) -> Tensor:
        return torch.randint(FIRST_WORD, self.args.vocabulary, (self.args.batch, self.length))

    def loss(self) -> Tensor:
        logits, _ = self.model(src_tokens=self.words, masked_tokens=self.masked)
        return F.cross_entropy(logits.float(), self.words[self.masked])

    def add(self, name: str) -> None:
        modules = nn.ModuleList(self.build_row(name))
        modules.to(device=self.args.device, dtype=DTYPES[self.args.dtype]).train()
        optimizers = [self.adam]
        if parameters := list(modules.parameters()):
            optimizers.append(Adam(parameters))
        if not isinstance(modules[0], EncoderLayer):  # then RoBERTa's layers are trained too
            self.layers_adam = self.layers_adam or Adam(list(nn.ModuleList(self.robertas_layers).parameters()))
            optimizers.append(self.layers_adam)
        self.rows[name] = modules, optimizers

    def build_row(self, name: str) -> Sequence[nn.Module]:
        """Build the attentions, or the whole layers, of a row: one for each layer."""
        args = self.args
        count = len(self.layers)
        _, dim, _, heads = PRESETS[args.preset]
        row, options = parse_attention_spec(name)
        if row in LAYER_REGISTRY:
            options = dict(dim=dim, dropout=args.dropout, attention_dropout=args.attention_dropout) | options
            return [build_layer(row, **options) for _ in range(count)]
        sizes = dict(num_heads=heads, head_dim=dim // heads, max_positions=self.length, dropout=args.attention_dropout)
        modules = [build(SOFTMAX if name == MATRIX else name, **sizes) for _ in range(count)]
        for layer, module in enumerate(modules):
            module.place(layer, count)
        return [MatrixSoftmax(module) for module in modules] if name == MATRIX else modules

    def put_in_place(self, modules: nn.ModuleList) -> None:
        for number, module in enumerate(modules):
            if isinstance(module, EncoderLayer):
                self.layers[number] = module
            else:
                self.layers[number] = self.robertas_layers[number]
                self.layers[number].self_attn.attention = module

    def iteration(self, name: str) -> None:
        modules, optimizers = self.rows[name]
        self.put_in_place(modules)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (self.loss() * (LOSS_SCALE if self.args.dtype == "float16" else 1.0)).backward()
        for optimizer in optimizers:
            optimizer.step()


def build(row: str, **sizes: Any) -> Attention:
    """The attention of a row as parse_attention_spec reads it; its attention dropout is an option too."""
    name, options = parse_attention_spec(row)
    return build_attention(name, **sizes | options)


def fairseq_model(args: argparse.Namespace, length: int, **options: Any) -> Any:
    """Build RoBERTa with an identity as the attention of every layer; `options` are further options of the model."""
    lln_fairseq.register()  # before fairseq is imported: it configures the root logger
    from fairseq.data import Dictionary
    from omegaconf import OmegaConf

    from lln_fairseq.models.lln_roberta import SIZE_FIELDS, LLNRobertaModel

    dictionary = Dictionary()
    for word in range(args.vocabulary - len(dictionary)):
        dictionary.add_symbol(str(word))
    options |= dict(zip(SIZE_FIELDS, PRESETS[args.preset], strict=True))
    options |= {"attention": SOFTMAX, "max_positions": length, "dropout": args.dropout}
    model = LLNRobertaModel.build_model(OmegaConf.create(options), SimpleNamespace(source_dictionary=dictionary))
    for layer in model.encoder.sentence_encoder.layers:
        layer.self_attn.attention = nn.Identity()
    return model


def train_a_little(name: str, length: int, args: argparse.Namespace) -> None:
    training = args.training(args, length)
    training.add(name)
    if training.layers_adam is None:
        training.robertas_layers.clear()  # which have no part in this row's memory
    for _ in range(2):  # the optimizer's state is there from the second one on
        training.iteration(name)
