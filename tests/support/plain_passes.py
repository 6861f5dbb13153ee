"""Training passes without verl, whose losses are computed from log-probs of the shape (rows, response length)."""

from torch import Tensor

from gradloc.measure.pass_recorder import PassRecorder, unchanged


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
