"""The demo's task, policy, loss and fingerprint: the machine learning, without the
library.

Theory of operation
===================

The **task** is to sort digits: the answer to the prompt ``31415=`` is ``11345``. A
completion's reward is the share of its correct digits: 1.0 is perfect, and an untrained
policy earns about 0.1.

The **policy** is a small causal transformer with random weights, not trained before. It
samples ``DIGITS`` tokens after the prompt.

**GRPO** (Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.2): for each
prompt a *group* of completions is sampled. There is no value network: a completion's
advantage is its reward, normalised over its group. The policy's ratio is clipped as in
PPO. There is no KL term, as there is no reference model to stay near.

The **fingerprint** is a buffer of the policy that travels with its weights: the step,
and a CRC-32 of every other tensor that also covers the step. A policy that holds
tensors of two versions, or a wrong bit, cannot pass :func:`verify`.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = [
    "DIGITS",
    "GROUP",
    "Experience",
    "Policy",
    "TornWeights",
    "advantages",
    "grpo_loss",
    "prompts",
    "rewards",
    "sample",
    "stamp",
    "text",
    "verify",
]

DIGITS = 5
"""Digits of a prompt, and of its answer."""
GROUP = 16
"""Completions for each prompt."""
_EQUALS = 10
_VOCABULARY = 11
_LENGTH = 2 * DIGITS + 1


class Experience(NamedTuple):
    """``n`` prompts with ``GROUP`` completions each; a group's rows are neighbours.

    :param tokens: ``(n * GROUP, 2 * DIGITS + 1)`` uint8, prompt and completion.
    :param log_probs: ``(n * GROUP, DIGITS)`` float32, of each sampled token under the
        policy that sampled it.
    """

    tokens: Tensor
    log_probs: Tensor


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y: Tensor = x + self.mlp(self.norm_mlp(x))
        return y


class Policy(nn.Module):
    """A causal transformer over digits and ``=``: tokens ``(batch, length)`` to logits
    ``(batch, length, 11)``."""

    fingerprint: Tensor

    def __init__(self, *, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(_LENGTH, width) * 0.5)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _VOCABULARY, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)
        self.register_buffer("fingerprint", torch.zeros(1 + len(self.state_dict()), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def prompts(count: int, generator: torch.Generator) -> Tensor:
    """Return ``(count, DIGITS + 1)`` int64: random digits and ``=``."""
    digits = torch.randint(0, 10, (count, DIGITS), generator=generator)
    return torch.cat([digits, torch.full((count, 1), _EQUALS)], dim=1)


def rewards(tokens: Tensor) -> Tensor:
    """Return ``(batch,)`` float32: the share of correct digits of each completion."""
    answer = tokens[:, :DIGITS].long().sort(dim=1).values
    return (tokens[:, DIGITS + 1 :].long() == answer).float().mean(dim=1)


@torch.no_grad()
def sample(policy: nn.Module, starts: Tensor, generator: torch.Generator) -> Experience:
    """Sample ``GROUP`` completions for each of ``starts`` (from :func:`prompts`), at
    temperature 1."""
    tokens = starts.repeat_interleave(GROUP, dim=0)
    chosen = []
    for _ in range(DIGITS):
        log_probs = policy(tokens)[:, -1].log_softmax(dim=-1)
        token = torch.multinomial(log_probs.exp(), 1, generator=generator)
        chosen.append(log_probs.gather(1, token))
        tokens = torch.cat([tokens, token], dim=1)
    return Experience(tokens.to(torch.uint8), torch.cat(chosen, dim=1))


def advantages(tokens: Tensor) -> Tensor:
    """Return ``(batch,)`` float32: each completion's reward, normalised over its
    group."""
    grouped = rewards(tokens).view(-1, GROUP)
    spread = grouped.std(dim=1, keepdim=True) + 1e-4
    return ((grouped - grouped.mean(dim=1, keepdim=True)) / spread).flatten()


def grpo_loss(policy: nn.Module, batch: Experience, *, clip: float = 0.2) -> Tensor:
    """Return the clipped policy-gradient loss of ``batch`` (scalar)."""
    tokens = batch.tokens.long()
    logits = policy(tokens[:, :-1])[:, DIGITS:]
    log_probs = logits.log_softmax(dim=-1).gather(2, tokens[:, DIGITS + 1 :, None]).squeeze(2)
    ratio = (log_probs - batch.log_probs).exp()
    gains = advantages(tokens)[:, None]
    return -torch.minimum(ratio * gains, ratio.clamp(1 - clip, 1 + clip) * gains).mean()


class TornWeights(Exception):
    """The tensors of a policy do not belong together."""


def _fingerprint(policy: Policy, step: int) -> Tensor:
    salt = zlib.crc32(step.to_bytes(8, "little"))
    tensors = {name: value for name, value in policy.state_dict().items() if name != "fingerprint"}
    sums = [zlib.crc32(value.detach().contiguous().numpy(), salt) for _, value in sorted(tensors.items())]
    return torch.tensor([step, *sums], dtype=torch.int64)


def stamp(policy: Policy, step: int) -> None:
    """Write the fingerprint of the policy's current weights into it."""
    policy.fingerprint.copy_(_fingerprint(policy, step))


def verify(policy: Policy, step: int) -> None:
    """Check the fingerprint. :raises TornWeights: a tensor of the policy is not that of
    ``step``."""
    expected = _fingerprint(policy, step)
    wrong = int((policy.fingerprint != expected).sum())
    if wrong:
        found = int(policy.fingerprint[0])
        raise TornWeights(f"{wrong} of {len(expected)} marks are wrong for step {step} (the weights say step {found})")


def text(tokens: Tensor) -> str:
    """Return one row of tokens as readable text."""
    return "".join("=" if token == _EQUALS else str(token) for token in tokens.tolist())
