"""`mgtta adapt --resume`, killed with SIGKILL at random moments and started again: is the whole run the same?

The images are the embedded characters, the model a tiny ViT with random weights; the method is MGTTA under a guard.
After as many kills as asked for, the predictions must be those of a run that nobody disturbed, byte for byte, and so
must the state at the end.

python benchmarks/kill.py --kills 200 --out results
"""

import argparse
import contextlib
import io
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import torch
from PIL import Image

import mgtta
from mgtta._lib.files import atomic, read_tree, write_tensors
from mgtta.cli import app
from mgtta.data.glyphs import Glyphs

MODEL = "test_vit"


def prepare(folder: Path, images: int) -> list[str]:
    """Write images, weights and source statistics, and return the command's arguments without those of its output."""
    torch.manual_seed(0)
    model = mgtta.load_model(MODEL, pretrained=False, num_classes=10)
    write_tensors(folder / "weights.safetensors", model.net.state_dict(), {})
    model = mgtta.load_model(MODEL, checkpoint=folder / "weights.safetensors", num_classes=10)
    side, _ = model.input_size
    (folder / "images").mkdir()
    for i, image in enumerate(Glyphs(images).tensors()[0]):
        Image.fromarray(image.permute(1, 2, 0).numpy()).resize((side, side)).save(folder / "images" / f"{i:05}.png")
    pictures = torch.rand(8, 3, side, side, generator=torch.Generator().manual_seed(0))
    mgtta.save_source(mgtta.source_statistics(model, pictures), folder / "source.safetensors")
    return [
        "adapt",
        str(folder / "images"),
        "--model",
        MODEL,
        "--checkpoint",
        str(folder / "weights.safetensors"),
        "--num-classes",
        "10",
        "--source",
        str(folder / "source.safetensors"),
        "--batch-size",
        "4",
        "--method",
        "mgtta",
        "--guard",
        "--set",
        "gather=0",
        "--device",
        "cpu",
    ]


def start(arguments: list[str]) -> int:
    """Start a child process that runs the command; forked, since importing torch takes longer than the run."""
    child = os.fork()
    if child:
        return child
    code = 1
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            app(arguments, standalone_mode=False)
            code = 0
        except BaseException as error:
            errors.write(repr(error))
    if code:
        os.write(2, errors.getvalue().encode())
    os._exit(code)


def ended(child: int, within: float) -> bool:
    """Return whether the child ended well by itself; kill it when its time is over."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            if status:
                raise RuntimeError(f"the command failed by itself, with status {status}")
            return True
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return status == 0  # it may have ended in the last moment


def measure(folder: Path, kills: int, images: int, seed: int = 0) -> dict:
    """Run undisturbed, then with kills; return how many there were and whether all results are the same."""
    arguments = prepare(folder, images)
    calm = [*arguments, "--out", str(folder / "calm.csv"), "--state", str(folder / "calm.safetensors")]
    began = time.monotonic()
    assert ended(start(calm), 600)
    length = time.monotonic() - began
    draw = random.Random(seed)
    killed = 0
    runs = 0
    same = True
    while killed < kills:
        runs += 1
        out = [folder / f"{runs}.csv", folder / f"{runs}.safetensors", folder / f"{runs}.run"]
        disturbed = [
            *arguments,
            "--out",
            str(out[0]),
            "--state",
            str(out[1]),
            "--resume",
            str(out[2]),
            "--save-every",
            "2",
        ]
        while not ended(start(disturbed), draw.uniform(0, length) if killed < kills else 600):
            killed += 1
        same &= out[0].read_bytes() == (folder / "calm.csv").read_bytes()
        same &= _equal(state(out[1]), state(folder / "calm.safetensors"))
        same &= not out[2].exists() and not list(folder.glob("*.part"))
        left = [path.name for path in folder.glob(".*")]  # of a kill within a save
        for name in left:
            (folder / name).unlink()
    return {"kills": killed, "runs": runs, "images": images, "seconds": length, "identical": bool(same)}


def state(path: Path) -> dict:
    """Return the method's state without the seconds it took."""
    found = read_tree(path)[0]["method"]
    found["method"]["counters"].pop("seconds")
    if found["guard"]["snapshot"] is not None:
        found["guard"]["snapshot"]["counters"].pop("seconds")
    return found


def _equal(a: object, b: object) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return a == b


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), args.kills, args.images)
    found["command"] = f"python benchmarks/kill.py --kills {args.kills} --images {args.images} --out results"
    print(json.dumps(found))
    with atomic(args.out / "kill.json") as path:
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
