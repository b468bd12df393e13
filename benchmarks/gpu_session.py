"""Everything that wants a GPU, in the time there is: `python -m benchmarks.gpu_session`.

    bash benchmarks/carry.sh                # where there is a network: other libraries' wheels
    python -m benchmarks.gpu_session --deadline 560 --out DIR

Groups of cases run one after the other, the most valuable first, each forked from a process that
has done the imports, with a slice of the time that is left: one that overruns is killed, one that
crashes takes no other with it. Each case is a line of JSON as soon as it is known, so that a
session that is cut off leaves what it has found. The same command again goes on where it ended:
what is recorded is not measured again. Parts 1 (this library at the shapes that RL runs) and 2
(others there, and the kernels) share the time; part 3 (tests, ranks, launches, ceilings) gets what
they leave. Without a GPU the kernels run in Triton's interpreter (`--small` then), which tries the
script and measures nothing.

    DIR/results.jsonl   one case a line: group, case, status, at (seconds since the start), figures
    DIR/summary.md      one table, the picture and what was predicted; written after each group
    DIR/details.md      every figure, a table for each group
    DIR/frontier.png    time against memory, where matplotlib imports
    DIR/log.txt         what the groups printed
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Group:
    """Cases that share a process.

    Attributes:
        run: takes a `GroupRun` and records its cases.
        weight: its share of the time that is left when it starts, against the later ones' weights.
        least: seconds that it gets in any case, up to a third of what is left.
        env: environment variables of its process.
        part: 1 and 2 share the session's time, 3 has what they leave.
        always: runs in each call of a session: what it makes is not in the records.
        foreign: runs other libraries, which are imported before any group starts.
    """

    name: str
    run: Callable[[Any], object]
    weight: float
    env: dict[str, str] = field(default_factory=dict)
    least: float = 10.0
    part: int = 1
    always: bool = False
    foreign: bool = False


@dataclass
class Session:
    """A session's time and files; `time.monotonic` throughout.

    Attributes:
        slices: give each group a slice of what is left, not all of it.
        absent: what did not import before the groups started, and why.
    """

    out: Path
    started: float
    until: float
    small: bool
    cuda: bool
    slices: bool = True
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def results(self) -> Path:
        return self.out / "results.jsonl"

    def note(self, group: str, case: str, status: str, **fields: Any) -> None:
        at = round(time.monotonic() - self.started, 3)
        line = {"group": group, "case": case, "status": status, "at": at, **fields}
        with open(self.results, "a") as file:
            file.write(json.dumps(line) + "\n")

    def summarize(self) -> list[dict[str, Any]]:
        """Write what there is as tables; returns it."""
        from benchmarks import gpu_summary

        records = gpu_summary.read(self.results)
        (self.out / "summary.md").write_text(gpu_summary.as_markdown(records))
        (self.out / "details.md").write_text(gpu_summary.details(records))
        return records


def run_groups(groups: Sequence[Group], session: Session) -> None:
    """Run the groups within the session's time; what becomes of each is recorded.

    A group that an earlier call has ended, with no case failed or left out for lack of time, is
    passed over.
    """
    from benchmarks import gpu_summary

    known = gpu_summary.ended(gpu_summary.read(session.results))
    groups = [group for group in groups if group.always or group.name not in known]
    for place, group in enumerate(groups):
        left = session.until - time.monotonic()
        sharing = [later for later in groups[place:] if later.part <= max(2, group.part)]
        limit = max(
            min(group.least, left / 3),
            left * group.weight / sum(later.weight for later in sharing),
        )
        limit = limit if session.slices else left
        if limit < 0.5:
            session.note(group.name, "group", "left out", reason="no time left")
            continue
        print(f"== {group.name}: {limit:.0f} s at most", flush=True)
        begin = time.monotonic()
        ended = _run_in_process(group, session, begin + limit)
        took = round(time.monotonic() - begin, 2)
        if ended is None:
            session.note(group.name, "group", "killed", took=took, limit=round(limit, 2))
        elif ended:
            why = f"signal {-ended}" if ended < 0 else f"exit status {ended}"
            session.note(group.name, "group", "failed", took=took, reason=why)
        else:
            session.note(group.name, "group", "ok", took=took)
        session.summarize()
        print(f"   {took} s{'' if ended == 0 else ', killed' if ended is None else ', failed'}")


def _run_in_process(group: Group, session: Session, until: float) -> int | None:
    """The exit status of the group's process, None if its time ran out and it was killed."""
    # Forked from this process, which has imported torch and never touched a GPU: starts at once.
    process = multiprocessing.get_context("fork").Process(
        target=_child, args=(group, session, until)
    )
    process.start()
    try:
        process.join(max(0.1, until - time.monotonic()))
        return None if process.is_alive() else process.exitcode
    finally:
        _kill_session_of(process)


