"""The service on this machine: rate and latency over HTTP beside the method called directly, streams, and overload.

    python benchmarks/serve.py --out results

A request is one image of a character under noise, as PNG. The clients are threads of this process with one connection
each, and a client sends its next request when it has its answer. They either share one stream or have one each. The
direct rate is that of `method(x)` with the same settings, images that are decoded already, and a batch of one. It is
measured before and after each row of the table, and the row is compared with the mean of the two, so that other work on
the machine changes both alike. Every row is the median of several repetitions. Only 127.0.0.1 is asked.

Overload first measures the sustainable load: clients that wait for their answers, two for each of eight streams, with
16 images in a request. Then two processes send ten times as many images a second for a minute, each request on a
connection of its own and at its own time, whether or not earlier requests are answered.

Kills: the service gets SIGKILL at random moments, and must know all its streams when it starts again.
"""

import argparse
import asyncio
import http.client
import io
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import numpy as np
import torch
from pages import table
from PIL import Image

import mgtta
from mgtta._lib.files import atomic
from mgtta.data.glyphs import Glyphs
from mgtta.data.streams import corrupted, stream
from mgtta.serve.client import Client
from mgtta.serve.template import RECALL_DOMAINS, template

IMAGES = 255  # an odd number, so that each of 8 or 64 clients sends all of them in turn
WARM_UP_SECONDS = 5.0
LOADED_STREAMS = 64
MANY_STREAMS = 1000
TIMES = 10  # the sustainable load
REQUEST_IMAGES = 16  # of the overload
CAMERAS = 8  # streams of the overload
BODIES = 15  # requests with different images, sent in turn: an image that repeats is not learned from
RETRY_SECONDS = 0.5
CAMERA_CLIENTS = 2  # that wait for their answers, of each stream, while the sustainable load is measured
STEADY_SECONDS = 20.0  # in which the sustainable load is measured
SENDERS = 2  # processes of the overload
KILL_SAVE_SECONDS = 0.5  # from a change to its save, while the service is killed
RESET = "connection reset"  # the service has closed it before the whole request was sent
PATH = "/v1/streams/{}/predict"
MEGA = 1e6


def pictures() -> tuple[torch.Tensor, list[bytes]]:
    """Return images of characters under noise, and the same as PNG files."""
    [batch] = stream(corrupted(Glyphs(IMAGES), ["gaussian_noise"]), batch_size=IMAGES)
    files = []
    for image in batch.x:
        file = io.BytesIO()
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "PNG")
        files.append(file.getvalue())
    return batch.x, files


class Caller:
    """One connection that sends picture after picture."""

    def __init__(self, address: str, name: str, files: list[bytes]):
        self.connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=120)
        self.path = PATH.format(name)
        self.files = files

    def __call__(self, i: int) -> None:
        status, body = self.send(self.files[i % len(self.files)])
        if status != 200:
            raise RuntimeError(f"{status}: {body.decode()}")

    def send(self, content: bytes) -> tuple[int, bytes]:
        """Return status and body of the reply."""
        self.connection.request("POST", self.path, content)
        reply = self.connection.getresponse()
        return reply.status, reply.read()


class PatientCaller(Caller):
    """A connection that sends a picture again if it is refused because too much waits."""

    def __call__(self, i: int) -> None:
        content = self.files[i % len(self.files)]
        while (reply := self.send(content))[0] == 429:
            self.connection.close()
            time.sleep(RETRY_SECONDS)
        if reply[0] != 200:
            raise RuntimeError(f"{reply[0]}: {reply[1].decode()}")


