"""Layouts, labels, and what is refused; all data made on the spot."""

import io
import struct
import tarfile
import zlib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from shutil import which
from threading import Thread

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from webdataset.tariterators import group_by_keys, tar_file_expander

from mgtta.data import images
from mgtta.data.datasets import imagenet_c, open_dataset, read_classes, synsets
from mgtta.data.images import ImageError, decode

SIZE = 32


def pixels(seed, h=SIZE, w=SIZE):
    return np.random.default_rng(seed).integers(0, 256, (h, w, 3), dtype=np.uint8)


def encode(array, kind="PNG", mode="RGB", **options):
    buffer = io.BytesIO()
    Image.fromarray(array).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def tree(root, folders, n=2):
    for k, folder in enumerate(folders):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for j in range(n):
            (root / folder / f"{j}.png").write_bytes(encode(pixels(100 * k + j)))
    return root


def tar(path, members):
    """A tar of (name or TarInfo, bytes)."""
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def png(w, h, rows=b"", depth=8, colour=2):
    """A PNG that claims w x h pixels, and holds these rows."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    ihdr = struct.pack(">IIBBBBB", w, h, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", ihdr) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


open_small = partial(open_dataset, size=SIZE)


# --- pixels


def test_an_image_of_the_right_size_is_not_changed():
    array = pixels(0)
    image = decode(encode(array), name="x", size=SIZE)
    assert image.dtype == torch.uint8
    assert np.array_equal(image.permute(1, 2, 0).numpy(), array)


@pytest.mark.parametrize(("h", "w"), [(80, 50), (82, 50), (50, 80), (20, 33), (37, 37)])
def test_other_images_are_resized_and_cropped_as_torchvision_does(h, w):
    """Up to a level here and there."""
    from mgtta._lib.timm import torchvision

    image, transforms = Image.fromarray(pixels(1, h, w)), torchvision.transforms
    resize = transforms.Resize(36, interpolation=transforms.InterpolationMode.BICUBIC)  # floor(32 / 0.875)
    expected = np.array(transforms.CenterCrop(SIZE)(resize(image)))
    ours = decode(encode(np.array(image)), name="x", size=SIZE)
    apart = np.abs(ours.permute(1, 2, 0).numpy().astype(int) - expected)
    assert apart.max() <= 2
    assert (apart > 0).mean() < 0.02


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_every_mode_becomes_rgb(mode):
    image = Image.fromarray(pixels(2)).convert(mode)
    buffer = io.BytesIO()
    options = {"transparency": b"\0"} if mode == "P" else {}
    image.save(buffer, "JPEG" if mode == "CMYK" else "PNG", **options)
    assert decode(buffer.getvalue(), name="x", size=SIZE).shape == (3, SIZE, SIZE)


GRADIENT = np.arange(2**16, dtype=np.uint16).reshape(256, 256)


def png_of_16_bits(array):
    """A PNG of uint16 levels, (H, W) grey or (H, W, 3) RGB; PIL writes only grey ones."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in array)
    return png(array.shape[1], array.shape[0], rows, depth=16, colour=0 if array.ndim == 2 else 2)


