"""The service on this machine: requests a second and latency over HTTP, beside the method called directly.

    python benchmarks/serve.py --out results

A request is one image of a character under noise, as PNG. The clients are threads of this process with one connection
each, and a client sends its next request when it has its answer. They either share one stream or have one each. The
direct rate is that of `method(x)` with the same settings, images that are decoded already, and a batch of one. Only
127.0.0.1 is asked, for at most --seconds and --requests in a row of the table.
"""

import argparse
import http.client
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from pages import table
from PIL import Image

import mgtta
from mgtta._lib.files import atomic
from mgtta.data.glyphs import Glyphs
from mgtta.data.streams import corrupted, stream
from mgtta.serve.client import Client
from mgtta.serve.template import template

IMAGES = 256
WARM_UP_SECONDS = 2.0
PATH = "/v1/streams/{}/predict"


def pictures() -> tuple[torch.Tensor, list[bytes]]:
    """Return images of characters under noise, and the same as PNG files."""
    [batch] = stream(corrupted(Glyphs(IMAGES), ["gaussian_noise"]), batch_size=IMAGES)
    files = []
    for image in batch.x:
        file = io.BytesIO()
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "PNG")
        files.append(file.getvalue())
    return batch.x, files


def direct(x: torch.Tensor, seconds: float, requests: int) -> dict[str, Any]:
    """Call the method with one image at a time."""
    method = template("mgtta+", mgtta.load_model("glyphs_vit"), source="glyphs_vit", mirror=False)
    return measured("direct", [lambda i: method(x[i % IMAGES, None])], seconds, requests)


def over_http(address: str, files: list[bytes], clients: int, own: bool, seconds: float, limit: int) -> dict[str, Any]:
    """Let clients ask at the same time, each for its own stream or all for one."""
    kind = "one each" if own else "one"
    calls = []
    for client in range(clients):
        name = f"own-{client}" if own else "shared"
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
        calls.append(Caller(connection, PATH.format(name), files))
    try:
        return {"clients": clients, "streams": kind, **measured("http", calls, seconds, limit)}
    finally:
        for call in calls:
            call.connection.close()


class Caller:
    """One connection that sends picture after picture."""

    def __init__(self, connection: http.client.HTTPConnection, path: str, files: list[bytes]):
        self.connection = connection
        self.path = path
        self.files = files

    def __call__(self, i: int) -> None:
        self.connection.request("POST", self.path, self.files[i % len(self.files)])
        reply = self.connection.getresponse()
        body = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"{reply.status}: {body.decode()}")


def measured(kind: str, calls: list[Any], seconds: float, requests: int) -> dict[str, Any]:
    """Return rate and latency of all calls together, after a time to warm up."""
    begin = time.perf_counter() + WARM_UP_SECONDS
    end = begin + seconds
    latencies: list[float] = []
    errors: list[BaseException] = []

    def loop(number: int) -> None:
        i = number
        try:
            while (now := time.perf_counter()) < end and len(latencies) < requests and not errors:
                calls[number](i)
                i += len(calls)
                if now >= begin:
                    latencies.append(time.perf_counter() - now)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=loop, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    took = time.perf_counter() - begin
    ordered = sorted(latencies)
    return {
        "kind": kind,
        "requests": len(ordered),
        "per second": len(ordered) / took,
        "p50 ms": 1000 * ordered[len(ordered) // 2],
        "p99 ms": 1000 * ordered[int(0.99 * len(ordered))],
    }


def metric(address: str, name: str) -> float:
    """Return one figure of the service's own."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    [value] = [line.split()[1] for line in text.splitlines() if line.startswith(f"{name} ")]
    return float(value)


def run(clients: list[int], seconds: float, requests: int) -> dict[str, Any]:
    x, files = pictures()
    rows = [direct(x, seconds, requests)]
    print(rows[-1], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        words = ["serve", "--state", folder, "--port", "0", "--device", "cpu", "--loaded-streams", "128"]
        command = [sys.executable, "-m", "mgtta", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                address = server.stdout.readline().split()[-1]
                for count in clients:
                    for own in (False, True):
                        rows.append(over_http(address, files, count, own, seconds, requests))
                        print(rows[-1], flush=True)
                pause = metric(address, "mgtta_longest_pause_seconds")
                size = Client(address).report("shared")["bytes"]
            finally:
                server.terminate()
    return {
        "protocol": {
            "model": "glyphs_vit",
            "method": "mgtta+",
            "seconds": seconds,
            "requests at most": requests,
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "torch": torch.__version__,
        },
        "longest pause seconds": pause,
        "bytes of a stream": size,
        "rows": rows,
    }


def page(found: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    first = found["rows"][0]["per second"]
    lines = []
    for row in found["rows"]:
        share = row["per second"] / first
        figures = [f"{row['per second']:.1f}", f"{share:.2f}", f"{row['p50 ms']:.1f}", f"{row['p99 ms']:.1f}"]
        lines.append([row["kind"], str(row.get("clients", "")), row.get("streams", ""), *figures])
    head = ["", "clients", "streams", "requests/s", "of direct", "p50 ms", "p99 ms"]
    about = found["protocol"]
    return (
        "# The service\n\n"
        f"`{about['model']}` with `{about['method']}` on {about['cores']} cores, one image of 48 x 48 pixels in a "
        f"request, {about['seconds']:g} s for each row.\n\n{table(head, lines)}\n\n"
        f"The longest time for which answers waited for updates and a save: {found['longest pause seconds']:.2f} s. "
        f"Memory of the shared stream: {found['bytes of a stream'] / 1e6:.1f} MB.\n\n"
        "Command: `python benchmarks/serve.py --out results`\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="1,8,64", help="numbers of clients, separated by commas")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a row of the table")
    parser.add_argument("--requests", type=int, default=20_000, help="in a row of the table, at most")
    parser.add_argument("--out", type=Path, required=True, help="folder for serve.json and serve.md")
    args = parser.parse_args()
    found = run([int(count) for count in args.clients.split(",")], args.seconds, args.requests)
    args.out.mkdir(parents=True, exist_ok=True)
    with atomic(args.out / "serve.json") as temporary:
        temporary.write_text(json.dumps(found, indent=1) + "\n")
    with atomic(args.out / "serve.md") as temporary:
        temporary.write_text(page(found))


if __name__ == "__main__":
    main()
