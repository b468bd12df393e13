"""Top-p correction: the trainer's log-probabilities under the filter that the sampler drew from,
and truncated importance weights from what still differs."""

import torch
from tiny import VOCAB, batch, gpt, megatron

from mcore_logprobs import vocab_parallel_logprobs, vocab_parallel_sampling_logprobs
from mcore_logprobs.losses import truncated_importance_weights

TEMPERATURE, TOP_P = 0.8, 0.9


def main() -> dict[str, float]:
    with megatron():
        model = gpt()
        ids, positions, _ = batch()
        logits = model(ids, positions, None)  # [b, s, V/TP]
        drawn, rollout_logprobs = sample(logits.detach())  # a rollout engine, and what it reports

        options = {"temperature": TEMPERATURE, "vocab_size": VOCAB}
        whole = vocab_parallel_logprobs(logits, drawn, **options)  # no filter: too low
        logprobs = vocab_parallel_sampling_logprobs(logits, drawn, top_p=TOP_P, **options)
        weights = truncated_importance_weights(logprobs, rollout_logprobs, cap=2.0)
        (-(weights * logprobs).mean()).backward()
        return {
            "without filter": (whole - rollout_logprobs).mean().item(),  # log of the kept mass
            "with filter": (logprobs - rollout_logprobs).abs().max().item(),
            "weight": weights.mean().item(),
        }


def sample(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-p by a plain sort: tokens [b, s] and their log-probabilities."""
    z, order = (logits[..., :VOCAB].float() / TEMPERATURE).sort(dim=-1, descending=True)
    before = z.softmax(-1).cumsum(-1) - z.softmax(-1)
    logp = z.masked_fill(before >= TOP_P, -torch.inf).log_softmax(-1)
    drawn = torch.multinomial(logp.exp().flatten(0, 1), 1).view(*logp.shape[:2], 1)
    return order.gather(-1, drawn)[..., 0], logp.gather(-1, drawn)[..., 0]


if __name__ == "__main__":
    print(main())