@pytest.mark.parametrize(
    "data",
    [
        encode(GRADIENT, mode="I;16"),
        png_of_16_bits(GRADIENT),
        png_of_16_bits(np.stack([GRADIENT] * 3, 2)),
        b"P5 256 256 65535\n" + GRADIENT.astype(">u2").tobytes(),
        b"P6 256 256 65535\n" + np.stack([GRADIENT] * 3, 2).astype(">u2").tobytes(),
    ],
    ids=["png by PIL", "png grey", "png colour", "pgm", "ppm"],
)
def test_images_of_16_bits_are_scaled_to_8_bits_and_not_clipped_to_white(data):
    image = decode(data, name="x", size=256).numpy().astype(int)
    assert np.abs(image - GRADIENT // 256).max() <= 1  # some formats are rounded, others are cut off
    assert image.min() == 0
    assert image.max() == 255


def test_floating_point_pixels_are_rejected():
    data = b"Pf 8 8 -1.0\n" + np.full((8, 8), 300, dtype="<f4").tobytes()
    with pytest.raises(ImageError, match="floating-point"):
        decode(data, name="x", size=8)


def test_a_decoded_image_shares_no_memory(monkeypatch):
    array = pixels(3, 1, 1)  # as contiguous in one order as in the other
    before = array.copy()
    monkeypatch.setattr(images, "_pixels", lambda *_: array)
    decode(encode(array), name="x", size=1).add_(1)
    assert np.array_equal(array, before)


EXIF = Image.Exif()
EXIF[0x0112] = 6  # on its side
JPEG = encode(pixels(5, 40, 50), "JPEG")
with_simplejpeg = pytest.mark.skipif(
    images.simplejpeg is None, reason="simplejpeg is not installed: pip install 'mgtta[jpeg]'"
)


@pytest.fixture
def both(monkeypatch):
    """What comes of an encoded image with simplejpeg, and that it is the same without."""
    monkeypatch.setattr(images, "crop", lambda image, *_: image)  # every pixel counts

    def outcome(data):
        try:
            return decode(data, name="x")
        except ImageError as error:
            return str(error)

    def both(data):
        fast = outcome(data)
        with monkeypatch.context() as without:
            without.setattr(images, "simplejpeg", None)
            plain = outcome(data)
        assert fast == plain if isinstance(plain, str) else torch.equal(fast, plain)
        return fast

    return both


@with_simplejpeg
@pytest.mark.parametrize(
    "data",
    [
        JPEG,
        JPEG + b"garbage",
        encode(pixels(5, 1, 1), "JPEG"),
        *[encode(pixels(5, h, w), "JPEG", subsampling=s) for s in (0, 1, 2) for h, w in ((40, 50), (17, 33), (2, 1))],
        encode(pixels(5), "JPEG", "L"),
        encode(pixels(5), "JPEG", quality=95, keep_rgb=True),
        encode(pixels(5, 17, 33), "JPEG", progressive=True),
        encode(pixels(5), "JPEG", restart_marker_blocks=1),
        encode(pixels(5, 40, 50), "JPEG", exif=EXIF),
    ],
)
def test_simplejpeg_gives_the_pixels_of_pil(both, data, tmp_path, monkeypatch):
    (tmp_path / "x.jpg").write_bytes(data)
    image = both(data)
    assert torch.equal(both(tmp_path / "x.jpg"), image)
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)  # PIL has read the header alone
    assert torch.equal(decode(data, name="x"), image)


@with_simplejpeg
@pytest.mark.parametrize("data", [encode(pixels(5), "JPEG", "CMYK"), encode(pixels(5), "JPEG", "L", subsampling=2)])
def test_pil_reads_what_simplejpeg_does_not(both, data):
    assert both(data).shape == (3, SIZE, SIZE)


@with_simplejpeg
def test_pil_decides_about_damaged_jpegs(both):
    for cut in (len(JPEG) // 2, len(JPEG) - 2):
        assert "truncated" in both(JPEG[:cut])
    found = set()
    for seed in range(100):
        random = np.random.default_rng(seed)
        data = bytearray(JPEG)
        data[random.integers(2, len(data))] = random.integers(256)
        found.add(type(both(bytes(data))))
    assert found == {str, torch.Tensor}


@with_simplejpeg
@pytest.mark.parametrize(("h", "w"), [(40, 49), (41, 50), (50, 40)])
def test_a_jpeg_of_another_size_than_was_checked_is_rejected(h, w):
    with pytest.raises(ValueError, match=r"size|small"):
        images._jpeg(io.BytesIO(JPEG), h, w)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not an image"),
        (b"hello", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (encode(pixels(3), "TIFF"), "not an image of a format that is read"),
        (encode(pixels(3), "JPEG")[:-200], "truncated"),
        (encode(pixels(3))[:-200], "truncated"),
        (png(SIZE, SIZE), "truncated"),
        (png(10_000, 10_000), "pixels"),
        (png(2**31 - 1, 2**31 - 1), "pixels"),
        (b"P6 999999999 999999999 255\n", "pixels"),
        (encode(pixels(4, 40_000, 1)), "resized"),
    ],
)
def test_invalid_images_are_rejected_by_name(data, reason):
    with pytest.raises(ImageError, match=rf"some/name\.png: .*{reason}"):
        decode(data, name="some/name.png", size=224)


