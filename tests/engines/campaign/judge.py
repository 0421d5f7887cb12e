"""Which version computed an answer: each of its tokens is compared with what
transformers computes with the weights of each version that may have been served.

That computation remembers nothing: no prefix, no keys and values. An answer is *good*
if each token is of one version that may have been served then: of the same one, or,
where requests go on with new weights (``keep``), of no older one than the token before.
It is *stale* if that holds with older versions, and else *torn*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import AutoModelForCausalLM

from tests.engines.programs.small_model import CONFIG, fill

__all__ = ["Answer", "Judge", "Verdict"]

FRESH = 3.0
"""Mean difference of the log-probabilities of the best tokens at one place. Rounding to
bfloat16 makes up to 1.1 (of 3,000 tokens; 0.7 of 999 in 1,000), the weights of another
version at least 7.4 for a token and 12.9 for the worst of an answer."""
CHUNK = 32


@dataclass(frozen=True)
class Answer:
    """Of one request.

    :ivar sent: when, in seconds of the steady clock; ``received`` likewise.
    :ivar best: of each token the log-probabilities of the best ones at its place, by
        token.
    """

    sent: float
    received: float
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    best: tuple[dict[int, float], ...]


@dataclass(frozen=True)
class Verdict:
    """:ivar seeds: of each token the seed of its weights.
    :ivar off: the greatest difference of a token."""

    kind: Literal["good", "stale", "torn"]
    seeds: tuple[int, ...]
    off: float


class Judge:
    """:param one_version: all tokens of an answer are of one version."""

    def __init__(self, *, one_version: bool) -> None:
        self._one_version = one_version
        self._model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)

    def judge(self, answers: Sequence[Answer], windows: Sequence[range], older: int = 3) -> list[Verdict]:
        """A verdict for each answer.

        :param windows: of each answer the seeds that may have been served.
        :param older: so many seeds before are looked at, too.
        """
        looked = [range(max(1, window.start - older), window.stop) for window in windows]
        off: list[dict[int, list[float]]] = [{} for _ in answers]
        open_ = set(range(len(answers)))  # most are of one of the newest versions, and of one alone
        for seed in sorted({seed for window in looked for seed in window}, reverse=True):
            if not (places := sorted(place for place in open_ if seed in looked[place])):
                continue
            for place, found in zip(places, self.distances([answers[one] for one in places], seed), strict=True):
                off[place][seed] = found
                if seed in windows[place] and max(found) <= FRESH:
                    off[place] = {seed: found}
                    open_.remove(place)
        return [self._verdict(one, window) for one, window in zip(off, windows, strict=True)]

    def distances(self, answers: Sequence[Answer], seed: int) -> list[list[float]]:
        """Of each token of each answer, from the weights of a seed. All answers have
        prompts of one length, and as many tokens."""
        fill(self._model, seed)
        found = []
        for first in range(0, len(answers), CHUNK):
            some = answers[first : first + CHUNK]
            ids = torch.tensor([[*answer.prompt, *answer.tokens[:-1]] for answer in some])
            with torch.no_grad():
                hidden = self._model.model(ids).last_hidden_state[:, len(some[0].prompt) - 1 :]
                told = self._model.lm_head(hidden).float().log_softmax(-1)
            found += [
                [_distance(best, row) for best, row in zip(answer.best, rows, strict=True)]
                for answer, rows in zip(some, told, strict=True)
            ]
        return found

    def _verdict(self, off: dict[int, list[float]], window: range) -> Verdict:
        seeds, furthest = self._best({seed: one for seed, one in off.items() if seed in window})
        if furthest <= FRESH:
            return Verdict("good", seeds, furthest)
        seeds, of_older = self._best(off)
        return Verdict("stale", seeds, of_older) if of_older <= FRESH else Verdict("torn", seeds, of_older)

    def _best(self, off: dict[int, list[float]]) -> tuple[tuple[int, ...], float]:
        """The seeds that fit best, one for each token, and how well the worst fits."""
        if not off:
            return (), float("inf")
        if self._one_version:
            seed = min(off, key=lambda one: max(off[one]))
            return (seed,) * len(off[seed]), max(off[seed])
        paths: dict[int, tuple[float, tuple[int, ...]]] = dict.fromkeys(off, (0.0, ()))
        for place in range(len(next(iter(off.values())))):
            best: tuple[float, tuple[int, ...]] = (float("inf"), ())
            for seed in sorted(off):  # of a path that ended with this one, or an older one
                best = min(best, paths[seed])
                paths[seed] = (max(best[0], off[seed][place]), (*best[1], seed))
        furthest, seeds = min(paths.values())
        return seeds, furthest


def _distance(best: dict[int, float], told: torch.Tensor) -> float:
    return float((told[[*best]] - torch.tensor([*best.values()])).abs().mean())
