"""SIGKILL at random moments of a run whose workspace is on an unreliable S3 server.

    python benchmarks/remote_kills.py --kills 200

Starts moto's server and a proxy in front of it that answers some requests with 500, delays some, and cuts the
connection of some, before or after the server has acted. A child trains with ``workspace="s3://..."`` and is killed;
half of the time its local folder is lost too. After every kill the state in the store must be complete; at the end it
must equal that of an undisturbed run, and nothing may be left over. Each process lives at most as long as its first
upload and three more take, estimated from earlier processes. Needs ``moto[server]`` and ``s3fs``.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from treadle import BaseTrainer, CheckpointingHook, set_seed
from treadle.checkpoint.objects import ObjectStore
from treadle.checkpoint.remote import RemoteWorkspace, furthest
from treadle.checkpoint.store import find_latest
from treadle.hooks.checkpointing import step_states

STEPS = 400


class Fit(BaseTrainer):
    """A small model with dropout, augmentation and numbered checkpoints, slow enough to be killed."""

    def build_data_loader(self) -> Any:
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x), batch_size=8, shuffle=True)

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 1))

    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def build_hooks(self) -> list[Any]:
        return [CheckpointingHook(4, background=True)]

    def forward(self, input: Any) -> Any:
        time.sleep(0.02)
        (x,) = input
        return self.model(x + 0.1 * torch.rand_like(x)).square().mean(), {}


def train(workspace: str) -> None:
    """Train to the end from the state of the workspace."""
    set_seed(0)
    Fit(STEPS, workspace=workspace, device="cpu", progress=False).train()


class Proxy:
    """Proxy that forwards requests to a server and makes some of them fail.

    Attributes:
        port: the port it listens on.
        faults: the count of each kind of fault.
        uploads: the time at which each manifest was put.
    """

    def __init__(self, target: int, *, rate: float, seed: int = 0):
        chance, faults = random.Random(seed), {"500": 0, "slow": 0, "cut before": 0, "cut after": 0}
        self.faults, self.requests = faults, 0
        self.uploads: list[float] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None: ...

            def serve(self) -> None:
                proxy.requests += 1
                fault = chance.choice(list(faults)) if chance.random() < proxy.rate else None
                body = self._body()
                if fault is not None:
                    faults[fault] += 1
                if fault == "slow":
                    time.sleep(chance.uniform(0.2, 1.0))
                if fault == "cut before":
                    self.close_connection = True
                    return
                if fault == "500":
                    self._answer(500, [], b"<Error><Code>InternalError</Code></Error>")
                    return
                upstream = http.client.HTTPConnection("127.0.0.1", target, timeout=60)
                headers = {key: value for key, value in self.headers.items() if key.lower() != "transfer-encoding"}
                upstream.request(
                    self.command, self.path, body=body, headers={**headers, "Content-Length": str(len(body))}
                )
                answer = upstream.getresponse()
                data = answer.read()
                if self.command == "PUT" and "/manifests/" in self.path and answer.status == 200:
                    proxy.uploads.append(time.monotonic())
                if fault == "cut after":
                    self.close_connection = True
                    return
                self._answer(answer.status, answer.getheaders(), data)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = serve

            def _body(self) -> bytes:
                if "chunked" in self.headers.get("Transfer-Encoding", ""):
                    parts = b""
                    while size := int(self.rfile.readline().split(b";")[0], 16):
                        parts += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                    return parts
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))

            def _answer(self, status: int, headers: Any, data: bytes) -> None:
                self.send_response(status)
                for key, value in headers:
                    if key.lower() not in ("transfer-encoding", "content-length", "connection", "date", "server"):
                        self.send_header(key, value)
                length = {key.lower(): value for key, value in headers}.get("content-length")
                self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(data)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(b"" if self.command == "HEAD" else data)

        self.rate = rate
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop the proxy."""
        self._server.shutdown()


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[int]:
    """Run moto's S3 server with a bucket ``runs`` inside the block; yield its port."""
    port = _free_port()
    with open(folder / "server.log", "w") as log:
        command = [sys.executable, "-c", f"from moto.server import main; main(['-p', '{port}', '-H', '127.0.0.1'])"]
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                connection.request(
                    "PUT",
                    "/runs",
                    headers={"Authorization": "AWS4-HMAC-SHA256 Credential=a/b/us-east-1/s3/aws4_request"},
                )
                if connection.getresponse().status == 200:
                    break
            time.sleep(0.1)
        yield port
    finally:
        server.kill()
        server.wait()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def point_s3fs_to(port: int) -> None:
    """Point every s3:// URL of this process and its children to the server at a port."""
    import s3fs  # noqa: F401  (imported once, before any fork)

    os.environ.update(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}", AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b",
        AWS_DEFAULT_REGION="us-east-1", AWS_MAX_ATTEMPTS="1", AWS_REQUEST_CHECKSUM_CALCULATION="when_required",
    )  # fmt: skip


class Lives:
    """Random lifetimes of processes in seconds, based on the upload times of earlier ones.

    Args:
        chance: the random generator.
        longest: upper bound.
    """

    def __init__(self, chance: random.Random, longest: float):
        self.chance, self.longest = chance, longest
        self.firsts: list[float] = []
        self.gaps: list[float] = []

    def note(self, began: float, uploads: list[float]) -> None:
        """Record the uploads of a process."""
        mine = [moment for moment in uploads if moment >= began]
        self.firsts += [mine[0] - began] if mine else []
        self.gaps += [late - early for early, late in pairwise(mine)]

    def draw(self) -> float:
        """Return the lifetime of the next process."""
        usual = median(self.firsts or [3.0]) + 3 * median(self.gaps or [1.0])
        return self.chance.uniform(0.3, min(usual, self.longest))


