"""A step beside an upload over the same step without, and how fast parts are sent; to an S3 server in a process of its own.

    python benchmarks/remote.py

The server (moto's) is on the same machine and takes its share of the cores, which a real one does not: the ratios are upper
bounds.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import machine
from workloads import MnistCNN

import instrument
from instrument.sinks.remote import RemoteFolder, filesystem
from instrument.sinks.transfer import send_all
from instrument.sinks.upload import Upload

ROUNDS, STEPS, BATCH = 8, 40, 16
SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print("%s:%d" % server.get_host_and_port(), flush=True)
sys.stdin.read()
"""
STATISTICS = {"layers": "layers.*", "kind": "forward", "action": "record"}
WAYS: dict[str, dict[str, Any]] = {
    "1 tensor of each": {**STATISTICS, "tensors": True, "samples": 1},
    "8 tensors of each": {**STATISTICS, "tensors": True, "samples": 8},
}


def train(folder: Path, spec: dict[str, Any], remote: RemoteFolder | None) -> tuple[float, float, float]:
    """Seconds of the median step; bytes sent by the last one; seconds from there to the end of the upload."""
    torch.manual_seed(0)
    model, images, targets = MnistCNN(), torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    times, upload = [], None
    with instrument.attach(model, {"out": spec}, optimizer=optimizer, out=folder) as probe:
        if remote is not None:
            upload = Upload(folder, remote, rank=0)
            upload.begin()
        for _ in range(STEPS):
            began = time.perf_counter()
            loss = torch.nn.functional.cross_entropy(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
            times.append(time.perf_counter() - began)
        sent = 0 if upload is None else upload.sent.bytes
    began = time.perf_counter()
    if upload is not None:
        assert not upload.end().missing
    return statistics.median(times), sent, time.perf_counter() - began


def measure(name: str, spec: dict[str, Any], bucket: str) -> str:
    """One line of the table."""
    ratios, bytes_in_all, beside = [], [], []
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(ROUNDS):
            found = {}
            for remote in (number % 2, 1 - number % 2):
                folder = Path(scratch) / f"{name}-{number}-{remote}".replace(" ", "_")
                there = RemoteFolder(f"{bucket}/{folder.name}", "") if remote else None
                found[remote] = train(folder, spec, there)
                if there is not None:
                    bytes_in_all.append(sum(there.sizes().values()))
            ratios.append(found[1][0] / found[0][0])
            beside.append(found[1][1] / bytes_in_all[-1])
        low, middle, high = statistics.quantiles(ratios, n=4)
        began, spent = time.perf_counter(), time.process_time()
        sent = send_all(folder, RemoteFolder(f"{bucket}/again/{folder.name}", ""))
        speed, spent = sent.bytes / (time.perf_counter() - began), time.process_time() - spent
    megabytes = statistics.median(bytes_in_all) / 1e6
    return (
        f"| {name} | {megabytes:.1f} | {megabytes / STEPS:.2f} | {100 * statistics.median(beside):.0f}% "
        f"| {middle:.3f} ({low:.2f}-{high:.2f}) | {speed / 1e6:.0f} | {1e9 * spent / sent.bytes:.1f} |"
    )


def main() -> None:
    print(machine())
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = f"http://{server.stdout.readline().strip()}"
    os.environ |= {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    os.environ |= {"AWS_DEFAULT_REGION": "us-east-1"}
    filesystem("s3://bucket", "")[0].mkdir("bucket")
    print(
        "\n| recorded | MB a run | MB a step | sent during the run | step: with over without | MB/s, alone | ms of a core a MB |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, spec in WAYS.items():
        print(measure(name, spec, "s3://bucket"), flush=True)
    server.kill()


if __name__ == "__main__":
    main()
