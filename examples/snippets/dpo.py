"""DPO: log-probabilities of whole answers, of the policy and of a frozen reference."""

import torch
from tiny import VOCAB, batch, gpt, megatron

from mcore_logprobs import LogprobConfig, patch_model
from mcore_logprobs.losses import dpo_loss, sequence_sum


def main(steps: int = 8) -> list[float]:
    with megatron():
        policy, reference = gpt(), gpt().requires_grad_(False)
        reference.load_state_dict(policy.state_dict())
        ids, positions, labels = batch(rows=8)  # four pairs: chosen, then rejected
        mask = positions >= 4  # the answer
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)

        def answers(model) -> tuple[torch.Tensor, torch.Tensor]:
            with patch_model(model, LogprobConfig(vocab_size=VOCAB)):
                stats = model(ids, positions, None, labels=labels.masked_fill(~mask, -100))
            return sequence_sum(stats.logprobs, mask)[:, 0].chunk(2)

        with torch.no_grad():
            ref_chosen, ref_rejected = answers(reference)
        losses = []
        for _ in range(steps):
            chosen, rejected = answers(policy)
            loss = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses  # from log 2 downwards


if __name__ == "__main__":
    print(main())
