# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What warnings and verdicts share."""

# The warnings that say what is seen, and no cause.
ENGINES_APART = "engines_apart"
WITHOUT_CAUSE = (ENGINES_APART,)
# That advantages have another size: rewards of one kind may be the cause.
REWARD_SCALE = "reward_scale"
# That the optimizer moved the policy too far.
LEARNING_RATE = "learning_rate"
# That the reference is another model.
REFERENCE = "reference"
# Those that are about some tokens alone, or say nothing of what makes a norm.
OF_SOME = ("unsampled", REFERENCE, *WITHOUT_CAUSE)
# Those that another temperature explains as well as tokens that were not sampled.
OTHER_LOG_PROBS = "other_log_probs"
# Those about the rollout's log-probs.
OF_ROLLOUT = ("misaligned", "retokenized", "stale_weights", "partly_stale", OTHER_LOG_PROBS)

# So many steps after a loaded checkpoint, warnings and verdicts say that there was one.
RESUME_STEPS = 3


def resume_note(steps: int | None) -> str:
    """A sentence, in the first `RESUME_STEPS` steps after a loaded checkpoint; otherwise nothing."""
    return f" This is step {steps} after a checkpoint was loaded." if steps and steps <= RESUME_STEPS else ""
