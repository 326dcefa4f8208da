"""`mgtta serve`: the options of `mgtta.serve.run.serve`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from mgtta.cli.errors import plain_warnings
from mgtta.cli.inputs import device_of
from mgtta.cli.options import Checkpoint, Device, Model, NumClasses, Source, settings

Method = Annotated[str, typer.Option(help="See `mgtta list`.")]
State = Annotated[Path, typer.Option(help="Folder for the adapted states of all streams.")]
Setting = Annotated[list[str], typer.Option("--set", help="A setting of the method, such as lr=5e-3; repeatable.")]
Labels = Annotated[Path | None, typer.Option(help="Names of the classes, one in a line.")]
Host = Annotated[str, typer.Option(help="Address to listen on; one that others can reach needs --token.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any that is free.")]
Token = Annotated[Path | None, typer.Option(help="File with the token that clients must send.")]
LoadedStreams = Annotated[int, typer.Option(min=1, help="Streams in memory; others are saved, and loaded again.")]
Guarded = Annotated[bool, typer.Option("--guard", help="Watch each stream for collapse, and undo it.")]
Schedule = Annotated[str, typer.Option(help="always; auto: learn mostly after a shift.")]
OnRay = Annotated[
    str | None, typer.Option("--ray", help="Compute on a Ray cluster, at this address or on this machine's own.")
]
Replicas = Annotated[int, typer.Option(min=1, help="With --ray: processes that compute, of one CPU each.")]
Calibrated = Annotated[
    Path | None,
    typer.Option("--calibration", help="File of mgtta.save_calibration, for estimates of accuracy."),
]
Thumbnails = Annotated[int, typer.Option(min=0, help="Last pictures of a stream in the live view; 0 for none.")]
SaveSeconds = Annotated[float, typer.Option(min=0, help="Seconds from a change to its save, which a kill loses.")]


def serve(
    model: Model = "glyphs_vit",
    checkpoint: Checkpoint = None,
    num_classes: NumClasses = None,
    source: Source = None,
    state: State = Path("runs/serve"),
    method: Method = "mgtta+",
    setting: Setting = [],
    guard: Guarded = False,
    schedule: Schedule = "always",
    labels: Labels = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    token: Token = None,
    loaded_streams: LoadedStreams = 64,
    save_seconds: SaveSeconds = 10.0,
    thumbnails: Thumbnails = 12,
    calibration: Calibrated = None,
    ray: OnRay = None,
    replicas: Replicas = 2,
    device: Device = None,
) -> None:
    """Answer images over HTTP, and adapt to each stream of them. Without options: a model that reads characters."""
    import mgtta
    from mgtta._lib.shipped import shipped
    from mgtta.methods.registry import SOURCE, recipe

    try:
        from mgtta.serve import run
    except ModuleNotFoundError as error:
        raise ImportError(f"mgtta serve needs {error.name}: pip install 'mgtta[serve]'") from error
    from mgtta.serve.queue import Limits

    chosen = {"guard": guard, "schedule": schedule} | settings(setting)
    names = run.read_labels(labels) if labels else None
    if model in shipped("models"):
        classes, own = run.defaults_for_embedded(model, method)
        chosen = own | chosen
        names = names or classes
        source = source or model
    if SOURCE in recipe(method).needs:
        if source is None:
            raise ValueError("source statistics are needed: --source FILE, which `mgtta source` writes")
        chosen["source"] = mgtta.load_source(source)
    arguments: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    classifier = mgtta.load_model(model, checkpoint=checkpoint, **arguments).to(device_of(device))
    with plain_warnings():
        run.serve(
            classifier,
            method,
            state,
            host=host,
            port=port,
            labels=names,
            token=run.read_token(token) if token else None,
            limits=Limits(loaded_streams=loaded_streams, save_seconds=save_seconds, thumbnails=thumbnails),
            settings=chosen,
            calibration=mgtta.load_calibration(calibration) if calibration else None,
            ray=ray,
            replicas=replicas,
            started=lambda address: typer.echo(f"serving {model} with {method} at {address}"),
        )
