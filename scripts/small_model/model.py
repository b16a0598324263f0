"""The model: the same computation as transformers' LlamaForCausalLM."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.small_model.dialogues import KINDS


@dataclass
class ModelConfig:
    """Shape of the model."""

    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 384
    num_hidden_layers: int = 6
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    head_dim: int = 16
    max_position_embeddings: int = 2048
    rope_theta: float = 100000.0
    rms_norm_eps: float = 1e-5


class RMSNorm(nn.Module):
    """Root mean square norm with a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, halves convention."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv, self.dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, self.kv * self.dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, self.kv * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, c.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal self-attention over whole rows."""
        b, t, _ = x.shape
        weight = torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))
        qkv = F.linear(x, weight).view(b, t, self.heads + 2 * self.kv, self.dim)
        qk = rotate(qkv[:, :, : self.heads + self.kv], cos, sin).transpose(1, 2)
        v = qkv[:, :, self.heads + self.kv :].transpose(1, 2)
        q, k = qk[:, : self.heads], qk[:, self.heads :]
        group = self.heads // self.kv
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(b, t, -1))
        return out


class MLP(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """SwiGLU."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention and feed-forward, each with a residual."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class SmallLlama(nn.Module):
    """Decoder with tied embeddings."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        steps = torch.arange(0, c.head_dim, 2, dtype=torch.float32) / c.head_dim
        angle = torch.outer(
            torch.arange(c.max_position_embeddings, dtype=torch.float32),
            1.0 / c.rope_theta**steps,
        )
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self.cos: Tensor
        self.sin: Tensor
        self.run_hidden: Callable[[Tensor], Tensor] = self.hidden
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """Draw random weights, and layer 0 heads that look a fixed number of tokens back.

        The embeddings are large enough to stay visible in the residual stream;
        the final norm makes up for that in the (tied) logits.  They share a
        constant direction, and some heads of the first layer read only that one,
        so their scores depend on the distance alone.  Such heads form in any
        trained model and every later match needs them; here they are a start.
        """
        c = self.config
        for name, p in self.named_parameters():
            if name.endswith("proj.weight"):
                std = p.shape[1] ** -0.5
                if "o_proj" in name or "down_proj" in name:
                    std /= math.sqrt(2 * c.num_hidden_layers)
                nn.init.normal_(p, std=std)
        std = 0.5
        constant = torch.full((c.hidden_size,), c.hidden_size**-0.5)
        other = torch.eye(c.hidden_size) - torch.outer(constant, constant)
        length = std * math.sqrt(c.hidden_size)
        embed = torch.randn(c.vocab_size, c.hidden_size) * std
        self.embed_tokens.weight.copy_(embed @ other + 0.75 * length * constant)
        nn.init.constant_(self.norm.weight, 0.1)
        for name, p in self.named_parameters():
            if p.ndim == 2 and p.shape[1] == c.hidden_size and "proj" in name and "o_proj" not in name:
                p.copy_(p @ other)
        attention = self.layers[0].self_attn
        assert isinstance(attention, Attention)
        q, k = attention.q_proj.weight, attention.k_proj.weight
        d = c.head_dim
        read = constant / (math.sqrt(c.hidden_size) * 0.6)  # gives 1 on the normalised input
        pairs = range(min(3, c.head_dim // 2))
        scale = math.sqrt(math.sqrt(c.head_dim))
        amplitude = [scale * math.sqrt(a) for a in (12.0, 6.0, 6.0)]
        frequency = [c.rope_theta ** (-2 * i / c.head_dim) for i in pairs]
        group, half = c.num_attention_heads // c.num_key_value_heads, c.head_dim // 2
        for j, offsets in enumerate(((1, 2), (1, 3), (1, 4), (2, 5))):
            rows = k[j * d : (j + 1) * d]
            rows.mul_(0.1)
            for i in pairs:
                rows[i] += amplitude[i] * read
            for g in range(group):
                head = j * group + g
                rows = q[head * d : (head + 1) * d]
                rows.mul_(0.1)
                angle = offsets[g % 2]
                for i in pairs:
                    rows[i] += amplitude[i] * math.cos(angle * frequency[i]) * read
                    rows[half + i] -= amplitude[i] * math.sin(angle * frequency[i]) * read

    def hidden(self, ids: Tensor) -> Tensor:
        """Compute the final hidden states of whole rows."""
        x = self.embed_tokens(ids)
        cos = self.cos[: ids.shape[1]][None, :, None]
        sin = self.sin[: ids.shape[1]][None, :, None]
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute scores over the vocabulary."""
        return F.linear(hidden, self.embed_tokens.weight)

    def loss(self, ids: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the weighted sum of cross entropies, and the accuracy for each weight of KINDS."""
        h = self.run_hidden(ids).flatten(0, 1)
        keep = weights.flatten().nonzero().squeeze(1)
        logits = self.logits(h[keep])
        target, w = targets.flatten()[keep], weights.flatten()[keep]
        ce = F.cross_entropy(logits, target, reduction="none")
        right = logits.argmax(-1) == target
        return (ce * w).sum(), torch.stack([right[w == kind].float().mean() for kind in KINDS])
