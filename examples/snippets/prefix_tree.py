"""Four answers to one prompt as a packed prefix tree: the prompt is computed once, and values and
gradients are those of four sequences."""

import torch
from tiny import VOCAB, gpt, megatron

from mcore_logprobs import PrefixTree, patch_model

ADVANTAGES = torch.tensor([1.0, -0.5, 2.0, -1.5])


def main() -> dict[str, float]:
    with megatron():
        model = gpt()
        generator = torch.Generator().manual_seed(1)
        prompt, *answers = torch.randint(VOCAB, (5, 9), generator=generator)
        sequences = [torch.cat([prompt, answer[: 6 + i]]) for i, answer in enumerate(answers)]
        first = len(prompt) - 1  # where the answer's log-probabilities begin
        tree = PrefixTree.from_branches(sequences)
        with patch_model(model) as handle:
            apart = []
            for ids in sequences:
                positions = torch.arange(len(ids) - 1)[None]
                stats = model(ids[None, :-1], positions, None, labels=ids[None, 1:])
                apart.append(stats.logprobs[0, first:])
            expected = gradient(model, apart)

            # Rotary embeddings go by a token's place: give each token the one of its depth.
            hook = model.rotary_pos_emb.register_forward_hook(lambda m, a, out: out[tree.positions])
            with handle.targets(tree.targets, rows=tree.rows):
                stats = model(tree.tokens[None], tree.positions[None], tree.attention_mask())
            packed = [branch[first:] for branch in tree.branches(stats.logprobs)]
            found = gradient(model, packed)
            hook.remove()
        return {
            "logprobs": max((p - q).abs().max().item() for p, q in zip(packed, apart, strict=True)),
            "gradient": ((found - expected).abs().max() / expected.abs().max()).item(),
            "tokens saved": sum(map(len, sequences)) - len(tree.tokens),
        }


def gradient(model, answers: list[torch.Tensor]) -> torch.Tensor:
    sums = torch.stack([logprobs.sum() for logprobs in answers])
    found = torch.autograd.grad(-(ADVANTAGES * sums).sum(), list(model.parameters()))
    return torch.cat([x.flatten() for x in found])


if __name__ == "__main__":
    print(main())
