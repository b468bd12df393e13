"""A GRPO step through Megatron's own schedule, at any pipeline size: a forward pass for the old
log-probabilities, then the update, under a filter that drops some of the sampled tokens."""

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from tiny import VOCAB, batch, gpt, megatron

from mcore_logprobs import LogprobConfig, patch_model
from mcore_logprobs.losses import ClippedLoss, aggregation


def main(pp: int = 1) -> tuple[float, float] | None:
    """On the last stage the loss, and what it is of a policy that has not moved."""
    with megatron(pp=pp):
        model = gpt(num_layers=2)
        handle = patch_model(model, LogprobConfig(vocab_size=VOCAB, top_p=0.9))
        ids, positions, labels = batch(rows=4)
        advantages = torch.linspace(-1, 2, labels.numel()).view_as(labels)
        sizes = {"num_microbatches": 2, "micro_batch_size": 2, "seq_length": 16, "model": model}

        def run(step, **options):
            rows, schedule = iter([slice(0, 2), slice(2, 4)]), get_forward_backward_func()
            return schedule(forward_step_func=step, data_iterator=rows, **sizes, **options)

        def score(rows, model):
            at = next(rows)
            stats = model(ids[at], positions[at], None, labels=labels[at])
            return stats, lambda stats, non_loss_data: stats.logprobs

        def update(rows, model):
            per_token = old[at := next(rows)], advantages[at]
            with handle.policy_loss(ClippedLoss(), *per_token, denominator=mean.denominator):
                stats = model(ids[at], positions[at], None, labels=labels[at])
            # The report is a copy: Megatron divides the loss in place.
            return stats, lambda s: (s.policy_loss, s.policy_loss.detach().clone())

        with torch.no_grad():
            scored = run(score, forward_only=True, collect_non_loss_data=True)  # [] elsewhere
        old = torch.cat(scored) if scored else torch.zeros_like(advantages)
        labels[old.isinf()] = -100  # what the filter has dropped has no ratio
        mean = aggregation(labels >= 0, micro_batches=2)
        reports = run(update, forward_only=False)
        return (sum(reports).item() / 2, -advantages[labels >= 0].mean().item()) if scored else None


if __name__ == "__main__":
    import os

    print(main(pp=int(os.environ.get("WORLD_SIZE", "1"))))
