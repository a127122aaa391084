"""Hostile programs in a real sandbox, as root and as an ordinary user: none gets out, and the host stays as it was."""

import json
import os
import runpy
import secrets
import select
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from rla_lightning.sandbox import Run, RunResult, Sandbox, SandboxSettings
from rla_lightning.types import ConfigError

ROOT = Path(__file__).parents[2]
ATTACKS = runpy.run_path(str(Path(__file__).with_name("attacks.py")))["ATTACKS"]  # tests are no package to import from
FIRST_UID = 60900  # apart from the users of other sandboxes on this machine
NOBODY = 65534
PROCESSES = 3  # of a worker: the one outside, process 1 inside, and the one that waits for the next run
SETTINGS = SandboxSettings(workers=1, memory_mb=64, output_kb=256, first_uid=FIRST_UID)
HARMLESS = Run("print(sum(map(int, input().split())))", ("19 23",), 10.0)


@dataclass
class Host:
    """What programs must not reach: sockets that listen, a folder that all may write to, secrets, signal handlers."""

    folder: Path
    sockets: list[socket.socket]
    words: dict[str, str]  # what stands for each @WORD@ of an attack
    expected: str  # an output that only this process knows
    signals: list[int]

    def fill(self, text: str) -> str:
        for word, value in self.words.items():
            text = text.replace(f"@{word}@", value)
        return text


def halves(name: str) -> tuple[str, str]:
    """A secret in two parts, so that a program that looks for it does not find its own text."""
    return name.lower() + secrets.token_hex(8), secrets.token_hex(8)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory(prefix="canary-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "canary").write_text("alive")
        (folder / "canary").chmod(0o666)
        tcp, udp, path, abstract = (
            socket.socket(family, kind)
            for family, kind in (
                (socket.AF_INET, socket.SOCK_STREAM),
                (socket.AF_INET, socket.SOCK_DGRAM),
                (socket.AF_UNIX, socket.SOCK_STREAM),
                (socket.AF_UNIX, socket.SOCK_STREAM),
            )
        )
        tcp.bind(("127.0.0.1", 0))
        port = tcp.getsockname()[1]
        udp.bind(("127.0.0.1", port))
        path.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o777)
        abstract.bind("\0" + folder.name)
        for listener in (tcp, path, abstract):
            listener.listen()
        pairs = {name: halves(name) for name in ("ENVIRONMENT", "EXPECTED", "EARLIER", "PROGRAM")}
        words = {f"{name}_{part}": half for name, pair in pairs.items() for part, half in zip("AB", pair, strict=True)}
        words |= {"PORT": str(port), "ABSTRACT": folder.name, "CANARY": name, "REPOSITORY": str(ROOT)}
        signals: list[int] = []
        before = {number: signal.signal(number, lambda got, _: signals.append(got)) for number in (signal.SIGUSR1, signal.SIGIO)}
        os.environ["RLA_CANARY"] = "".join(pairs["ENVIRONMENT"])
        yield Host(folder, [tcp, udp, path, abstract], words, "".join(pairs["EXPECTED"]), signals)
        del os.environ["RLA_CANARY"]
        for number, handler in before.items():
            signal.signal(number, handler)
        for listener in (tcp, udp, path, abstract):
            listener.close()


def parents() -> dict[int, tuple[int, int]]:
    """Of every process: its parent and its user."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            lines = dict(line.split(":\t", 1) for line in (entry / "status").read_text().splitlines() if ":\t" in line)
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        found[int(entry.name)] = (int(lines["PPid"]), int(lines["Uid"].split()[0]))
    return found


def descendants(process: int) -> set[int]:
    table = parents()
    found: set[int] = {process}
    while True:
        more = {child for child, (parent, _) in table.items() if parent in found} - found
        if not more:
            return found - {process}
        found |= more


def settled(old: set[int], number: int) -> set[int]:
    """The processes below this one beyond the old ones; a worker's last process comes a moment after its reply."""
    for _ in range(200):
        found = descendants(os.getpid()) - old
        if len(found) == number:
            break
        time.sleep(0.01)
    return found


def settled_of_slot(number: int) -> int:
    """How many processes run as the slot's own user; of those that were counted before, one may have been about to end."""
    for _ in range(200):
        found = sum(owner == FIRST_UID for _, owner in parents().values())
        if found == number:
            break
        time.sleep(0.01)
    return found


def files_of_others() -> set[str]:
    """What lies in the host's /tmp and belongs to a user of the sandbox."""
    users = (FIRST_UID, os.geteuid()) if os.geteuid() else (FIRST_UID,)
    return {entry.name for entry in os.scandir("/tmp") if entry.stat(follow_symlinks=False).st_uid in users}


