"""NeMo-RL's virtual cluster and worker group without Ray: one forked process for each worker.

The workers are the tests' own classes, whose methods are called as Ray would call them.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from typing import Any

from tests.trainers.frame import free_port

_FORK = multiprocessing.get_context("fork")


class Cluster:
    """`RayVirtualCluster`: how many workers there are."""

    def __init__(self, bundle_ct_per_node_list: list[int], **options: object) -> None:
        self.size = sum(bundle_ct_per_node_list)

    def shutdown(self) -> None: ...


class Builder:
    """`RayWorkerBuilder`: a worker's class, by its name, and what it is made with."""

    def __init__(self, name: str, *args: object, **options: object) -> None:
        module, _, self.name = name.rpartition(".")
        self.module, self.args, self.options = sys.modules[module], args, options

    def make(self) -> Any:
        return getattr(self.module, self.name)(*self.args, **self.options)


class WorkerGroup:
    """`RayWorkerGroup`: the workers wait for calls until they are shut down."""

    def __init__(self, *, cluster: Cluster, remote_worker_builder: Builder, **more: object) -> None:
        port, self.pipes, self.processes = free_port(), [], []
        for rank in range(cluster.size):
            here, there = _FORK.Pipe()
            given = (there, remote_worker_builder, rank, cluster.size, port)
            process = _FORK.Process(target=_work, args=given, daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def run_all_workers_single_data(self, method: str, **options: object) -> list[Any]:
        """What each worker's method gives.

        Raises:
            RuntimeError: with the traceback of the first that raises.
        """
        for pipe in self.pipes:
            pipe.send((method, options))
        answers = [pipe.recv() for pipe in self.pipes]
        for failed, result in answers:
            if failed:
                raise RuntimeError(result)
        return [result for _, result in answers]

    def shutdown(self, force: bool = False) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _work(pipe: Any, builder: Builder, rank: int, size: int, port: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    worker = builder.make()
    while True:
        method, options = pipe.recv()
        try:
            pipe.send((False, getattr(worker, method)(**options)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))