@contextmanager
def service(*words: str, state: str | None = None) -> Iterator[tuple[str, int]]:
    """Start `mgtta serve`, by default with states in a temporary folder; yield its address and its process number."""
    with tempfile.TemporaryDirectory() as folder:
        place = ["--state", state or folder, "--port", "0", "--device", "cpu"]
        command = [sys.executable, "-m", "mgtta", "serve", *place, *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                yield server.stdout.readline().split()[-1], server.pid
            finally:
                server.terminate()


def resident_bytes(process: int) -> int:
    """Return the memory of a process."""
    [line] = [line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return 1024 * int(line.split()[1])


def metrics(address: str) -> dict[str, float]:
    """Return the service's own figures."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=120)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    pairs = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


# --- rate and latency


def measured(calls: list[Any], warm_up: float, seconds: float) -> dict[str, float]:
    """Return rate and latency of all calls together, after a time to warm up."""
    begin = time.perf_counter() + warm_up
    end = begin + seconds
    latencies: list[float] = []
    errors: list[BaseException] = []

    def loop(number: int) -> None:
        i = number
        try:
            while (now := time.perf_counter()) < end and not errors:
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
        "requests": len(ordered),
        "per second": len(ordered) / took,
        "p50 ms": 1000 * ordered[len(ordered) // 2],
        "p99 ms": 1000 * ordered[int(0.99 * len(ordered))],
    }


class Direct:
    """The method called with one image at a time."""

    def __init__(self, x: torch.Tensor):
        self.x = x
        self.method = template("mgtta+", mgtta.load_model("glyphs_vit"), source="glyphs_vit", mirror=False)
        self.warm_up = WARM_UP_SECONDS

    def __call__(self, seconds: float) -> dict[str, float]:
        found = measured([lambda i: self.method(self.x[i % IMAGES, None])], self.warm_up, seconds)
        self.warm_up = 0.0
        return found


def rates(x: torch.Tensor, files: list[bytes], clients: list[int], seconds: float, repeats: int) -> dict[str, Any]:
    """Return the rows of the table: clients that share a stream, and clients with one each."""
    direct = Direct(x)
    runs: dict[tuple[int, str], list[dict[str, float]]] = {}
    with service("--loaded-streams", "128") as (address, _):
        before = direct(seconds)
        alone = [before]
        for repeat in range(repeats):
            for count in clients:
                for kind in ("one", "one each"):
                    names = [f"own-{i}" if kind == "one each" else "shared" for i in range(count)]
                    if not repeat:
                        for name in sorted(set(names)):  # one after another: streams are made, and saved at once
                            Caller(address, name, files)(0)
                    callers = [Caller(address, name, files) for name in names]
                    found = measured(callers, WARM_UP_SECONDS, seconds)
                    for caller in callers:
                        caller.connection.close()
                    after = direct(seconds)
                    found["of direct"] = found["per second"] / statistics.mean(d["per second"] for d in (before, after))
                    before = after
                    alone.append(after)
                    runs.setdefault((count, kind), []).append(found)
                    print(count, kind, found, after, flush=True)
        own = metrics(address)
        size = Client(address).report("shared")["bytes"]
    rows = [{"kind": "direct", **medians(alone)}]
    rows += [{"kind": "http", "clients": count, "streams": kind, **medians(r)} for (count, kind), r in runs.items()]
    busy = {name: own[f'mgtta_busy_seconds_total{{on="{name}"}}'] for name in ("answer", "learn", "ask", "save")}
    return {
        "rows": rows,
        "longest pause seconds": own["mgtta_longest_pause_seconds"],
        "bytes of a stream": size,
        "busy seconds": busy,
    }


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure, and the least and the largest of the ratio."""
    found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    if "of direct" in found:
        found["least of direct"] = min(run["of direct"] for run in runs)
        found["most of direct"] = max(run["of direct"] for run in runs)
    return found


# --- many streams, and overload


def many_streams(files: list[bytes]) -> dict[str, Any]:
    """Ask MANY_STREAMS streams twice, of which LOADED_STREAMS fit into memory."""
    with service("--loaded-streams", str(LOADED_STREAMS)) as (address, process):
        began = resident_bytes(process)
        most = began
        seconds = []
        caller = Caller(address, "", files)
        for _ in range(2):
            start = time.perf_counter()
            for i in range(MANY_STREAMS):
                caller.path = PATH.format(f"stream-{i}")
                caller(i)
                if i % 50 == 0:
                    most = max(most, resident_bytes(process))
            seconds.append(time.perf_counter() - start)
        own = metrics(address)
        return {
            "streams": MANY_STREAMS,
            "loaded": LOADED_STREAMS,
            "bytes at the start": began,
            "most bytes": max(most, resident_bytes(process)),
            "requests a second, new streams": MANY_STREAMS / seconds[0],
            "requests a second, saved streams": MANY_STREAMS / seconds[1],
            "loads": own["mgtta_loads_total"],
        }


class Sent(NamedTuple):
    """One request of the overload."""

    status: str
    due: float  # the time at which it was to be sent
    began: float
    ended: float  # the time of the whole reply
    retry_after: bool  # whether the reply has this header


async def send_one(place: SplitResult, number: int, body: bytes, due: float) -> Sent:
    """Wait until the time `due`, send a request on a new connection, and return what became of it."""
    await asyncio.sleep(max(due - time.time(), 0))
    path = PATH.format(camera(number))
    lines = [f"POST {path} HTTP/1.1", f"Host: {place.netloc}", f"Content-Length: {len(body)}", "Connection: close"]
    began = time.time()
    try:
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write("\r\n".join([*lines, "", ""]).encode())
        writer.write(body)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.read()
        writer.close()
        status = head.split()[1].decode()
    except (ConnectionError, asyncio.IncompleteReadError):
        head = b""
        status = RESET
    return Sent(status, due, began, time.time(), b"\nretry-after:" in head.lower())


def send_all(address: str, bodies: list[bytes], due: list[tuple[float, int]]) -> list[Sent]:
    """Send the request of a number at each time that is due; in a process of its own."""
    place = urlsplit(address)

    async def all_of_them() -> list[Sent]:
        return await asyncio.gather(*(send_one(place, i, bodies[i % BODIES], at) for at, i in due))

    return asyncio.run(all_of_them())


def camera(number: int) -> str:
    """Return the stream of the request with this number."""
    return f"camera-{number % CAMERAS}"


def npy(x: torch.Tensor) -> bytes:
    """Return images as the content of a .npy file."""
    file = io.BytesIO()
    np.save(file, x.permute(0, 2, 3, 1).numpy())
    return file.getvalue()


def overload(x: torch.Tensor, seconds: float) -> dict[str, Any]:
    """Send TIMES the images a second that are answered, for so many seconds; watch memory and what is refused."""
    bodies = [npy(part) for part in x.split(REQUEST_IMAGES)[:BODIES]]
    with service() as (address, process):
        for i in range(CAMERAS):
            Caller(address, camera(i), bodies)(i)
        waiting = [PatientCaller(address, camera(i), bodies) for i in range(CAMERAS * CAMERA_CLIENTS)]
        rate = REQUEST_IMAGES * measured(waiting, WARM_UP_SECONDS, STEADY_SECONDS)["per second"]
        for caller in waiting:
            caller.connection.close()
        before = resident_bytes(process)
        sent, most_bytes = flood(address, bodies, TIMES * rate / REQUEST_IMAGES, seconds, process)
        after = time.perf_counter()
        answered_again = first_answer(address, camera(0), bodies[0])
        replies = Counter(one.status for one in sent)
        took = max(one.ended for one in sent) - min(one.due for one in sent)  # the last answers come later
        refused = [one for one in sent if one.status == "429"]
        latencies = [one.ended - one.began for one in sent if one.status == "200"]
        return {
            "seconds": seconds,
            "times": TIMES,
            "images a second, sustained": rate,
            "images a second, sent": REQUEST_IMAGES * len(sent) / seconds,
            "images a second, answered": REQUEST_IMAGES * replies["200"] / took,
            "latest request ms": 1000 * max(one.began - one.due for one in sent),
            "replies": dict(sorted(replies.items())),
            "429 with Retry-After": sum(one.retry_after for one in refused),
            "p99 ms of answers": 1000 * statistics.quantiles(latencies, n=100)[98],
            "p99 ms of refusals": 1000 * statistics.quantiles([one.ended - one.began for one in refused], n=100)[98],
            "bytes before": before,
            "most bytes": most_bytes,
            "next answer ms": 1000 * (answered_again - after),
        }


def flood(address: str, bodies: list[bytes], rate: float, seconds: float, process: int) -> tuple[list[Sent], int]:
    """Send so many requests a second, the streams in turn; return them, and the most memory of the service."""
    most = 0
    with ProcessPoolExecutor(SENDERS, mp_context=get_context("spawn")) as pool:
        list(pool.map(time.sleep, [1.0] * SENDERS))  # until all have started
        start = time.time() + 1.0
        due = [(start + i / rate, i) for i in range(int(seconds * rate))]
        parts = [pool.submit(send_all, address, bodies, due[i::SENDERS]) for i in range(SENDERS)]
        while not all(part.done() for part in parts):
            most = max(most, resident_bytes(process))
            time.sleep(0.5)
    return [one for part in parts for one in part.result()], most


def first_answer(address: str, name: str, content: bytes) -> float:
    """Return the time of the first answer to a client that asks until it is not refused."""
    while Caller(address, name, []).send(content)[0] != 200:
        time.sleep(0.2)
    return time.perf_counter()


# --- kills


def kills(files: list[bytes], times: int) -> dict[str, Any]:
    """Kill the service at random moments under load; after each start, ask all streams what they still know."""
    random = Random(0)
    names = [f"camera-{i}" for i in range(CAMERAS)]
    told: dict[str, int] = {}  # updates that each stream has told before the kill
    lost: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(times):
            with service("--save-seconds", str(KILL_SAVE_SECONDS), state=folder) as (address, process):
                client = Client(address)
                reports = {name: client.report(name) for name in told}  # an error here is a stream that was lost
                lost += [told[name] - report["updates"] for name, report in reports.items()]
                told = asked_until_killed(address, process, names, files, random.uniform(2.0, 8.0))
        left = len(list(Path(folder).glob("*.safetensors")))
    return {"kills": times, "streams": CAMERAS, "files": left, "most updates lost": max(lost), "asked": len(lost)}


def asked_until_killed(
    address: str, process: int, names: list[str], files: list[bytes], seconds: float
) -> dict[str, int]:
    """Send pictures to all streams, kill the service after so many seconds, and return the updates they have told."""
    told: dict[str, int] = {}

    def loop(name: str) -> None:
        caller = Caller(address, name, files)
        try:
            for i in count(names.index(name)):
                status, body = caller.send(files[i % IMAGES])
                if status == 200:
                    told[name] = json.loads(body)["updates"]
        except (OSError, http.client.HTTPException):
            return

    threads = [threading.Thread(target=loop, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    os.kill(process, signal.SIGKILL)
    for thread in threads:
        thread.join()
    return told


def kill_words(found: dict[str, Any]) -> str:
    """Return what was measured with kills."""
    return (
        f"**Kills**: {found['kills']} times SIGKILL at a random moment, while {found['streams']} clients sent pictures "
        f"to a stream each that is saved {KILL_SAVE_SECONDS:g} s after a change, and a new start. After each start all "
        f"streams were there and could be read ({found['asked']} reports). A stream lost at most "
        f"{found['most updates lost']} updates of those that it had told of."
    )


# --- the page


def page(found: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    about = found["protocol"]
    lines = []
    for row in found["rows"]:
        ratio = ""
        if "of direct" in row:
            ratio = f"{row['of direct']:.2f} ({row['least of direct']:.2f} to {row['most of direct']:.2f})"
        figures = [f"{row['per second']:.1f}", ratio, f"{row['p50 ms']:.0f}", f"{row['p99 ms']:.0f}"]
        lines.append([row["kind"], str(row.get("clients", "")), row.get("streams", ""), *figures])
    head = ["", "clients", "streams", "requests/s", "of direct", "p50 ms", "p99 ms"]
    busy = found["busy seconds"]
    whole = sum(busy.values())
    shares = ", ".join(f"{name} {100 * seconds / whole:.0f} %" for name, seconds in busy.items())
    commands = [f"`OMP_NUM_THREADS={about['threads']} {command}`" for command in found["commands"]]
    return (
        "# The service\n\n"
        f"`{about['model']}` with `{about['method']}` on {about['cores']} cores, with {about['threads']} threads for "
        f"torch, one image of 48 x 48 pixels in a request. Each figure is the median of {about['repeats']} repetitions "
        f"of {about['seconds']:g} s, after a warm-up. The direct rate was measured before and after each repetition; "
        '"of direct" compares with the mean of the two, and has the least and the largest ratio in brackets. The '
        "clients ran on the same cores, so the ratios say more than the rates.\n\n"
        f"{table(head, lines)}\n\n"
        f"The computing thread's time: {shares}. `ask` is what the live view's sample costs: the source model is asked "
        f"about one image in eight. The longest time for which answers waited for updates and a save: "
        f"{found['longest pause seconds']:.2f} s.\n\n"
        f"{streams_words(found)}\n\n{overload_words(found['overload'])}\n\n{kill_words(found['kills'])}\n\n"
        f"Command: {'; then '.join(commands)}\n"
    )


def streams_words(found: dict[str, Any]) -> str:
    """Return what was measured of many streams."""
    many = found["many streams"]
    return (
        f"**{many['streams']:,} streams**, {many['loaded']} of them in memory, one image for each in turn, twice: "
        f"{many['requests a second, new streams']:.1f} requests a second for new streams, "
        f"{many['requests a second, saved streams']:.1f} when each is saved and loaded again ({many['loads']:.0f} "
        f"loads). Memory of the process: {many['bytes at the start'] / MEGA:.0f} MB at the start, at most "
        f"{many['most bytes'] / MEGA:.0f} MB. A stream holds {found['bytes of a stream'] / MEGA:.2f} MB for itself."
    )


def overload_words(found: dict[str, Any]) -> str:
    """Return what was measured under overload."""
    replies = ", ".join(f"{count:,} x {status}" for status, count in found["replies"].items())
    sent = found["images a second, sent"]
    return (
        f"**Overload**: {CAMERAS * CAMERA_CLIENTS} clients of {CAMERAS} streams that wait for their answers, with "
        f"{REQUEST_IMAGES} images in a request, got {found['images a second, sustained']:.0f} images a second. Then "
        f"{SENDERS} processes sent {sent:.0f} a second for {found['seconds']:.0f} s, "
        f"{sent / found['images a second, sustained']:.1f} times as many, whether or not earlier ones were answered; "
        f"no request was sent more than {found['latest request ms']:.0f} ms late. "
        f"{found['images a second, answered']:.0f} images a second were answered. Replies by status: {replies}; "
        f"{found['429 with Retry-After']:,} of the 429 had a Retry-After. 99 % of the answers came within "
        f"{found['p99 ms of answers'] / 1000:.1f} s, and 99 % of the refusals within "
        f"{found['p99 ms of refusals'] / 1000:.1f} s. Memory of the process: {found['bytes before'] / MEGA:.0f} MB "
        f"before, at most {found['most bytes'] / MEGA:.0f} MB. The first request after the last reply was answered "
        f"within {found['next answer ms'] / 1000:.1f} s."
    )


def sizing(found: dict[str, Any]) -> str:
    """Return the tables of docs/serve.md: rates, and memory for numbers of streams."""
    head = ["clients", "requests/s of one image", "of the direct rate", "p50", "p99"]
    rows = []
    for row in found["rows"]:
        if row.get("streams") == "one each":
            rate = [f"{row['per second']:.0f}", f"{row['of direct']:.2f}"]
            rows.append([str(row["clients"]), *rate, f"{row['p50 ms']:.0f} ms", f"{row['p99 ms']:.0f} ms"])
    base = found["many streams"]["bytes at the start"]
    size = found["bytes of a stream"]
    memory = [
        [str(n), f"{(base + n * size) / MEGA:.0f} MB", f"{(base + n * size * (1 + RECALL_DOMAINS)) / MEGA:.0f} MB"]
        for n in (16, 64, 256, 1000)
    ]
    about = found["protocol"]
    busy = found["busy seconds"]
    return (
        f"`{about['model']}` with `{about['method']}` on {about['cores']} cores on which other programs ran, "
        "each client with its own stream:\n\n"
        f"{table(head, rows)}\n\n"
        f"The live view's sample took {100 * busy['ask'] / sum(busy.values()):.0f} % of the computing time.\n\n"
        f"{table(['streams in memory', 'memory, one domain each', 'with all their domains'], memory)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="1,8,64", help="numbers of clients, separated by commas")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a repetition")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of each row of the table")
    parser.add_argument("--parts", default="rates,streams,overload,kills", help="what to measure again; the rest stays")
    parser.add_argument("--overload-seconds", type=float, default=60.0)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True, help="folder for serve.json and serve.md")
    args = parser.parse_args()
    clients = [int(count) for count in args.clients.split(",")]
    x, files = pictures()
    found: dict[str, Any] = {}
    path = args.out / "serve.json"
    if path.exists():
        found = json.loads(path.read_text())
    parts = args.parts.split(",")
    if "rates" in parts:
        found |= rates(x, files, clients, args.seconds, args.repeats)
    if "streams" in parts:
        found["many streams"] = many_streams(files)
    if "overload" in parts:
        found["overload"] = overload(x, args.overload_seconds)
    if "kills" in parts:
        found["kills"] = kills(files, args.kills)
    print(found, flush=True)
    before = found.get("commands", [])
    if "rates" in parts:
        before = []
    found["commands"] = [*before, " ".join(["python", *sys.argv])]
    found["protocol"] = {
        "model": "glyphs_vit",
        "method": "mgtta+",
        "seconds": args.seconds,
        "repeats": args.repeats,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "torch": torch.__version__,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(found, indent=1) + "\n")
    with atomic(args.out / "serve.md") as temporary:
        temporary.write_text(page(found))


if __name__ == "__main__":
    main()
