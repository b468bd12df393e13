# Megatron-LM flags that switch mcore_logprobs on. Source it and run your script, unchanged, with
# "${LOGPROB_ARGS[@]}" added:
#
#   source configs/megatron_lm_flags.sh
#   torchrun ... -m mcore_logprobs run pretrain_gpt.py <your flags> "${LOGPROB_ARGS[@]}"
#
# docs/megatron-flags.md has the two ways in for a script of your own (a model hook from Megatron
# 0.19 on, a model provider to 0.18), which take the same flags.
#
# With --logprob-output loss the model returns the usual [b, s] loss, with stats a TokenStats, which
# your loss function reads. With either, columns that only pad the vocabulary are masked, by the
# tokenizer's true size (--logprob-vocab-size gives another one): losses fall by what they had.
LOGPROB_ARGS=(
    --logprob-output loss
    --logprob-fused true             # "require" refuses heads that cannot be fused
    --logprob-temperature 1.0
    --logprob-logits-dtype float32   # of a chunk; bfloat16 weights keep float32 logits
    --logprob-backend auto
)
