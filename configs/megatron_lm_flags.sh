# Megatron-LM flags that switch mcore_logprobs on. Source it and add "${LOGPROB_ARGS[@]}":
#
#   source configs/megatron_lm_flags.sh
#   torchrun ... pretrain_gpt.py <your flags> "${LOGPROB_ARGS[@]}"
#
# The script hands Megatron-LM the flags and the patch (see mcore_logprobs/megatron/arguments.py):
#
#   pretrain(..., patched_model_provider(model_provider), ...,
#            extra_args_provider=add_logprob_args)
#
# With --logprob-output loss the model returns the usual [b, s] loss and nothing else changes. With
# stats it returns a TokenStats, which your loss function reads.
LOGPROB_ARGS=(
    --logprob-output loss
    --logprob-fused true             # "require" refuses heads that cannot be fused
    --logprob-vocab-size 128256      # the true size: padded columns are never counted
    --logprob-temperature 1.0
    --logprob-logits-dtype float32   # of a chunk; bfloat16 weights keep float32 logits
    --logprob-backend auto
)