def test_an_oversized_file_is_not_read(tmp_path):
    with open(tmp_path / "huge.jpg", "wb") as file:
        file.truncate(2**40)  # a terabyte of nothing
    with pytest.raises(ImageError, match=r"huge\.jpg.*bytes"):
        open_dataset(tmp_path)[0]


# --- folders


def test_a_tree_of_classes(tmp_path):
    dataset = open_small(tree(tmp_path, ["dog", "cat"]))
    (tmp_path / "dog" / "notes.txt").write_text("no image")
    (tmp_path / "dog" / "._0.png").write_text("an archive's leftover")
    assert dataset.classes == ["cat", "dog"]
    assert dataset.labels.tolist() == [0, 0, 1, 1]
    assert dataset.class_indices is None
    assert [dataset.name(i) for i in range(4)] == ["cat/0.png", "cat/1.png", "dog/0.png", "dog/1.png"]
    image, label = dataset[2]
    assert label == 1
    assert np.array_equal(image.permute(1, 2, 0).numpy(), pixels(0))
    assert len(list(dataset)) == len(open_small(tmp_path)) == 4
    with pytest.raises(IndexError):
        dataset[4]


def test_a_flat_folder_has_no_labels(tmp_path):
    dataset = open_small(tree(tmp_path, ["."]))
    assert dataset.labels is None
    assert dataset.classes is None
    assert dataset[0][1] == -1


def test_200_synsets_are_a_scored_subset(tmp_path):
    chosen = sorted(synsets(), key=synsets().get)[::5]  # every fifth class
    dataset = open_small(tree(tmp_path, reversed(chosen), n=1), kind="imagenet-r")
    assert dataset.class_indices == list(range(0, 1000, 5))
    assert dataset.classes == chosen
    for i in (0, 57, 199):
        synset = dataset.name(i).split("/")[0]
        assert dataset.class_indices[dataset.labels[i]] == synsets()[synset]
    assert open_small(tmp_path, restrict=True).class_indices == dataset.class_indices
    assert open_small(tmp_path).class_indices is None  # guessed: all 1000 scored, under ImageNet's numbers
    assert open_small(tmp_path).labels.tolist() == dataset.class_indices
    assert open_small(tmp_path).classes == list(synsets())
    assert open_small(tmp_path, kind="imagenet").labels.tolist() == dataset.class_indices


def test_classes_say_which_folder_is_which_class(tmp_path):
    tree(tmp_path, ["cat", "dog"], n=1)
    (tmp_path / "classes.txt").write_text("fish\ndog\n\ncat\n")
    names = read_classes(tmp_path / "classes.txt")
    dataset = open_small(tmp_path, classes=names)
    assert dataset.labels.tolist() == [2, 1]
    assert (dataset.classes, dataset.class_indices) == (["fish", "dog", "cat"], None)
    few = open_small(tmp_path, classes=names, restrict=True)
    assert (few.labels.tolist(), few.classes, few.class_indices) == ([1, 0], ["dog", "cat"], [1, 2])
    with pytest.raises(ValueError, match="holds the folder cat, which is not one of the 2 named classes"):
        open_small(tmp_path, classes=["dog", "fish"])
    (tmp_path / "classes.txt").write_text("dog\ndog\n")
    with pytest.raises(ValueError, match="it has dog twice"):
        read_classes(tmp_path / "classes.txt")


def test_restrict_is_for_class_folders(tmp_path):
    with pytest.raises(ValueError, match=r"restrict=\.\.\. is for class folders"):
        open_small(tmp_path / "x.tar", restrict=True)


def test_all_1000_synsets_need_no_subset(tmp_path):
    for synset in synsets():
        (tmp_path / synset).mkdir()
    (tmp_path / "n01443537" / "a.JPEG").write_bytes(encode(pixels(0), "JPEG"))
    dataset = open_small(tmp_path)
    assert dataset.class_indices is None
    assert dataset.labels.tolist() == [1]  # goldfish
    assert dataset.classes[1] == "n01443537"


