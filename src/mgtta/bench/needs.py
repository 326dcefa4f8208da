"""What a method needs and takes, found by the names of its recipe's settings: the only place that looks at these."""

from mgtta.methods.create import recipe_settings


def needs_source(method: str) -> bool:
    """Return whether the method compares with statistics of the source."""
    return "source" in recipe_settings(method)


def needs_fisher(method: str) -> bool:
    """Return whether the method uses the Fisher information of the source model."""
    return "fisher" in recipe_settings(method)


def needs_clean_images(method: str, source_is_known: bool) -> bool:
    """Return whether clean images are needed before the method can be made."""
    return needs_fisher(method) or (needs_source(method) and not source_is_known)


def takes_mirror(method: str) -> bool:
    """Return whether the method can be told that mirrored images keep their class."""
    return "mirror" in recipe_settings(method)


def takes_trade_off(method: str) -> bool:
    """Return whether the method weighs two losses, by the paper's lambda."""
    return "trade_off" in recipe_settings(method)


def takes_generator(method: str) -> bool:
    """Return whether the method takes a generator, be it as one of several optimizers."""
    return "generator" in recipe_settings(method)


def is_moved_by_generator(method: str) -> bool:
    """Return whether a generator is the method's only optimizer."""
    known = recipe_settings(method)
    return "generator" in known and "optimizer" not in known


def default_generator(method: str) -> str | None:
    """Return the generator of the method's recipe; None if it takes none."""
    return recipe_settings(method).get("generator")


def default_rate(method: str) -> float | None:
    """Return the learning rate of the method's recipe; None if it has none."""
    return recipe_settings(method).get("lr")


def check_known(method: str) -> None:
    """Raise an error that lists the valid names if there is no such method."""
    recipe_settings(method)
