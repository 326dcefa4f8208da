"""What a guard did, in words for the report."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

ACTIONS = ("slow", "rest", "rollback", "source", "pause")  # of mgtta.adaptation.guarded, and of version 0.1


def guard_words(records: Iterable[Mapping[str, Any]]) -> str:
    """Return a sentence on the alarms by method and domain, after a space; empty where there are none."""
    parts = []
    for record in records:
        counts = _actions(record.get("events"))
        if counts:
            where = re.sub(r"[^\w .:/-]", "?", f"{record.get('method')} on {record.get('domain')}")
            parts.append(f"{where}: {', '.join(f'{n} x {action}' for action, n in counts.items())}")
    if not parts:
        return ""
    return f" The guard acted ({'; '.join(parts)})."


def _actions(events: Any) -> Counter[str]:
    if not isinstance(events, list):
        return Counter()
    found = (event.get("action") for event in events if isinstance(event, Mapping))
    return Counter(action for action in found if action in ACTIONS)
