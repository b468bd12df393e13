"""Patch a Megatron model: labels give log-probabilities, entropy and ranks; no logits are held."""

from tiny import VOCAB, batch, gpt, megatron

from mcore_logprobs import LogprobConfig, patch_model


def main() -> dict[str, float]:
    with megatron():
        model = gpt()
        ids, positions, labels = batch()
        # The prompt: no log-probability and no gradient, and with compact=True no cost.
        labels[:, :4] = -100
        config = LogprobConfig(entropy=True, target_rank=True, temperature=0.8, vocab_size=VOCAB)

        with patch_model(model, config):
            stats = model(ids, positions, None, labels=labels)  # TokenStats, [b, s] each
            (-stats.logprobs.sum() / (labels >= 0).sum()).backward()

        logits = model(ids, positions, None)  # no longer patched: logits, as ever
        z = logits[..., :VOCAB].float() / 0.8
        plain = z.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return {
            "difference": (stats.logprobs - plain)[labels >= 0].abs().max().item(),
            "entropy": stats.entropy[labels >= 0].mean().item(),
            "gradient": model.embedding.word_embeddings.weight.grad.norm().item(),
        }


if __name__ == "__main__":
    print(main())