def test_imagenet_v2_folders_are_numbers(tmp_path):
    dataset = open_small(tree(tmp_path, ["10", "9", "999"], n=1), kind="imagenet-v2")
    assert dataset.labels.tolist() == [9, 10, 999]
    assert dataset.class_indices is None
    assert open_small(tmp_path).labels.tolist() == [0, 1, 2]  # numbers in order, but of three classes


def test_imagenet_c_as_published(tmp_path):
    for severity in "15":
        tree(tmp_path / "fog" / severity, ["n01443537", "n01440764"], n=1)
    dataset = imagenet_c(tmp_path, "fog", 5, size=SIZE)
    assert dataset.labels.tolist() == [0, 1]
    assert dataset.class_indices is None  # all 1000 classes are scored, whatever part of the set is there
    with pytest.raises(ValueError, match=r"unknown corruption .*'snow'; valid: fog"):
        imagenet_c(tmp_path, "snow")
    with pytest.raises(ValueError, match=r"unknown severity .* 3; valid: 1, 5"):
        imagenet_c(tmp_path, "fog", 3)
    with pytest.raises(ValueError, match="imagenet_c"):
        open_dataset(tmp_path)


def test_a_tree_like_imagenet_c_with_other_classes(tmp_path):
    tree(tmp_path / "fog" / "5", ["cat", "ant"], n=1)
    dataset = imagenet_c(tmp_path, "fog", 5, size=SIZE)
    assert dataset.classes == ["ant", "cat"]
    assert dataset.labels.tolist() == [0, 1]


def test_errors_for_missing_data_say_what_was_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.*200 synset folders.*hendrycks/imagenet-r"):
        open_dataset(tmp_path / "nowhere", kind="imagenet-r")
    with pytest.raises(FileNotFoundError, match="2235448"):
        imagenet_c(tmp_path / "nowhere", "fog")
    with pytest.raises(FileNotFoundError, match="holds no images"):
        open_dataset(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no images"):
        open_dataset(tmp_path, kind="imagenet")
    with pytest.raises(FileNotFoundError, match="no tar"):
        open_dataset(tmp_path / "x-{0..3}.tar")
    with pytest.raises(FileNotFoundError, match="folder cats"):
        open_dataset(tree(tmp_path, ["cats"]), kind="imagenet-a")
    with pytest.raises(ValueError, match="imagenet-sketch"):
        open_dataset(tmp_path, kind="imagenet-s")
    with pytest.raises(ValueError, match="raise, skip"):
        open_dataset(tmp_path, on_error="ignore")


def test_images_outside_the_class_folders_are_an_error(tmp_path):
    root = tree(tmp_path / "a", ["cats"])
    Image.new("RGB", (8, 8)).save(root / "loose.png")
    with pytest.raises(ValueError, match=r"holds images \(loose.png, ...\) beside the folder cats"):
        open_dataset(root)
    tree(tmp_path / "b" / "2024", ["01"])
    with pytest.raises(ValueError, match=r"2024 holds no images but the folder 01"):
        open_dataset(tmp_path / "b")


@pytest.mark.parametrize("folders", [["."], ["cats", "dogs"]])
def test_tiff_files_are_left_out_with_one_warning(tmp_path, folders):
    tree(tmp_path, folders)
    for folder in folders:
        for name in ("a.tif", "b.TIFF"):
            (tmp_path / folder / name).write_bytes(encode(pixels(0), "TIFF"))
    n = 2 * len(folders)
    with pytest.warns(
        UserWarning, match=rf"left out {n} image file\(s\) of other formats \(.*a\.tif, .*only JPEG, PNG"
    ) as caught:
        dataset = open_small(tmp_path)
    assert len(caught) == 1
    assert len(dataset) == n
    assert len(list(dataset)) == n


@pytest.mark.parametrize("folder", [".", "cats"])
def test_a_folder_of_tiff_files_only_is_an_error(tmp_path, folder):
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "a.tif").write_bytes(encode(pixels(0), "TIFF"))
    with pytest.raises(FileNotFoundError, match=r"left out 1 image file\(s\) of other formats .*only JPEG, PNG"):
        open_small(tmp_path)


