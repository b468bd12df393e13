"""Everything that wants a GPU, in the time there is: `python -m benchmarks.gpu_session`.

Groups of cases run one after the other, the most valuable first, each in a process of its own with
a slice of the time that is left: one that overruns is killed, one that crashes takes no other with
it. Each case is a line of JSON as soon as it is known, so that a session that is cut off leaves
what it has found. Without a GPU the kernels run in Triton's interpreter (`--small` then), which
tries the script and measures nothing.

    DIR/results.jsonl   one case a line: group, case, status, at (seconds since the start), figures
    DIR/summary.md      the same as tables, written after each group
    DIR/frontier.png    time against memory, where matplotlib imports
    DIR/logs/           what each group printed; the kernel tests' report is logs/tests.txt
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
        env: environment variables of its process, set before a kernel is imported.
        parts: of which halves of a session it is a part.
    """

    name: str
    run: Callable[[Any], object]
    weight: float
    env: dict[str, str] = field(default_factory=dict)
    least: float = 10.0
    parts: tuple[int, ...] = (1,)


@dataclass
class Session:
    """A session's time and files; `time.monotonic` throughout."""

    out: Path
    started: float
    until: float
    small: bool
    cuda: bool

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
        return records


def run_groups(groups: Sequence[Group], session: Session) -> None:
    """Run the groups within the session's time; what becomes of each is recorded."""
    for place, group in enumerate(groups):
        left = session.until - time.monotonic()
        weights = sum(later.weight for later in groups[place:])
        limit = max(min(group.least, left / 3), left * group.weight / weights)
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


def _die_with_parent() -> None:
    """A session that is killed outright leaves no group on the GPU."""
    with suppress(OSError, AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _child(group: Group, session: Session, until: float) -> None:
    os.setpgrp()  # ended with all that it starts; no session, which would outlive the caller's
    _die_with_parent()
    logs = session.out / "logs"
    logs.mkdir(exist_ok=True)
    handle = os.open(
        logs / f"{group.name.replace(' ', '-')}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    )
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ.update(group.env)
    from benchmarks.gpu_timing import GroupRun, let_one_element_be_a_number

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
        "--part", type=int, choices=(1, 2), help="half of the groups: a session in two calls"
    )
    parser.add_argument("--only", nargs="+", choices=names, metavar="GROUP", help=", ".join(names))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the session; 0 if every group ended well and no case failed."""
    started = time.monotonic()
    import torch  # noqa: F401  (each group's process inherits it)

    from benchmarks import gpu_groups, gpu_summary

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
    chosen = [group for group in chosen if args.part is None or args.part in group.parts]
    # The last of the time is the summary's.
    reserve = min(20.0, max(2.0, 0.05 * args.deadline))
    end = started + args.deadline
    session = Session(args.out, started, end - reserve, args.small, cuda)
    session.results.unlink(missing_ok=True)
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
