"""RoBERTa with Linear Log-Normal attention (arXiv 2311.13541), alone or with block-diagonal softmax, for transformers.

The file goes with every exported model; it needs torch and transformers, and uses the kernels of lln_fairseq where that
is installed. Shapes: B sequences, H heads, N tokens, D features of a head. `padded` is bool (B, N), True = padding.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import RobertaConfig, RobertaForMaskedLM, RobertaForSequenceClassification, RobertaModel
from transformers.models.roberta.modeling_roberta import RobertaSelfAttention

try:
    from lln_fairseq.ops.block_diag import block_diag_attention
    from lln_fairseq.ops.lln import lln_attention, lln_diag_attention

    HAS_KERNELS = True
except ImportError:
    HAS_KERNELS = False

MIXES: dict[str, tuple[str, ...]] = {  # and their learned parameters
    "average": (), "ratio": ("ratio",), "scale": ("ratio", "diag_scale"),
    "joint": (), "joint_offset": ("offset",),
}  # fmt: skip
PER_FEATURE = ("ratio", "scale")
FLOOR = 1 / 16
PAPER_A, PAPER_B = 0.14855178144710912, -0.35487039130661086  # σ_lln² = a σ̃² + b, of the authors' code
MIN_SIGMA, LOG_SIGMA2_LIMIT = 1e-6, 24.0


class LLNRobertaConfig(RobertaConfig):
    """RoBERTa's options and the attention's; moment_table: (log s, log σ̃²) of the constants that are not "paper"."""

    model_type = "lln_roberta"

    def __init__(self, attention: str = "lln_diag", mix: str = "average", block_size: int | None = None,
                 alpha: float | None = None, beta: float | None = None, scope: str = "head",
                 constants: str = "calibrated", gain: str = "none",
                 moment_table: list[list[float]] | None = None, **options: Any) -> None:  # fmt: skip
        super().__init__(**options)
        self.attention, self.mix, self.block_size = attention, mix, block_size
        self.alpha, self.beta, self.scope, self.constants = alpha, beta, scope, constants
        self.gain, self.moment_table = gain, moment_table


class LLNSelfAttention(RobertaSelfAttention):
    """The projections of RoBERTa with LLN attention between them."""

    log_gain: nn.Parameter  # of α and β, (2, H)
    offset: nn.Parameter  # (H,)
    ratio: nn.Parameter  # (H, 1, D)
    diag_scale: nn.Parameter

    def __init__(self, config: LLNRobertaConfig) -> None:
        super().__init__(config)
        self.config = config
        heads = config.num_attention_heads
        if config.gain == "learned":
            self.log_gain = nn.Parameter(torch.zeros(2, heads))
        for name in MIXES[config.mix] if config.attention == "lln_diag" else ():
            per_feature = torch.full((heads, 1, self.attention_head_size), 0.5)
            self.register_parameter(
                name, nn.Parameter(per_feature if config.mix in PER_FEATURE else torch.zeros(heads))
            )

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *unused: Any,
                **unused_too: Any) -> tuple[Tensor, None]:  # fmt: skip
        """hidden_states (B, N, C) -> (B, N, C); there are no attention weights to give."""
        heads = (self.num_attention_heads, self.attention_head_size)
        q, k, v = (
            projection(hidden_states).unflatten(-1, heads).transpose(1, 2).contiguous()
            for projection in (self.query, self.key, self.value)
        )
        out = self.attend(q, k, v, padding_of(attention_mask))
        return out.transpose(1, 2).flatten(2), None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, padded: Tensor | None) -> Tensor:
        """q, k, v (B, H, N, D) -> (B, H, N, D)."""
        config, dropout = self.config, self.dropout.p if self.training else 0.0
        size = config.block_size or q.shape[-1]
        if HAS_KERNELS:
            given = {name: getattr(config, name) for name in ("alpha", "beta", "scope", "constants")}
            if config.gain == "learned":
                given = dict(zip(("alpha", "beta"), self.alpha_beta(q, k, padded), strict=True))
            if config.attention == "lln_diag" and config.mix not in PER_FEATURE:
                return lln_diag_attention(q, k, v, key_padding_mask=padded, block_size=size, dropout_p=dropout,
                                          mix=config.mix, mix_parameter=self.mix_parameter(), **given)  # fmt: skip
            lln = lln_attention(q, k, v, key_padding_mask=padded, **given)
            if config.attention == "lln":
                return lln
            return self.mixed(lln, block_diag_attention(q, k, v, padded, size, dropout))
        dtype = q.dtype
        q, k, v = q.float(), k.float(), v.float()
        features = plain_features(q, k, *self.alpha_beta(q, k, padded), padded)
        if config.attention == "lln":
            return plain_lln(*features, v, padded).to(dtype)
        if config.mix.startswith("joint"):
            return plain_joint(q, k, v, *features, padded, size, dropout, self.mix_parameter()).to(dtype)
        return self.mixed(plain_lln(*features, v, padded), plain_block_diag(q, k, v, padded, size, dropout)).to(dtype)

    def alpha_beta(self, q: Tensor, k: Tensor, padded: Tensor | None) -> tuple[Tensor, Tensor]:
        """α and β (B, H), with the factors that the heads have learned."""
        alpha, beta = alpha_beta(q.float(), k.float(), padded, self.config)
        if self.config.gain == "none":
            return alpha, beta
        gain = self.log_gain.float().exp()
        return alpha * gain[0], beta * gain[1]

    def mixed(self, lln: Tensor, diag: Tensor) -> Tensor:
        """The mixes of two outputs."""
        if self.config.mix == "average":
            return (lln + diag) / 2
        ratio = self.ratio.to(lln.dtype)
        return ratio * lln + (1 - ratio if self.config.mix == "ratio" else self.diag_scale.to(lln.dtype)) * diag

    def mix_parameter(self) -> Tensor | None:
        """Return the learned offset of each head, (H,), if there is one."""
        if self.config.mix == "joint_offset":
            return self.offset
        return None


def padding_of(mask: Tensor | None) -> Tensor | None:
    """(B, N) of transformers' mask (B, 1, 1 or N, N): 0 or True where a key may be seen. Raises: ValueError for masks
    that differ by query."""
    if mask is None:
        return None
    if mask.shape[2] > 1 and not torch.equal(mask[:, :, 0], mask[:, :, -1]):
        raise ValueError("this attention knows padding masks (B, N) alone")
    row = mask[:, 0, -1]
    return ~row if row.dtype == torch.bool else row < 0


def plain_features(q: Tensor, k: Tensor, alpha: Tensor, beta: Tensor, padded: Tensor | None) -> tuple[Tensor, Tensor]:
    """A and W with W_jd = e^{βk_jd - L_d}, A_id = softmax_d(αq_id + L_d), L_d = logsumexp_j βk_jd: eq. 8, stable."""
    y = beta[..., None, None] * k
    if padded is not None:
        y = y.masked_fill(padded[:, None, :, None], -math.inf)
    total = y.logsumexp(dim=-2, keepdim=True)
    total = total.masked_fill(total == -math.inf, 0.0)  # a sequence without a token gives 0
    return (alpha[..., None, None] * q + total).softmax(dim=-1), (y - total).exp()


def plain_lln(a: Tensor, w: Tensor, v: Tensor, padded: Tensor | None) -> Tensor:
    """A (Wᵀ v)"""
    return a @ (w.mT @ (v if padded is None else v.masked_fill(padded[:, None, :, None], 0.0)))


class Blocks:
    """Tensors (B, H, N, D) as blocks of `size` tokens (B, H, blocks, size, D); `hidden`: keys that are padding."""

    def __init__(self, q: Tensor, padded: Tensor | None, size: int) -> None:
        self.length, self.size = q.shape[2], size
        self.count = (self.length + size - 1) // size  # ONNX has no floor division of negative numbers
        padded = q.new_zeros(q.shape[0], self.length, dtype=torch.bool) if padded is None else padded
        hidden = F.pad(padded, (0, self.count * size - self.length), value=True).unflatten(1, (self.count, size))
        self.hidden = hidden[:, None, :, None]  # (B, 1, blocks, 1, keys)

    def cut(self, *tensors: Tensor) -> list[Tensor]:
        missing = self.count * self.size - self.length
        return [F.pad(x, (0, 0, 0, missing)).unflatten(2, (self.count, self.size)) for x in tensors]

    def join(self, x: Tensor) -> Tensor:
        return x.flatten(2, 3).narrow(2, 0, self.length)


def plain_block_diag(q: Tensor, k: Tensor, v: Tensor, padded: Tensor | None, size: int, dropout: float) -> Tensor:
    """softmax(q kᵀ / √D) v inside blocks of `size` tokens; 0 in a block without a token."""
    blocks = Blocks(q, padded, size)
    q, k, v = blocks.cut(q, k, v)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(blocks.hidden, torch.finfo(q.dtype).min)
    weights = F.dropout(scores.softmax(dim=-1).masked_fill(blocks.hidden, 0.0), dropout)
    return blocks.join(weights @ v.masked_fill(blocks.hidden.mT, 0.0))


def plain_joint(q: Tensor, k: Tensor, v: Tensor, a: Tensor, w: Tensor, padded: Tensor | None, size: int, dropout: float,
                offset: Tensor | None) -> Tensor:  # fmt: skip
    """(1 - c u) Diag + c (LLN outside the block), u the mass of LLN outside it; c is 1 without an offset."""
    blocks = Blocks(q, padded, size)
    diag, whole = plain_block_diag(q, k, v, padded, size, dropout), plain_lln(a, w, v, padded)
    a_b, w_b, v_b, diag_b, whole_b = blocks.cut(a, w, v, diag, whole)
    inside = (a_b @ w_b.mT).masked_fill(blocks.hidden, 0.0)
    u = (1 - inside.sum(dim=-1, keepdim=True)).clamp(0, 1)
    real = (~blocks.hidden).sum(dim=-1, keepdim=True)
    c = torch.ones_like(u)
    if offset is not None:
        c = 1 / (u + (1 - u) * (-offset.float()[:, None, None, None]).exp()).clamp_min(FLOOR)
    c = c.masked_fill(real == 0, 1.0)
    c = c.masked_fill((real == real.sum(dim=2, keepdim=True)) & (real > 0), 0.0)  # all tokens in one block: softmax
    outside = whole_b - inside @ v_b.masked_fill(blocks.hidden.mT, 0.0)
    return blocks.join((1 - c * u) * diag_b + c * outside)


@torch.no_grad()
def alpha_beta(q: Tensor, k: Tensor, padded: Tensor | None, config: LLNRobertaConfig) -> tuple[Tensor, Tensor]:
    """α and β (B, H) that match the variance of log P to softmax's (section 4.1); fixed ones where there are any."""
    if config.alpha is not None and config.beta is not None:
        ones = torch.ones(q.shape[:2], device=q.device)
        return config.alpha * ones, config.beta * ones
    sigma_q, sigma_k = (sigma(x, padded, config.scope) for x in (q, k))
    log_s = 2 * (sigma_q.log() + sigma_k.log())
    if config.constants == "paper":
        log_sigma2 = ((log_s.exp() - PAPER_B) / PAPER_A).log()
    else:
        xs, ys = torch.tensor(config.moment_table, device=q.device)
        right = torch.bucketize(log_s, xs).clamp(1, len(xs) - 1)
        slope = (ys[right] - ys[right - 1]) / (xs[right] - xs[right - 1])
        log_sigma2 = ys[right - 1] + slope * (log_s - xs[right - 1])
    sigma_tilde = (log_sigma2.clamp_max(LOG_SIGMA2_LIMIT) / 2).exp() / math.sqrt(2)
    return sigma_tilde / sigma_q, sigma_tilde / sigma_k


