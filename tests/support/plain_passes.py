"""Training passes without verl, whose losses are computed from log-probs of the shape (rows, response length)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradloc import GradLoc, GradLocConfig, TokenClip
from gradloc.gradloc import Located
from gradloc.measure.pass_recorder import PassRecorder, unchanged
from gradloc.token_clip.token_clip import row_weights
from gradloc.token_clip.watched_pass import Positions


def observe(
    gradloc: PassRecorder,
    log_prob: Tensor,
    entropy: Tensor | None,
    weight: Tensor,
    loss_agg_mode: str | None = None,
    **tokens: Tensor,
) -> None:
    """Shows GradLoc a pass, its tokens' weights in the loss, and what else is known of them."""
    noted, loss_inputs = {"log_prob": log_prob, "weight": weight, **tokens}, {"coefficient": (log_prob, unchanged)}
    if entropy is not None:
        noted["entropy"], loss_inputs["entropy_coefficient"] = entropy, (entropy, unchanged)
    gradloc.observe(lambda: noted, loss_inputs, loss_agg_mode)


def log_probs_of(
    logits: Callable[[Tensor], Tensor], ids: Tensor, prompt: int, with_entropy: bool = False
) -> tuple[Tensor | None, Tensor]:
    """The entropy, if wanted, and the log-probs of the tokens after so many of a prompt."""
    log_probs = logits(ids)[:, prompt - 1 : -1].log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1) if with_entropy else None
    return entropy, log_probs.gather(-1, ids[:, prompt:, None])[..., 0]


class Loop:
    """A training loop in one process, which never takes a step; with TokenClip, if that is among the parts.

    The ids are of prompts and responses, of shape (micro-batches, rows, length). The model gives their logits, unless a
    function does; `entropy` is its coefficient in the loss. Parts are more arguments of GradLoc, settings its own.
    """

    def __init__(
        self,
        model: nn.Module,
        ids: Tensor,
        prompt: int,
        logits: Callable[[Tensor], Tensor] | None = None,
        entropy: float = 0.0,
        parts: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.model, self.ids, self.prompt, self.logits = model, ids, prompt, logits or model
        self.entropy, self.steps = entropy, 0
        self.gradloc = GradLoc(model, GradLocConfig(**settings), self.forward, **(parts or {}))
        self.clip: TokenClip | None = (parts or {}).get("token_clip")
        self.loss_scale: Callable[[], float] = (parts or {}).get("loss_scale", lambda: 1.0)

    def forward(self, inputs: dict[str, Any], rows: Sequence[int], length: int) -> tuple[Tensor | None, Tensor]:
        ids = inputs["input_ids"][list(rows)][:, : self.prompt + length].to(self.ids.device)
        return log_probs_of(self.logits, ids, self.prompt, bool(self.entropy))

    def run_pass(
        self,
        index: int = 0,
        advantage: Tensor | float = 1.0,
        weight: float | None = None,
        factor: float = 1.0,
        facts_of: Callable[[Tensor], dict[str, Any]] = lambda log_prob: {},
    ) -> None:
        """The pass of a micro-batch; its loss is `factor` times what it should be.

        What `facts_of` makes from log-probs is known of its tokens, too, or instead.
        """
        ids = self.ids[index]
        rows = range(index * len(ids), (index + 1) * len(ids))
        self.gradloc.begin_pass({"input_ids": ids}, rows)
        if self.clip:
            self.clip.begin_pass(Positions(torch.ones_like(ids, dtype=torch.bool), [self.prompt] * len(ids)), rows)
        entropy, log_prob = log_probs_of(self.logits, ids, self.prompt, bool(self.entropy))
        mask = torch.ones_like(log_prob)
        weights = mask * (1 / (len(self.ids) * mask.numel()) if weight is None else weight)
        tokens = {"response_mask": mask, "token_id": ids[:, self.prompt :], "advantage": mask * advantage}
        tokens |= facts_of(log_prob.detach())
        observe(self.gradloc, log_prob, entropy, weights, **tokens)
        if self.clip:
            noted = {"weight": weights, "log_prob": log_prob, **tokens}
            self.clip.observe(log_prob, row_weights(weights), self.loss_scale(), lambda: noted)
        of_entropy = 0.0 if entropy is None else self.entropy * entropy
        (factor * self.loss_scale() * weights * (-log_prob * advantage - of_entropy)).sum().backward()
        self.gradloc.end_pass()
        if self.clip:
            self.clip.end_pass()

    def backward(self, *advantages: Tensor | float) -> None:
        """The passes of a mini-batch."""
        self.model.zero_grad()
        for index, advantage in enumerate(advantages):
            self.run_pass(index, advantage)

    def step(self, *advantages: Tensor | float) -> Located:
        self.steps += 1
        self.gradloc.start_update(self.steps)
        self.backward(*advantages)
        return self.gradloc.locate(0, 0)
