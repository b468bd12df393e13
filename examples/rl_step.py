"""GRPO steps on a Megatron-Core model, with log-probabilities from mcore_logprobs.

    torchrun --nproc-per-node 3 examples/rl_step.py --config configs/smollm2-cpu.yaml

One step: transformers samples groups of answers with the policy's weights, the task scores them,
the Megatron model gives log-probabilities, entropy and target ranks (policy, old policy and
reference), the clipped GRPO loss goes backward through Megatron's own schedule and DDP, the
optimizer steps, and the weights go back to the sampler. `bash examples/run_rl_step.sh` sets up an
environment and runs this.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console
from rl.config import RunConfig, load_config, override, validate
from rl.errors import SetupError


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="a YAML file of configs/")
    parser.add_argument(
        "--steps", type=int, help="GRPO steps in all, those before a resume included"
    )
    parser.add_argument("--tp", type=int, help="tensor-parallel size")
    parser.add_argument("--cp", type=int, help="context-parallel size")
    parser.add_argument("--pp", type=int, help="pipeline-parallel size")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--output-dir", help="metrics and plot go to <this>/<config's name>")
    parser.add_argument("--save-every", type=int, help="checkpoint every so many steps (0: never)")
    parser.add_argument("--resume", metavar="DIR", type=Path, help="a checkpoint to go on from")
    parser.add_argument(
        "--compare", action="store_true", help="peak memory with and without fusion, and exit"
    )
    parser.add_argument(
        "--print-processes", action="store_true", help="print TP x CP x PP and exit"
    )
    return parser.parse_args()


def main() -> int:
    rank = int(os.environ.get("RANK", "0"))
    console = Console(width=None if sys.stdout.isatty() else 100)
    try:
        args = parse_args()
        config = override(
            load_config(args.config),
            steps=args.steps,
            tp=args.tp,
            cp=args.cp,
            pp=args.pp,
            seed=args.seed,
            output_dir=args.output_dir,
            save_every=args.save_every,
        )
        if args.print_processes:
            print(config.parallel.tp * config.parallel.cp * config.parallel.pp)
            return 0
        validate(config, int(os.environ.get("WORLD_SIZE", "1")))
        run(config, args, console)
    except SetupError as error:
        print(f"rank {rank}: error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def run(config: RunConfig, args: argparse.Namespace, console: Console) -> None:
    # Imported here, so that a mistake in the configuration is told before torch has loaded.
    from rl.layout import megatron_runtime, start_processes, stop_processes

    start_processes(config)
    try:
        with megatron_runtime(config):
            train(config, args, console)
    finally:
        stop_processes()


def train(config: RunConfig, args: argparse.Namespace, console: Console) -> None:
    from rl.layout import start_megatron
    from rl.trainer import Trainer

    layout = start_megatron(config)
    trainer = Trainer(config, layout, console)
    trainer.say(
        f"{config.name}: {config.model.source} at TP {layout.tp} x CP {layout.cp} x PP "
        f"{layout.pp} x DP {layout.dp}, task {config.task.name}, optimizer "
        f"{type(trainer.optimizer).__name__}"
    )
    trainer.self_check()
    if args.resume:
        trainer.resume(args.resume)
    if args.compare:
        trainer.compare()
    else:
        trainer.run()


if __name__ == "__main__":
    sys.exit(main())