def sigma(x: Tensor, padded: Tensor | None, scope: str) -> Tensor:
    """The standard deviation of x over the tokens and features of each sequence and head (of all: scope batch)."""
    real = torch.ones(x.shape[0], 1, x.shape[2], 1, device=x.device)
    if padded is not None:
        real = (~padded[:, None, :, None]).float()
    dims = (0, 1, 2, 3) if scope == "batch" else (2, 3)
    count = (real * torch.ones_like(x)).sum(dims, keepdim=True).clamp_min(1.0)
    mean = torch.where(real > 0, x, 0.0).sum(dims, keepdim=True) / count
    variance = torch.where(real > 0, x - mean, 0.0).square().sum(dims, keepdim=True) / count
    return variance.clamp_min(MIN_SIGMA**2).sqrt()[..., 0, 0].expand(x.shape[:2])


class LLNRobertaModel(RobertaModel):
    """The encoder; the pooler of transformers is there only if it is asked for, since nobody trained one."""

    config_class = LLNRobertaConfig
    _supports_sdpa = False  # its masks are for another attention

    def __init__(self, config: LLNRobertaConfig, add_pooling_layer: bool = False) -> None:
        super().__init__(config, add_pooling_layer=add_pooling_layer)
        for layer in self.encoder.layer:
            layer.attention.self = LLNSelfAttention(config)  # type: ignore[union-attr]
        self.post_init()


class LLNRobertaForMaskedLM(RobertaForMaskedLM):
    config_class = LLNRobertaConfig
    _supports_sdpa = False

    def __init__(self, config: LLNRobertaConfig) -> None:
        super().__init__(config)
        self.roberta = LLNRobertaModel(config)
        self.post_init()


class LLNRobertaForSequenceClassification(RobertaForSequenceClassification):
    config_class = LLNRobertaConfig
    _supports_sdpa = False

    def __init__(self, config: LLNRobertaConfig) -> None:
        super().__init__(config)
        self.roberta = LLNRobertaModel(config)
        self.post_init()
