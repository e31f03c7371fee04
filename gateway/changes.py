"""What an operator's change has changed, in few words for the audit log: of a policy, and of the directory of records.

Pure. Promises: no credential is in what is told: of a key its id and the start of its digest, of an address all but its user
and password.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gateway.edge.operations import Changed
from gateway.evidence.store import Stamp
from gateway.policy import Policy

MAX_NAMES = 200
_USERINFO = re.compile(r"(?<=://)[^/@]*@")


def of_policy(old: Policy, new: Policy) -> Changed:
    """The settings that differ, by dotted name, before and after; a name that is in one alone came or went."""
    before, after = _settings(old), _settings(new)
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return Changed(
        {name: before[name] for name in names if name in before}, {name: after[name] for name in names if name in after}
    )


def of_records(old: Mapping[str, Stamp], new: Mapping[str, Stamp]) -> Changed:
    """The files that went and those that came or are new, at most 200 of each."""
    gone = sorted(name for name in old if name not in new)
    came = sorted(name for name, stamp in new.items() if old.get(name) != stamp)
    return Changed({"gone": gone[:MAX_NAMES]}, {"came": came[:MAX_NAMES]})


def without_credentials(text: str) -> str:
    """The text, and of the addresses in it all but user and password."""
    return _USERINFO.sub("", text)


def _settings(policy: Policy) -> dict[str, Any]:
    document = policy.model_dump(mode="json", by_alias=True)
    document["keys"] = {key.pop("id"): {**key, "hash": key["hash"][:19]} for key in document["keys"]}
    return dict(_leaves(document, ""))


def _leaves(value: Any, name: str) -> Any:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, without_credentials(value) if isinstance(value, str) else value
