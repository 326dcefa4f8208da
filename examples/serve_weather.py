"""Watch a service adapt: three cameras see characters while the weather changes.

    python examples/serve_weather.py        # then open the address that it prints

It starts the service in this process, with states in a temporary folder, and sends pictures to it over HTTP until you
stop it with Ctrl-C. `make demo-serve` runs it. With `--estimate` it first learns, from clean characters and for about a
minute, to estimate the accuracy without labels.
"""

import argparse
import itertools
import signal
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch

import mgtta
from mgtta.data.corruptions import corrupt
from mgtta.data.glyphs import VALIDATION_SEED, Glyphs
from mgtta.serve.client import Client, ServiceError
from mgtta.serve.run import defaults_for_embedded, serve
from mgtta.serve.template import template

CAMERAS = {  # the weather that each of them sees
    "harbour": ["clear", "fog", "clear", "snow"],
    "gate": ["clear", "frost", "brightness", "frost"],
    "roof": ["clear", "clear", "spatter", "fog"],
}
IMAGES = 16  # in a request
CLEAN_IMAGES = 128  # of the calibration
PAUSE_SECONDS = 0.1  # between two requests
MODEL = "glyphs_vit"
METHOD = "mgtta+"


def pictures(number: int, weather: str) -> list:
    """Return the images of request `number`, as arrays (side, side, 3)."""
    index = torch.arange(IMAGES * number, IMAGES * (number + 1))
    characters = Glyphs(int(index[-1]) + 1)
    x = torch.stack([characters[int(i)][0] for i in index])
    if weather != "clear":
        x = corrupt(x, weather, severity=5, index=index)
    return list(x.permute(0, 2, 3, 1).numpy())


def play(address: str, cameras: int, requests: int, rounds: int | None) -> None:
    """Send pictures to the service.

    Args:
        cameras: how many there are.
        requests: of each camera, after which its weather changes.
        rounds: requests of each camera in all; None: until the service stops.
    """
    client = Client(address)
    for number in itertools.count() if rounds is None else range(rounds):
        for camera, weather in list(CAMERAS.items())[:cameras]:
            try:
                client.predict(camera, pictures(number, weather[number // requests % len(weather)]))
            except ServiceError as error:
                time.sleep(error.retry_seconds or 1)
            except OSError:
                return
            time.sleep(PAUSE_SECONDS)
    signal.raise_signal(signal.SIGINT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000, help="0 for any that is free")
    parser.add_argument("--cameras", type=int, default=3, help="how many, from 1 to 3")
    parser.add_argument("--requests", type=int, default=10, help="of each camera, after which its weather changes")
    parser.add_argument("--estimate", action="store_true", help="estimate the accuracy, too")
    parser.add_argument("--quick", action="store_true", help="stop after a few pictures")
    args = parser.parse_args()
    rounds = 2 if args.quick else None

    def started(address: str) -> None:
        print(f"open {address}", flush=True)
        how = (address, args.cameras, args.requests, rounds)
        threading.Thread(target=play, args=how, daemon=True).start()

    labels, settings = defaults_for_embedded(MODEL, METHOD)
    model = mgtta.load_model(MODEL)
    port = 0 if args.quick else args.port
    settings["source"] = mgtta.load_source(MODEL)
    calibration = None
    if args.estimate:
        characters, classes = Glyphs(CLEAN_IMAGES, seed=VALIDATION_SEED).tensors()
        calibration = mgtta.calibrate(template(METHOD, model, **settings), characters, classes)
    with tempfile.TemporaryDirectory() as folder:
        how = {"settings": settings, "calibration": calibration, "labels": labels}
        with suppress(KeyboardInterrupt):  # not raised where the parent process ignores Ctrl-C
            serve(model, METHOD, Path(folder), port=port, started=started, **how)
    print("stopped")


if __name__ == "__main__":
    main()