@dataclass(frozen=True)
class Account:
    """All that happened in one variant."""

    refusal: str  # why this machine cannot isolate programs
    results: dict[str, tuple[RunResult, RunResult]]  # of an attack by name, and of the harmless program after it
    processes: tuple[int, int, int]  # below this process, beyond those before: with the worker, after all attacks, after close
    slot_processes: int  # of the slot's own user, which only root gives it
    is_root: bool
    new_files: list[str]


CANNOT_DROP = Account("root cannot become another user here", {}, (0, 0, 0), 0, False, [])


def attack_all(host: Host, user: int) -> Account:
    """Run every attack and a harmless program after each, all in one worker."""
    host.words |= {"TRAINER": str(os.getpid()), "USER": str(user)}
    old_processes, old_files = descendants(os.getpid()), files_of_others()
    sandbox = Sandbox(SETTINGS)
    try:
        sandbox.start()
    except ConfigError as error:
        return Account(str(error), {}, (0, 0, 0), 0, user == 0, [])
    results = {}
    try:
        started = len(settled(old_processes, PROCESSES))
        for attack in ATTACKS:
            if attack.before:
                ((before,),) = sandbox.run([Run(host.fill(attack.before), ("",), attack.seconds)])
                assert before.status == "ok", (attack.name, before)
            ((result,),) = sandbox.run([Run(host.fill(attack.program), (attack.stdin,), attack.seconds)])
            ((after,),) = sandbox.run([HARMLESS])
            results[attack.name] = (result, after)
        ended = settled(old_processes, PROCESSES)
        slots = settled_of_slot(0 if user else PROCESSES)
    finally:
        sandbox.close()
    closed = len(settled(old_processes, 0))
    return Account("", results, (started, len(ended), closed), slots, user == 0, sorted(files_of_others() - old_files))


def gave_up_root() -> bool:
    """False in containers whose root has no other users."""
    try:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    except OSError:
        return False
    return True


def attack_as_nobody(host: Host) -> Account:
    """The same in a child process that has given up root."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            text = json.dumps(asdict(attack_all(host, NOBODY) if gave_up_root() else CANNOT_DROP))
            status = 0
        except BaseException:
            text = traceback.format_exc()
        with open(writer, "w") as pipe:
            pipe.write(text)
        os._exit(status)
    os.close(writer)
    with open(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, text
    account: dict[str, Any] = json.loads(text)
    pairs = {name: (RunResult(**result), RunResult(**after)) for name, (result, after) in account["results"].items()}
    return Account(**account | {"results": pairs, "processes": tuple(account["processes"])})


@pytest.fixture(scope="module", params=["root", "ordinary"])
def account(host: Host, request: pytest.FixtureRequest) -> Account:
    is_root = os.geteuid() == 0
    if request.param == "root" and not is_root:
        pytest.skip("these tests do not run as root")
    given = attack_as_nobody(host) if request.param == "ordinary" and is_root else attack_all(host, os.geteuid())
    if given.refusal:
        if os.environ.get("CI") == "true":
            pytest.fail(given.refusal)
        pytest.skip(given.refusal)
    return given


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_attack_is_contained(account: Account, host: Host, attack: Any) -> None:
    result, after = account.results[attack.name]
    assert "ESCAPED" not in result.stdout, result
    assert not any(line.startswith("ESCAPED") for line in result.stderr.splitlines()), result
    assert result.status in attack.statuses, result
    if attack.stdout is not None:
        assert result.stdout == attack.stdout, result.stderr
    for secret in (host.expected, os.environ["RLA_CANARY"]):
        assert secret not in result.stdout + result.stderr
    assert (after.status, after.stdout, after.stderr) == ("ok", "42\n", "")


def test_the_host_is_as_before(account: Account, host: Host) -> None:
    assert sorted(entry.name for entry in host.folder.iterdir()) == ["canary", "socket"]
    assert (host.folder / "canary").read_text() == "alive"
    assert host.signals == []
    assert select.select(host.sockets, [], [], 0)[0] == [], "somebody connected"
    assert account.new_files == []
    assert account.processes == (PROCESSES, PROCESSES, 0)
    assert account.slot_processes == (PROCESSES if account.is_root else 0)


def test_the_canaries_would_notice(host: Host) -> None:
    """The same techniques work outside the sandbox, so that silence means something."""
    tcp, _, path, abstract = host.sockets
    for listener in (tcp, path, abstract):
        with socket.socket(listener.family) as client:
            client.connect(listener.getsockname())
            assert select.select(host.sockets, [], [], 5)[0] == [listener]
            listener.accept()[0].close()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert host.signals == [signal.SIGUSR1]
    host.signals.clear()


def test_there_are_enough_techniques() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)
    assert len(ATTACKS) >= 40