def test_tiff_members_of_a_tar_are_left_out_with_one_warning(tmp_path):
    members = [("a.tif", encode(pixels(0), "TIFF")), ("a.cls", b"1")]
    with pytest.raises(ValueError, match=r"no KEY\.jpg .*left out 1 image file\(s\) of other formats \(a\.tif"):
        open_small(tar(tmp_path / "tiff.tar", members))
    members += [("b.png", encode(pixels(0))), ("b.cls", b"1")]
    with pytest.warns(UserWarning, match=r"left out 1 image file\(s\) of other formats \(a\.tif"):
        dataset = open_small(tar(tmp_path / "both.tar", members))
    assert dataset.names == ["b"]


def test_unreadable_images_are_named_or_skipped_and_counted(tmp_path):
    tree(tmp_path, ["a", "b"])
    (tmp_path / "a" / "1.png").write_bytes(encode(pixels(0))[:500])
    (tmp_path / "b" / "2.png").write_text("no image")
    with pytest.raises(ImageError, match=r"a/1\.png: .*truncated"):
        list(open_small(tmp_path))
    dataset = open_small(tmp_path, on_error="skip")
    for _ in range(2):
        assert [label for _, label in dataset] == [0, 1, 1]
        assert [name for name, _ in dataset.skipped] == ["a/1.png", "b/2.png"]
    assert "not an image" in dataset.skipped[1][1]


# --- tars


@pytest.fixture
def shards(tmp_path):
    """Two shards of two images each; and the same four in a flat folder."""
    folder = tmp_path / "same"
    folder.mkdir()
    for k in range(2):
        members = []
        for j in range(2):
            data = encode(pixels(10 * k + j, 40, 50), "JPEG")
            (folder / f"{k}{j}.jpg").write_bytes(data)
            members += [
                (f"{k}{j}.jpg", data),
                (f"{k}{j}.cls", b"%d\n" % (7 * k + j)),
                (f"{k}{j}.json", b"{}"),
            ]
        tar(tmp_path / f"val-{k}.tar", members)
    return tmp_path


@pytest.mark.parametrize("pattern", ["val-{0..1}.tar", "val-*.tar", "val-0.tar::val-1.tar", None])
def test_tars_equal_the_folder(shards, pattern, monkeypatch):
    monkeypatch.chdir(shards)
    dataset = open_small(pattern or ["val-0.tar", f"file://{shards}/val-1.tar"])
    folder = open_small(shards / "same")
    assert [f"{dataset.name(i)}.jpg" for i in range(4)] == folder.names
    assert dataset.labels.tolist() == [0, 1, 7, 8]
    for i in (3, 0, 2, 1):
        assert torch.equal(dataset[i][0], folder[i][0])


def test_samples_are_those_of_webdataset(shards):
    urls = [str(shards / f"val-{k}.tar") for k in range(2)]
    dataset = open_small(urls)
    theirs = []
    for url in urls:
        with open(url, "rb") as file:
            theirs += group_by_keys(tar_file_expander([{"url": url, "stream": file}]))
    assert [s["__key__"] for s in theirs] == dataset.names
    assert [int(s["cls"]) for s in theirs] == dataset.labels.tolist()
    assert [s["jpg"] for s in theirs] == [dataset.encoded(i)[0] for i in range(4)]


@pytest.mark.skipif(which("curl") is None, reason="webdataset opens URLs with curl")
def test_tars_by_url_are_fetched_once(shards, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    asked = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            asked.append(self.path)

    (shards / "page.tar").write_text("<html>")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=shards))
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/"
    try:
        for _ in range(2):
            dataset = open_small(url + "val-{0..1}.tar", cache_dir=tmp_path / "cache")
            assert dataset.labels.tolist() == [0, 1, 7, 8]
            assert dataset[3][0].shape == (3, SIZE, SIZE)
        assert asked == ["/val-0.tar", "/val-1.tar"]
        with pytest.raises(OSError, match=r"could not fetch .*val-9\.tar"):
            open_small(url + "val-9.tar", cache_dir=tmp_path / "cache")
        with pytest.raises(ValueError, match=r"page\.tar is not a whole, uncompressed tar"):
            open_small(url + "page.tar", cache_dir=tmp_path / "cache")
        assert len(list((tmp_path / "cache").iterdir())) == 2  # neither half nor broken shards are kept
    finally:
        server.shutdown()
        server.server_close()


