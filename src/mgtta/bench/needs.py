"""What a benchmark must give to a method, from the declaration of its recipe."""

from mgtta.methods.registry import FISHER, GENERATOR, SOURCE, recipe


def needs_source(method: str) -> bool:
    """Return whether the method compares with statistics of the source."""
    return SOURCE in recipe(method).needs


def needs_fisher(method: str) -> bool:
    """Return whether the method uses the Fisher information of the source model."""
    return FISHER in recipe(method).needs


def needs_clean_images(method: str, source_is_known: bool) -> bool:
    """Return whether clean images are needed before the method can be made."""
    return needs_fisher(method) or (needs_source(method) and not source_is_known)


def takes_mirror(method: str) -> bool:
    """Return whether the method can be told that mirrored images keep their class."""
    return "mirror" in recipe(method).settings


def takes_trade_off(method: str) -> bool:
    """Return whether the method weighs two losses, by the paper's lambda."""
    return "trade_off" in recipe(method).settings


def takes_generator(method: str) -> bool:
    """Return whether the method takes a generator, be it as one of several optimizers."""
    return "generator" in recipe(method).settings


def is_moved_by_generator(method: str) -> bool:
    """Return whether a generator is the method's only optimizer."""
    return GENERATOR in recipe(method).needs


def default_generator(method: str) -> str | None:
    """Return the generator of the method's recipe; None if it takes none."""
    return recipe(method).settings.get("generator")


def default_rate(method: str) -> float | None:
    """Return the learning rate of the method's recipe; None if it has none."""
    descent = recipe(method).descent
    if descent is None:
        return None
    return descent.lr


def check_known(method: str) -> None:
    """Raise an error that lists the valid names if there is no such method."""
    recipe(method)
