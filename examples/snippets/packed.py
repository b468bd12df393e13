"""Packed sequences (THD), at any context parallelism: each sequence's sum of log-probabilities."""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from tiny import VOCAB, gpt, megatron
from torch.nn.functional import pad

import mcore_logprobs as ml

PROMPT = 2  # tokens


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (n,), generator=generator) for n in (7, 5, 11, 9)]


def main(cp: int = 1) -> list[float]:
    with megatron(cp=cp):
        # Each is padded to two chunks a rank (times TP under sequence parallelism).
        lengths = [len(x) for x in sequences()]
        padded = [-(-n // (2 * cp)) * 2 * cp for n in lengths]
        pairs = zip(sequences(), padded, strict=True)
        tokens = torch.cat([pad(x, (0, n - len(x))) for x, n in pairs])
        positions = torch.cat([torch.arange(n) for n in padded])
        cu_seqlens = pad(torch.tensor(padded).cumsum(0), (1, 0)).int()
        names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        longest = {"max_seqlen_q": max(padded), "max_seqlen_kv": max(padded)}
        packed = PackedSeqParams("thd", **dict.fromkeys(names, cu_seqlens), **longest)

        split = {"cu_seqlens": cu_seqlens}
        ids, at = (ml.context_parallel_shard(x[None], **split) for x in (tokens, positions))
        labels = ml.context_parallel_shift(ids, lengths=lengths, fill=-100, **split)
        labels[at < PROMPT - 1] = -100  # the prompt's own tokens
        model = gpt()
        with ml.patch_model(model, ml.LogprobConfig(vocab_size=VOCAB)):
            stats = model(ids, at, None, labels=labels, packed_seq_params=packed)  # [1, T / CP]
        whole = stats.gather_cp(grad="slice", **split)  # for a loss that every rank computes
        sums = torch.stack([x.logprobs.sum() for x in whole.unpack(cu_seqlens)])
        (-sums.mean()).backward()
        return sums.tolist()


if __name__ == "__main__":
    import os

    print(main(cp=int(os.environ.get("WORLD_SIZE", "1"))))
