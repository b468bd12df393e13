"""The trained model: statistics of given tokens, and gradients, through Megatron's own schedule."""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_logprobs import (
    LogprobConfig,
    PatchHandle,
    TokenStats,
    context_parallel_gather,
    patch_model,
)
from mcore_logprobs.losses import ClippedLoss, clip_fraction

from .batch import Batch, MicroBatch, micro_batches
from .config import RunConfig
from .layout import Layout, from_last_stage, gather_rows

_FIELDS = {
    "logprobs": torch.float32,
    "entropy": torch.float32,
    "target_rank": torch.int64,
    "lse": torch.float32,
}


class Policy:
    """A GPTModel (this rank's part) with what a policy is asked for.

    trainable: wraps the model into Megatron's DDP, whose buffers gather the gradients.
    """

    def __init__(
        self, model: Any, config: RunConfig, layout: Layout, *, vocab_size: int, trainable: bool
    ) -> None:
        self.gpt_model = model  # bare, for its weights
        self.model = model
        self.config, self.layout = config, layout
        self.megatron_config = model.config
        g = config.grpo
        # A loss per token, of that token's figures alone.
        self.loss = ClippedLoss(clip_low=g.clip_low, clip_high=g.clip_high, kl_coef=g.kl_coef)
        self.padded_vocab = model.vocab_size
        # The sampler's temperature, so that the ratio compares like with like; the true
        # vocabulary, so that padded columns are never counted.
        self.train_config = dataclasses.replace(
            LogprobConfig.from_dict(config.logprobs),
            temperature=config.rollout.temperature,
            vocab_size=vocab_size,
        )
        self.score_config = dataclasses.replace(self.train_config, entropy=True, target_rank=True)
        if config.model.dtype == "bfloat16":
            from megatron.core.transformer.module import Float16Module

            self.model = Float16Module(self.megatron_config, self.model)
        if trainable:
            self._wrap_ddp()
        else:
            self.model.requires_grad_(False)

    def _wrap_ddp(self) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )

        self.model = DistributedDataParallel(
            config=self.megatron_config,
            ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            module=self.model,
        )
        self.megatron_config.finalize_model_grads_func = finalize_model_grads
        self.megatron_config.no_sync_func = self.model.no_sync

    @torch.no_grad()
    def stats(self, batch: Batch) -> TokenStats:
        """Statistics of the batch's labels: float32 [n, s] on every rank, whatever the layout."""

        def keep(micro: MicroBatch, stats: TokenStats) -> tuple[Tensor, Tensor, TokenStats]:
            return stats.logprobs.sum(), micro.batch.mask.sum().int(), stats

        with patch_model(self.model, self.score_config):
            found = self.run(batch, keep, forward_only=True)
        whole = {
            name: self._whole([getattr(stats, name) for stats in found], batch, dtype)
            for name, dtype in _FIELDS.items()
        }
        return TokenStats(**whole)

    def accumulate_gradients(self, batch: Batch, *, way: str | None = None) -> dict[str, float]:
        """One forward and backward over the batch; leaves the mean loss's gradient, summed over
        all ranks, in `main_grad`. Returns the mean loss and the clipped share of tokens.

        way: "logits", "fused" or "linear" (see compare.py); None: what the configuration says.
        """
        if way is None:
            fused = "fused" if self.train_config.fused else "logits"
            way = "linear" if self.config.grpo.policy_loss == "linear" else fused
        self.model.zero_grad_buffer()
        config = dataclasses.replace(
            self.train_config,
            fused=way != "logits",
            compact=way == "linear",  # prompts and padding cost no product
        )
        with patch_model(self.model, config) as handle:
            if way == "linear":
                # The loss is formed with the logits of each chunk: three products, not four.
                around = partial(self._loss_in_head, handle)
                found = self.run(batch, self._loss_of_head, around, forward_only=False)
            else:
                found = self.run(batch, self._loss_of_stats, forward_only=False)
        sums = torch.zeros(3, dtype=torch.float64, device=self.layout.device)
        for part in found:
            sums += part
        from megatron.core import parallel_state as ps

        dist.all_reduce(sums, group=ps.get_data_parallel_group(with_context_parallel=True))
        loss, clipped, tokens = from_last_stage(sums, self.layout).tolist()
        return {"loss": loss / tokens, "clip_fraction": clipped / tokens}

    def _loss_inputs(self, micro: MicroBatch) -> tuple[Tensor, ...]:
        b = micro.batch
        reference = (b.ref_logprobs,) if self.loss.kl_coef > 0 else ()
        return (b.old_logprobs, b.advantages, *reference)

    def _loss_of_stats(self, micro: MicroBatch, stats: TokenStats) -> tuple[Tensor, Tensor, Tensor]:
        per_token = self.loss(stats.logprobs, stats.entropy, *self._loss_inputs(micro))
        return self._report(micro, (per_token * micro.batch.mask).sum(), stats)

    def _loss_in_head(self, handle: PatchHandle, micro: MicroBatch) -> Any:
        return handle.policy_loss(self.loss, *self._loss_inputs(micro))

    def _loss_of_head(self, micro: MicroBatch, stats: TokenStats) -> tuple[Tensor, Tensor, Tensor]:
        return self._report(micro, stats.policy_loss, stats)

    def _report(
        self, micro: MicroBatch, loss: Tensor, stats: TokenStats
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Megatron's three outputs: the sum, the tokens that it is over, and what to report."""
        b = micro.batch
        clipped = clip_fraction(
            stats.logprobs,
            b.old_logprobs,
            b.advantages,
            clip_low=self.loss.clip_low,
            clip_high=self.loss.clip_high,
        )
        tokens = b.mask.sum()
        report = torch.stack([loss.detach().double(), clipped.sum().double(), tokens.double()])
        return loss, tokens.int(), report

    def run(
        self,
        batch: Batch,
        loss_func: Any,
        around: Any = contextlib.nullcontext,
        *,
        forward_only: bool,
        with_labels: bool = True,
    ) -> list[Any]:
        """Megatron's forward-backward over this rank's micro-batches: `loss_func(micro, output)`
        gives (sum, tokens, report); returns the reports, on the last pipeline stage. The model
        runs inside `around(micro)`. Without labels the output is its vocab-parallel logits."""
        from megatron.core import parallel_state as ps
        from megatron.core.pipeline_parallel import get_forward_backward_func

        size = self.config.grpo.micro_batch
        micros = list(
            micro_batches(
                batch,
                size=size,
                dp_rank=self.layout.dp_rank,
                dp=self.layout.dp,
                cp_group=ps.get_context_parallel_group(),
            )
        )

        def forward_step(iterator: Any, model: Any) -> tuple[Any, Any]:
            micro = next(iterator)
            with around(micro):
                output = model(
                    input_ids=micro.batch.tokens,
                    position_ids=micro.position_ids,
                    attention_mask=None,  # causal; padding stands to the right
                    labels=micro.batch.labels if with_labels else None,
                )
            return output, partial(loss_func, micro)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micros),
            model=[self.model],
            num_microbatches=len(micros),
            seq_length=batch.tokens.shape[1],
            micro_batch_size=size,
            forward_only=forward_only,
        )

    def _whole(self, parts: list[Tensor], batch: Batch, dtype: torch.dtype) -> Tensor:
        """The last stage's [micro_batch, s / CP] parts -> [n, s] on every rank."""
        from megatron.core import parallel_state as ps

        if self.layout.last_stage:
            cp_group = ps.get_context_parallel_group()
            local = context_parallel_gather(torch.cat(parts), cp_group=cp_group, seq_dim=1)
            whole = gather_rows(local, self.layout)
        else:
            whole = torch.empty(batch.tokens.shape, dtype=dtype, device=self.layout.device)
        return from_last_stage(whole, self.layout)