def link(kind, target):
    info = tarfile.TarInfo("0.jpg")
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "member",
    [
        "/etc/0.jpg",
        "../0.jpg",
        "a/../../0.jpg",
        link(tarfile.SYMTYPE, "/etc/hostname"),
        link(tarfile.LNKTYPE, "x"),
    ],
)
def test_tar_members_outside_the_archive_are_rejected(tmp_path, member):
    data = b"" if isinstance(member, tarfile.TarInfo) else b"x"
    with pytest.raises(ValueError, match="rejected"):
        open_dataset(tar(tmp_path / "x.tar", [("ok.jpg", b"x"), (member, data)]))


def test_a_shell_command_is_not_a_url(tmp_path):
    with pytest.raises(ValueError, match="scheme of a URL 'pipe'"):
        open_dataset(f"pipe:touch {tmp_path}/run; cat x.tar")
    assert not list(tmp_path.iterdir())


def test_broken_tars_say_what_is_wrong(tmp_path, shards):
    whole = (shards / "val-0.tar").read_bytes()
    second = whole.index(b"01.jpg")  # the header of the second sample
    broken = {
        "cut": whole[:1500],
        "cut-between": whole[:second],
        "damaged": whole[: second + 100] + b"?" + whole[second + 101 :],
        "text": b"no tar " * 200,
        "gz": zlib.compress(whole),
    }
    for name, data in broken.items():
        (tmp_path / f"{name}.tar").write_bytes(data)
        with pytest.raises(ValueError, match=rf"{name}\.tar is not a whole, uncompressed tar"):
            open_dataset(tmp_path / f"{name}.tar")
    jpg = encode(pixels(0), "JPEG")
    with pytest.raises(ValueError, match=r"a\.cls should hold a class number; it holds b'cat'"):
        open_dataset(tar(tmp_path / "x.tar", [("a.jpg", jpg), ("a.cls", b"cat")]))
    with pytest.raises(ValueError, match=r"b\.jpg has no \.cls"):
        open_dataset(tar(tmp_path / "x.tar", [("a.jpg", jpg), ("a.cls", b"1"), ("b.jpg", jpg)]))
    with pytest.raises(ValueError, match=r"no KEY\.jpg"):
        open_dataset(tar(tmp_path / "x.tar", [("a.txt", b"1")]))
    assert open_dataset(tar(tmp_path / "x.tar", [("a.jpg", jpg)])).labels is None


def test_unreadable_members_are_named_or_skipped(tmp_path):
    jpg = encode(pixels(0), "JPEG")
    path = tar(tmp_path / "x.tar", [("a.jpg", jpg), ("a.cls", b"1"), ("b.jpg", jpg[:-99]), ("b.cls", b"2")])
    with pytest.raises(ImageError, match=r"x\.tar: b\.jpg: .*truncated"):
        open_dataset(path)[1]
    dataset = open_small(path, on_error="skip")
    assert [label for _, label in dataset] == [1]
    assert [name for name, _ in dataset.skipped] == ["b"]


def test_a_tar_member_that_claims_terabytes_is_rejected(tmp_path):
    info = tarfile.TarInfo("a.jpg")
    info.size = 2**40
    (tmp_path / "x.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(ValueError, match="not a whole"):
        open_dataset(tmp_path / "x.tar")
    with open(tmp_path / "x.tar", "r+b") as file:
        file.truncate(2**40 + 2048)  # a sparse file that keeps the promise
    with pytest.raises(ImageError, match=r"a\.jpg: 1,099,511,627,776 bytes"):
        open_dataset(tmp_path / "x.tar")[0]
