"""What a step of adaptation costs, beside the plain forward pass and what a user would pick instead, in one run.

    python benchmarks/speed.py --model vit_base_patch16_224 --device cuda
    python benchmarks/speed.py --model deit_tiny_patch16_224 --batch 16 --out results
    python benchmarks/speed.py --model glyphs_vit --out results

Weights are random where the package ships none: they don't change the work. The contenders take turns, batch by batch;
a figure is the median over rounds. On a CPU it is one thread's CPU time; on a GPU, wall time between two waits for it.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import mgtta
from mgtta._timm import timm
from mgtta.files import atomic
from mgtta.optim.mgg import BETAS, EPS, generator_inputs


def tent_as_usual(net: nn.Module) -> Callable[[Tensor], Tensor]:
    """TENT as it is commonly written: gradients by backward(), torch's SGD over the norm layers' parameters."""
    norms = [m for m in net.modules() if isinstance(m, nn.LayerNorm | nn.GroupNorm | nn.BatchNorm2d)]
    net.requires_grad_(False)
    params = [p.requires_grad_() for m in norms for p in m.parameters()]
    optimizer = torch.optim.SGD(params, lr=1e-3, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        logits = net(x)
        loss = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean(0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return logits.detach()

    return step


class LoopedMGG:
    """The generator's step in the style of the released code: one parameter after another, each a new one's data."""

    def __init__(self, params: list[nn.Parameter], generator: mgtta.MetaGradientGenerator, lr: float = 1e-3):
        self.params, self.generator, self.lr, self.t = params, generator.requires_grad_(False), lr, 0
        self.moments = [(torch.zeros(p.numel(), device=p.device),) * 2 for p in params]
        self.memories = [generator.init_memory(p.numel()) for p in params]

    @torch.no_grad()
    def step(self, grads: list[Tensor]) -> None:
        self.t += 1
        for i, (p, grad) in enumerate(zip(self.params, grads, strict=True)):
            inputs, *self.moments[i] = generator_inputs(grad.flatten(), *self.moments[i], self.t, BETAS, EPS)
            update, self.memories[i] = self.generator(inputs, self.memories[i])
            p.data = (p - self.lr * update.view_as(p)).clone()


def clock(device: str) -> Callable[[], float]:
    if device == "cpu":
        return time.process_time

    def now() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return now


def measure(steps: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, tuple[float, float, int]]:
    """Name -> median and least seconds, and peak bytes on the GPU; the steps take turns."""
    now, times, peaks = clock(device), {name: [] for name in steps}, dict.fromkeys(steps, 0)
    for step in steps.values():
        for _ in range(3 if device != "cpu" else 1):
            step()
    for _ in range(rounds):
        for name, step in steps.items():
            if device != "cpu":
                torch.cuda.reset_peak_memory_stats()
            start = now()
            step()
            times[name].append(now() - start)
            if device != "cpu":
                peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated())
    return {name: (statistics.median(t), min(t), peaks[name]) for name, t in times.items()}


def contenders(model: mgtta.Classifier, x: Tensor) -> dict[str, Callable[[], object]]:
    source = mgtta.source_statistics(model, x)
    generator = mgtta.load_generator("imagenet").to(x.device)
    methods = {
        "NoAdapt": mgtta.create("noadapt", model),
        "TENT": mgtta.create("tent", model),
        "MGTTA": mgtta.create("mgtta", model, source=source),
        "MGTTA, budget spent": mgtta.create("mgtta", model, source=source, max_updates=0),
        "Eq. 7 with Adam": mgtta.create("eq7_adam", model, source=source),
    }
    usual = tent_as_usual(mgtta.load_model(model.net, mean=None, std=None).to(x.device).net)
    pixels = x.float() / 255
    own = [nn.Parameter(p.detach().clone()) for p in mgtta.norm_parameters(model)]
    looped_own = [nn.Parameter(p.detach().clone()) for p in own]
    grads = [torch.randn_like(p) for p in own]
    batched, looped = mgtta.MGG(own, generator), LoopedMGG(looped_own, generator)

    def step() -> None:
        for p, grad in zip(own, grads, strict=True):
            p.grad = grad
        batched.step()

    steps: dict[str, Callable[[], object]] = {name: (lambda m=m: m(x)) for name, m in methods.items()}
    steps["TENT as usually written"] = lambda: usual(pixels)
    steps["the generator's step alone"] = step
    steps["the same, parameter by parameter"] = lambda: looped.step(grads)
    return steps


def table(found: dict[str, tuple[float, float, int]], batch: int, device: str) -> str:
    head = ["", "times NoAdapt", *(["ms", "images/s", "peak MB"] if device != "cpu" else ["images/s on one thread"])]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    plain = found["NoAdapt"][0]
    for name, (median, _, peak) in found.items():
        rate = f"{batch / median:,.0f}" if "step" not in name and "parameter" not in name else ""
        absolute = [f"{1e3 * median:.2f}", rate, f"{peak / 1e6:,.0f}"] if device != "cpu" else [rate]
        lines.append([name, f"{median / plain:.3f}", *absolute])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_base_patch16_224", help="a timm name, or glyphs_vit")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="a folder for speed-MODEL-DEVICE.md")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.device == "cpu":
        torch.set_num_threads(1)
    net = args.model if args.model == "glyphs_vit" else timm.create_model(args.model)
    model = mgtta.load_model(net).to(args.device)
    side = model.input_size[0]
    x = torch.randint(0, 256, (args.batch, 3, side, side), dtype=torch.uint8, device=args.device)
    text = table(measure(contenders(model, x), args.rounds, args.device), args.batch, args.device)
    command = f"python benchmarks/speed.py --model {args.model} --batch {args.batch} --rounds {args.rounds}"
    command += f" --device {args.device}"
    where = torch.cuda.get_device_name() if args.device != "cpu" else "CPU, one thread"
    text = f"{args.model}, batch {args.batch}, torch {torch.__version__}, {where}:\n\n{text}\n\nCommand: `{command}`\n"
    print(text)
    if args.out:
        with atomic(args.out / f"speed-{args.model}-{args.device}.md") as path:
            path.write_text(text)


if __name__ == "__main__":
    main()