def _kill_session_of(process: Any) -> None:
    """End a group's process and all that it started."""
    for _ in range(50):  # until the child has made its own process group, a moment at most
        try:
            os.killpg(process.pid, signal.SIGKILL)
            break
        except ProcessLookupError:
            if not process.is_alive():
                break
            time.sleep(0.02)
    process.join(5.0)
    # A GPU's memory is free once every process that held some is gone.
    for _ in range(20):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.05)


def _child(group: Group, session: Session, until: float) -> None:
    from benchmarks import gpu_summary
    from benchmarks.gpu_timing import GroupRun, die_with_parent, let_one_element_be_a_number

    os.setpgrp()  # ended with all that it starts; no session, which would outlive the caller's
    die_with_parent()
    handle = os.open(session.out / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    print(f"\n==== {group.name} ====", flush=True)
    os.environ.update(group.env)
    if not session.cuda:
        let_one_element_be_a_number()
    # A little before it would be killed, so that it can say what it leaves out.
    margin = min(5.0, 0.1 * (until - time.monotonic()))
    run = GroupRun(
        group=group.name,
        out=session.out,
        results=session.results,
        until=until - margin,
        started=session.started,
        small=session.small,
        cuda=session.cuda,
        absent=session.absent,
        done=frozenset() if group.always else gpu_summary.done(gpu_summary.read(session.results)),
    )
    status = 0
    try:
        group.run(run)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # whatever threads or handlers a library has left behind


def _has_gpu(patience: float) -> bool:
    """Asked in another process: one that has touched the GPU must not be forked."""
    import torch

    def ask(answer: Any) -> None:
        answer.send(torch.cuda.is_available())

    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=ask, args=(there,))
    process.start()
    there.close()
    try:
        return bool(here.recv()) if here.poll(patience) else False
    except EOFError:
        return False
    finally:
        process.kill()
        process.join()


@contextmanager
def _groups_die_with_us() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind, so that the running group is ended and the summary written."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    heeded = [  # nohup's stays ignored
        n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _parser(names: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_session",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--deadline", type=float, required=True, metavar="SECONDS")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--small", action="store_true", help="tiny sizes: tries the script out")
    parser.add_argument(
        "--part", type=int, choices=(1, 2, 3), nargs="+", help="these parts of the groups only"
    )
    parser.add_argument(
        "--resume", type=Path, metavar="DIR", help="go on from this session's records, not OUT's"
    )
    parser.add_argument(
        "--peers", type=Path, metavar="DIR", help="wheels of other libraries (default: runs/peers)"
    )
    parser.add_argument("--only", nargs="+", choices=names, metavar="GROUP", help=", ".join(names))
    return parser


# Imported before the groups are forked; what is not there is said once, by the group environment.
_IMPORTS = ("mcore_logprobs.doctor", "mcore_logprobs.losses", "torch.profiler")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the session; 0 if every group ended well and no case failed."""
    started = time.monotonic()
    # Asked by NVML: a process that has asked the CUDA driver must not be forked.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch  # noqa: F401  (each group's process inherits it)

    from benchmarks import gpu_groups, gpu_peers, gpu_summary

    groups = gpu_groups.groups()
    args = _parser([group.name for group in groups]).parse_args(argv)
    if args.deadline < 5:
        raise SystemExit("--deadline: expected 5 seconds at least")
    args.out.mkdir(parents=True, exist_ok=True)
    cuda = _has_gpu(min(60.0, args.deadline / 2))
    if not cuda and not args.small:
        print("gpu_session: no CUDA device; --small tries the script without one", file=sys.stderr)
        return 2
    if not cuda:
        os.environ["TRITON_INTERPRET"] = "1"
    chosen = [group for group in groups if args.only is None or group.name in args.only]
    chosen = [group for group in chosen if args.part is None or group.part in args.part]
    # The last of the time is the summary's.
    reserve = min(20.0, max(2.0, 0.05 * args.deadline))
    end = started + args.deadline
    # Tiny sizes without a GPU measure nothing: a slow machine's groups take the time they need.
    session = Session(args.out, started, end - reserve, args.small, cuda, slices=cuda)
    if args.resume is not None and not session.results.exists():
        shutil.copyfile(args.resume / "results.jsonl", session.results)
    imports = list(_IMPORTS)
    if any(group.foreign for group in chosen):
        session.absent = gpu_peers.unpack(args.peers or gpu_peers.CARRIED)
        imports += dict.fromkeys(peer.module for peer in gpu_peers.PEERS)
    session.absent |= gpu_peers.preload(imports)
    print(f"imports: {time.monotonic() - started:.0f} s", flush=True)
    with _groups_die_with_us():
        try:
            run_groups(chosen, session)
        finally:
            records = session.summarize()
            print("\n" + (args.out / "summary.md").read_text())
        plot = Group("plot", lambda run: gpu_summary.plot(records, args.out / "frontier.png"), 1.0)
        _run_in_process(plot, session, end - 0.2)
    return 0 if gpu_summary.all_well(records) else 1


if __name__ == "__main__":
    sys.exit(main())
