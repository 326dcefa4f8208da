"""MGTTA+ without the learned optimizer: the same objective and options, moved by Adam or by SGD. Ours."""

from mgtta.methods._descent import Descent, constant_rate
from mgtta.methods.mgtta_plus import OPTIONS, RESNETS, MGTTAPlus
from mgtta.methods.registry import SOURCE, register

register(
    "plus_adam",
    needs=[SOURCE],
    descent=Descent(5e-3, "adam", fixed=True),
    what="MGTTA+ moved by Adam instead of the learned optimizer (ours).",
    rate_at=constant_rate,
    resnets=RESNETS,
    options=OPTIONS,
    revision=7,
    passes=(2, 2),
)(MGTTAPlus)
register(
    "plus_sgd",
    needs=[SOURCE],
    descent=Descent(0.05, "sgd", momentum=0.0, fixed=True),
    what="MGTTA+ moved by plain SGD instead of the learned optimizer (ours).",
    rate_at=constant_rate,
    resnets={"source_share": RESNETS["source_share"]},
    options=OPTIONS,
    revision=7,
    passes=(2, 2),
)(MGTTAPlus)
