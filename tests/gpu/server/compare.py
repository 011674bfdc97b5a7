# SPDX-License-Identifier: GPL-3.0-or-later
"""How far a server's answers are from another's, on the same weights and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from server import Server, random_ids

NEW_TOKENS = 24
SCORED = 64
"""Prompt tokens, at the end of a prompt, whose log-probabilities are compared."""


@dataclass(frozen=True)
class Prompt:
    """One or several prompts sent as one batch. ``lengths`` are tokens."""

    name: str
    lengths: tuple[int, ...]

    def ids(self) -> list[list[int]]:
        return [random_ids(length, f"{self.name} {number}") for number, length in enumerate(self.lengths)]


PROMPTS = (
    *(Prompt(f"{length}", (length,)) for length in (16, 600, 3_000, 20_000, 100_000)),
    Prompt("16 of 64 to 1,264", tuple(range(64, 1_344, 80))),
    Prompt("16 of 3,000 to 5,400", tuple(range(3_000, 5_560, 160))),
)


def ask(server: Server, prompt: Prompt) -> list[dict[str, Any]]:
    """Per prompt of the batch: ``prompt`` and ``output`` log-probabilities, and the ``tokens`` that were generated."""
    ids = prompt.ids()
    first = [max(0, len(one) - SCORED) for one in ids]
    answers = server.generate(ids, NEW_TOKENS, return_logprob=True, logprob_start_len=first)
    return [
        {
            # The first scored token has no predecessor's logits.
            "prompt": [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]],
            "output": [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]],
            "tokens": [entry[1] for entry in answer["meta_info"]["output_token_logprobs"]],
        }
        for answer in answers
    ]


def distance(answers: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Differences of log-probabilities, in nats, and the share of equal greedy tokens before the first that differs.

    After a token that differs the two servers answer different questions, so nothing behind it is compared.
    """
    prompt, output, equal = [], [], 0
    for one, other in zip(answers, others, strict=True):
        prompt += [abs(a - b) for a, b in zip(one["prompt"], other["prompt"], strict=True)]
        pairs = enumerate(zip(one["tokens"], other["tokens"], strict=True))
        same = next((index for index, (a, b) in pairs if a != b), NEW_TOKENS)
        equal += same
        output += [abs(a - b) for a, b in zip(one["output"][:same], other["output"][:same], strict=True)]
    return {
        "prompt_mean": sum(prompt) / len(prompt),
        "prompt_max": max(prompt),
        "output_mean": sum(output) / len(output) if output else float("nan"),
        "equal": equal / (NEW_TOKENS * len(answers)),
    }
