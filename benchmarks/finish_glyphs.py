"""What ships beside `glyphs_vit`: its source statistics, and a generator trained on it.

    python benchmarks/finish_glyphs.py --out src/mgtta/weights

Statistics are of 2,048 clean validation characters. The generator `glyphs` is trained by the paper's Algorithm 1 on
128 of them, unlabelled, under the four validation corruptions. Two minutes on one core.
"""

import argparse
from pathlib import Path

import torch

import mgtta
from mgtta.data.glyphs import VALIDATION_SEED, Glyphs
from mgtta.training.meta import shifted_images

IMAGES = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder, for sources/ and generators/")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--sources-only", action="store_true", help="write the statistics, and train no generator")
    args = parser.parse_args()
    torch.set_num_threads(1)
    characters = Glyphs(args.images, VALIDATION_SEED)
    for folder in ("sources", "generators"):
        (args.out / folder).mkdir(parents=True, exist_ok=True)
    model = mgtta.load_model("glyphs_vit")
    source = mgtta.source_statistics(model, characters.tensors()[0])
    mgtta.save_source(source, args.out / "sources" / "glyphs_vit.safetensors")
    if args.sources_only:
        return
    generator = mgtta.meta_train(model, source, shifted_images(characters, min(128, args.images)), steps=args.steps)
    command = f"python benchmarks/finish_glyphs.py --out DIR --steps {args.steps} --images {args.images}"
    mgtta.save_generator(generator, args.out / "generators" / "glyphs.safetensors", command=command)


if __name__ == "__main__":
    main()
