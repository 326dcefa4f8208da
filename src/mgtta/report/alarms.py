"""What a guard did, in words for the report."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

ACTIONS = ("rollback", "slow", "source", "pause")  # as in mgtta.adaptation.guarded, which imports torch


def guard_words(records: Iterable[Mapping[str, Any]]) -> str:
    """A sentence on the alarms in these records, by method and domain, after a space; empty where there are none."""
    parts = []
    for record in records:
        events = record.get("events")
        known = [e.get("action") for e in events if isinstance(e, Mapping)] if isinstance(events, list) else []
        counts = Counter(action for action in known if action in ACTIONS)
        if counts:
            where = re.sub(r"[^\w .:/-]", "?", f"{record.get('method')} on {record.get('domain')}")
            parts.append(f"{where}: {', '.join(f'{n} x {action}' for action, n in counts.items())}")
    return f" The guard acted ({'; '.join(parts)})." if parts else ""
