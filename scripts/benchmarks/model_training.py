"""Run the training iterations that scripts/benchmarks/model.py measures.

All mechanisms share one RoBERTa. An attention is put into RoBERTa's layers, and a mechanism that replaces whole layers
takes the place of these layers. The models of such mechanisms also differ from RoBERTa in other ways, such as a norm
after the last layer or missing position embeddings. These differences are ignored, because they have little effect.
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
FIRST_WORD = 4  # after fairseq's four special symbols
MASKED_FRACTION = 0.15
LOSS_SCALE = 128.0  # for float16


class MatrixSoftmax(nn.Module):
    """Wraps a softmax attention so that it builds the N x N matrix with torch's reference implementation."""

    def __init__(self, softmax: nn.Module) -> None:
        super().__init__()
        self.softmax = softmax

    def forward(self, *args: Tensor | None) -> Tensor:
        """Return the output of the softmax attention, which gets the same arguments."""
        with sdpa_kernel(SDPBackend.MATH):
            return self.softmax(*args)


class Adam:
    """AdamW with the settings of the recipes, for float32 or float16 parameters.

    As with fairseq's --fp16, float16 parameters have one flat float32 copy. AdamW updates this copy, and the result is
    copied to the parameters.

    Args:
        parameters: the parameters to train, at least one. All must have the same dtype.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.half_parameters: list[nn.Parameter] = []
        self.masters = parameters
        if parameters[0].dtype == torch.float16:
            self.half_parameters = parameters
            self.masters = [nn.Parameter(torch.cat([p.detach().float().flatten() for p in parameters]))]
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=1e-5, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01, fused=True
        )

    def step(self) -> None:
        """Update the parameters in place. float16 gradients are divided by LOSS_SCALE, and missing ones count as 0."""
        if self.half_parameters:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.half_parameters]
            self.masters[0].grad = torch.cat([g.flatten() for g in gradients]).float().div_(LOSS_SCALE)
        self.optimizer.step()
        if self.half_parameters:
            parts = self.masters[0].detach().split([p.numel() for p in self.half_parameters])
            for parameter, part in zip(self.half_parameters, parts, strict=True):
                parameter.data.copy_(part.view_as(parameter))

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in (*self.masters, *self.half_parameters):
            parameter.grad = None


class Training:
    """Training iterations of one model with different mechanisms on one batch of random tokens.

    `add` builds a mechanism by name, and `iteration` trains the model with it. The parameters of each mechanism have
    their own optimizer. All attentions share an optimizer for RoBERTa's layers. One more optimizer, for the parameters
    outside the layers, is used with every mechanism.

    Args:
        args: the command line of a benchmark, see `add_training_options`.
        length: tokens per sequence.
    """

    def __init__(self, args: argparse.Namespace, length: int) -> None:
        torch.manual_seed(0)
        self.args = args
        self.length = length
        self.model = self.build_model().to(device=args.device, dtype=DTYPES[args.dtype]).train()
        self.layers = self.model.encoder.sentence_encoder.layers
        self.roberta_layers = list(self.layers)
        self.mechanisms: dict[str, tuple[nn.ModuleList, list[Adam]]] = {}
        ids_in_layers = {id(parameter) for parameter in self.layers.parameters()}
        self.adam = Adam([parameter for parameter in self.model.parameters() if id(parameter) not in ids_in_layers])
        self.layers_adam: Adam | None = None
        self.make_batch()

    def build_model(self) -> Any:
        """Return a RoBERTa without attentions, in float32 on the CPU. Subclasses can return another model."""
        return fairseq_model(self.args, self.length)

    def make_batch(self) -> None:
        """Draw random words and random masked positions. The first position of each sequence is always masked."""
        words = self.random_words()
        masked = (torch.rand(words.shape) < MASKED_FRACTION).index_fill_(1, torch.tensor([0]), True)
        self.masked = masked.to(self.args.device)
        self.words = words.to(self.args.device)

    def random_words(self) -> Tensor:
        """Return random token ids without special symbols, (batch, length) int64 on the CPU."""
        return torch.randint(FIRST_WORD, self.args.vocabulary, (self.args.batch, self.length))

    def loss(self) -> Tensor:
        """Return the masked-LM loss of the batch."""
        logits, _ = self.model(src_tokens=self.words, masked_tokens=self.masked)
        return F.cross_entropy(logits.float(), self.words[self.masked])

    def add(self, name: str) -> None:
        """Build a mechanism from its spec, and its optimizers, for later calls of `iteration` with the same name."""
        modules = nn.ModuleList(self.build_modules(name))
        modules.to(device=self.args.device, dtype=DTYPES[self.args.dtype]).train()
        optimizers = [self.adam]
        if parameters := list(modules.parameters()):
            optimizers.append(Adam(parameters))
        if not isinstance(modules[0], EncoderLayer):  # an attention: RoBERTa's layers are trained too
            if self.layers_adam is None:
                self.layers_adam = Adam(list(nn.ModuleList(self.roberta_layers).parameters()))
            optimizers.append(self.layers_adam)
        self.mechanisms[name] = (modules, optimizers)

    def build_modules(self, name: str) -> Sequence[nn.Module]:
        """Return an attention for each layer of the model, or a new layer for each if the mechanism replaces layers."""
        args = self.args
        count = len(self.layers)
        _, dim, _, heads = PRESETS[args.preset]
        mechanism, options = parse_attention_spec(name)
        if mechanism in LAYER_REGISTRY:
            defaults = {"dim": dim, "dropout": args.dropout, "attention_dropout": args.attention_dropout}
            return [build_layer(mechanism, **defaults | options) for _ in range(count)]
        sizes = {
            "num_heads": heads,
            "head_dim": dim // heads,
            "max_positions": self.length,
            "dropout": args.attention_dropout,
        }
        attention_name = SOFTMAX if name == MATRIX else name
        attentions = [build_row_attention(attention_name, **sizes) for _ in range(count)]
        for layer, attention in enumerate(attentions):
            attention.set_depth(layer, count)
        if name == MATRIX:
            return [MatrixSoftmax(attention) for attention in attentions]
        return attentions

    def put_in_place(self, modules: nn.ModuleList) -> None:
        """Put the modules of a mechanism into the model in place of the current ones.

        New layers replace the layers of the model. Attentions are put into RoBERTa's layers, which return to the model.
        """
        for number, module in enumerate(modules):
            if isinstance(module, EncoderLayer):
                self.layers[number] = module
            else:
                self.layers[number] = self.roberta_layers[number]
                self.layers[number].self_attn.attention = module

    def iteration(self, name: str) -> None:
        """Run a forward pass, a backward pass and an optimizer step with a mechanism that `add` has built.

        The gradients are cleared first and stay until the next call. In float16 the loss is multiplied by LOSS_SCALE.
        """
        modules, optimizers = self.mechanisms[name]
        self.put_in_place(modules)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_scale = LOSS_SCALE if self.args.dtype == "float16" else 1.0
        (self.loss() * loss_scale).backward()
        for optimizer in optimizers:
            optimizer.step()


def build_row_attention(name: str, **sizes: Any) -> Attention:
    """Build the attention of a spec such as "lln_diag:dropout=0.1".

    `sizes` are further options of the attention. An option of the spec takes precedence over one of the same name.
    """
    attention, options = parse_attention_spec(name)
    return build_attention(attention, **sizes | options)


def fairseq_model(args: argparse.Namespace, length: int, **options: Any) -> Any:
    """Build RoBERTa with an identity module in place of each attention.

    Args:
        args: the command line, which selects the preset, the vocabulary size and the dropout.
        length: the largest number of tokens per sequence.
        **options: further options of the model.
    """
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


def run_two_iterations(name: str, length: int, args: argparse.Namespace) -> None:
    """Build a model with one mechanism and train it for two iterations.

    The first optimizer step allocates the state of the optimizer. So the second iteration is the first one that needs
    as much memory as later iterations.
    """
    training = args.training(args, length)
    training.add(name)
    if training.layers_adam is None:
        training.roberta_layers.clear()  # the mechanism replaced them, so its memory must not include them
    for _ in range(2):
        training.iteration(name)
