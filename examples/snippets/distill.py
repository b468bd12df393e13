"""Distillation from a teacher: KL of two heads, from hidden states; no side's logits are held."""

import torch
from tiny import VOCAB, batch, gpt, megatron

from mcore_logprobs import linear_kl_div


def main(steps: int = 8) -> list[float]:
    with megatron():
        teacher, student = gpt(num_layers=3).requires_grad_(False), gpt(num_layers=1)
        with torch.no_grad():
            head(teacher).mul_(8)  # a teacher with opinions
        ids, positions, labels = batch()
        optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
        losses = []
        for _ in range(steps):
            with torch.no_grad():
                teacher_hidden = hidden_states(teacher, ids, positions)
            kl = linear_kl_div(
                hidden_states(student, ids, positions),
                head(student),
                teacher_hidden=teacher_hidden,
                teacher_weight=head(teacher),
                mask=(labels != -100).T,
                vocab_size=VOCAB,
            )  # [s, b]
            optimizer.zero_grad()
            kl.mean().backward()
            optimizer.step()
            losses.append(kl.mean().item())
        return losses


def head(model) -> torch.Tensor:
    """`[V/TP, h]`. A tied head's own weight is None, or is not used (MTP in a pipeline)."""
    tied = model.share_embeddings_and_output_weights
    return model.shared_embedding_or_output_weight() if tied else model.output_layer.weight


def hidden_states(model, ids, positions) -> torch.Tensor:
    embedded = model.embedding(input_ids=ids, position_ids=positions)
    rope = model.rotary_pos_emb  # of the whole sequence, of which a rank may have a part
    rotary = rope(rope.get_rotary_seq_len(None, model.decoder, embedded, model.config))
    return model.decoder(embedded, attention_mask=None, rotary_pos_emb=rotary)  # [s, b, h]


if __name__ == "__main__":
    print(main())