def forked(work: Callable[[], Any], log: Path) -> int:
    """Run a function in a forked child; return its process id."""
    child = os.fork()
    if child == 0:
        with open(log, "a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001  (the child ends here)
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
            os._exit(7)
    return child


def wait(child: int, seconds: float | None = None) -> int | None:
    """Wait for a child and return its exit code, negative for a signal; None if it is still running."""
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if end is not None and time.monotonic() > end:
            return None
        time.sleep(0.005)


def look(url: str, folder: Path, answer: Path) -> None:
    """Write the content of the store: the furthest state, whether it can be read, and leftovers."""
    shutil.rmtree(folder, ignore_errors=True)
    remote = RemoteWorkspace(ObjectStore(url, pause=0.05), folder)
    said: list[str] = []
    filled = remote.restore(said.append)
    found = find_latest(step_states(folder / "checkpoints")) if filled else None
    reach = furthest(folder) if filled else None
    answer.write_text(
        json.dumps({"step": reach.step if reach else 0, "problems": said, "leftovers": remote.leftovers()})
    )
    if found is not None:
        torch.save(found[1], answer.with_suffix(".pt"))


def looked(url: str, folder: Path) -> dict[str, Any]:
    """Return the result of :func:`look`."""
    answer = folder / "answer.json"
    code = wait(forked(lambda: look(url, folder / "looked", answer), folder / "look.log"))
    if code:
        return {"problems": [(folder / "look.log").read_text()[-2000:]], "step": 0, "leftovers": []}
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return the paths at which two states differ, ignoring their environment."""
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, other) else [path]
    if isinstance(one, dict):
        keys = (one.keys() | other.keys()) - ({"config", "versions", "hooks"} if not path else set())
        return [line for key in keys for line in differences(one.get(key), other.get(key), f"{path}.{key}")]
    if isinstance(one, (list, tuple)):
        return [line for left, right in zip(one, other, strict=True) for line in differences(left, right, path)]
    return [] if one == other or one != one else [path]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--rate", type=float, default=0.05, help="share of requests that are answered badly")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=30.0, help="seconds after which a life is over at the latest")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="ends after the run in which this is over")
    parser.add_argument("--write", action="store_true", help="write the table of results")
    arguments = parser.parse_args()
    result = soak(arguments.kills, arguments.rate, arguments.seed, arguments.seconds, arguments.longest)
    print(json.dumps(result, indent=1))
    if arguments.write:
        write(result)


def write(result: dict[str, Any]) -> None:
    """Write the table of results."""
    from machine import describe, write_result

    row = {key: value for key, value in result.items() if key != "faults"}
    row |= {"requests answered badly": sum(result["faults"].values())}
    write_result("remote_kills", "Random kills with the workspace on an S3 server", list(row), [row], describe())


def soak(kills: int, rate: float, seed: int, seconds: float = float("inf"), longest: float = 30.0) -> dict[str, Any]:
    """Kill runs until there are enough kills; return the counts."""
    torch.set_num_threads(1)
    began = time.monotonic()
    lives = Lives(random.Random(seed), longest)
    result: dict[str, Any] = {
        "kills": 0, "runs": 0, "differing ends": 0, "unreadable states": 0, "left over": 0, "went back": 0,
        "failed": 0, "wiped": 0, "went on": 0,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary, s3_server(Path(temporary)) as server:
        folder = Path(temporary)
        os.environ["TREADLE_STAGING"] = str(folder / "staging")
        train(str(folder / "straight"))  # here, so that no child begins with imports
        straight = torch.load(folder / "straight" / "checkpoints" / f"checkpoint_step_{STEPS}.pt", weights_only=True)
        proxy = Proxy(server, rate=rate, seed=seed)
        point_s3fs_to(proxy.port)
        while result["kills"] < kills and time.monotonic() - began < seconds:
            _one_run(f"s3://runs/{result['runs']}", folder, straight, result, lives, proxy, kills)
        result["requests"], result["faults"] = proxy.requests, proxy.faults
        proxy.close()
    result["s to the first upload"], result["s between uploads"] = (
        round(median(some), 1) if some else None for some in (lives.firsts, lives.gaps)
    )
    return {**result, "seconds": round(time.monotonic() - began)}


def _one_run(
    url: str, folder: Path, straight: Any, result: dict[str, Any], lives: Lives, proxy: Proxy, kills: int
) -> None:
    result["runs"] += 1
    reached = 0
    while True:
        began = time.monotonic()
        child = forked(lambda: train(url), folder / "log")
        code = wait(child, lives.draw() if result["kills"] < kills else None)
        if code is None:
            os.kill(child, signal.SIGKILL)
            code = wait(child)
        lives.note(began, proxy.uploads)
        if code == 0:
            break
        if code != -signal.SIGKILL:
            result["failed"] += 1
            result.setdefault("errors", []).append((folder / "log").read_text()[-1500:])
            if result["failed"] > 5:
                raise SystemExit(json.dumps(result, indent=1))
            continue
        result["kills"] += 1
        found = looked(url, folder)
        result["unreadable states"] += bool(found["problems"])
        result["went back"] += found["step"] < reached
        result["went on"] += found["step"] > reached
        reached = found["step"]
        if lives.chance.random() < 0.5:
            shutil.rmtree(folder / "staging", ignore_errors=True)
            result["wiped"] += 1
    found = looked(url, folder)
    end = torch.load(folder / "answer.pt", weights_only=True)
    result["differing ends"] += bool(differences(straight, end)) or found["step"] != STEPS
    result["left over"] += len(found["leftovers"])
    shutil.rmtree(folder / "staging", ignore_errors=True)


if __name__ == "__main__":
    main()
